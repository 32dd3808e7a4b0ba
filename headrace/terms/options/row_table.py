"""What the user chooses about row tables: how many rows, beside which blocks, and how many of them a token reads."""

import math
from dataclasses import dataclass
from typing import ClassVar

from headrace.terms.errors import ConfigError
from headrace.terms.options.declared import option
from headrace.terms.options.gradient import GradientWay
from headrace.terms.options.option_kinds import OneOf, Text, Whole

EXACT, LAZY, DENSE = "exact", "lazy", "dense"


@dataclass(frozen=True, kw_only=True)
class Table(GradientWay):
    """A table of rows beside feed-forward parts (MEFT, Hao et al. 2024), found by product keys (Lample et al. 2019)."""

    name: ClassVar[str] = "table"
    named_by: ClassVar[str] = "adapter"
    gradient_dtype: ClassVar[str | None] = "float32"
    merges: ClassVar[bool] = False

    rows: int = option(4096, Whole(1, 1 << 30), row="rows of each table: the square of a whole number")
    layers: str | None = option(
        None,
        Text(),
        row="blocks that get a table beside their feed-forward part, counted from 0: `8+16`",
        words="those at a third and at two thirds",
    )
    top: int = option(32, Whole(1, 1 << 16), row="rows that a token reads")
    policy: str = option(
        EXACT,
        OneOf((EXACT, LAZY, DENSE)),
        row="`exact`: a step reads and writes the rows that it touches, and others catch up when they are read: the bits of "
        "`dense`, which updates all rows in each step. `lazy`: rows that no token reads stay as they are (SparseAdam)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        root = math.isqrt(self.rows)
        if root * root != self.rows:
            raise ConfigError(f"rows: {self.rows} is no square; give {max(1, root) ** 2} or {(root + 1) ** 2}")
        if self.top > self.rows:
            raise ConfigError(f"top: {self.top} rows for each token, but there are {self.rows}; give at most as many")
        if self.layers is not None and not all(word.isdecimal() for word in _words(self.layers)):
            raise ConfigError(f"layers: {self.layers!r} are no numbers of blocks; join them with +, from 0: 8+16")

    def blocks(self, num_blocks: int) -> tuple[int, ...]:
        """Return which of a model's blocks get a table, ascending.

        Raises:
            ConfigError: one of them is not there.
        """
        if self.layers is None:
            return tuple(sorted({num_blocks // 3, 2 * num_blocks // 3}))
        found = sorted({int(word) for word in _words(self.layers)})
        if found[-1] >= num_blocks:
            raise ConfigError(f"adapter: layers: there is no block {found[-1]}; the model has blocks 0 to {num_blocks - 1}")
        return tuple(found)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split("+")]
