"""Tables of rows beside the feed-forward parts of some blocks; `row_table` says what one computes.

Keys are bound with their unit. Values are bound, too, or a source gives the rows that a pass touches (`TableRowSource`).

Invariant: what a block computes with a table bound is what the module that `row_table.load` makes computes.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headrace.model.adapters.row_table import KEYS, VALUES, WeightedRows, added, different_rows, look_up
from headrace.model.blocks.beside import BesideKind
from headrace.model.blocks.find_blocks import find_blocks
from headrace.terms.embedding_rows import TableFigures
from headrace.terms.errors import ConfigError
from headrace.terms.layout import UnitLayout, lay_out, part
from headrace.terms.options.row_table import DENSE, Table

# What architectures call the feed-forward part of a block, the routed one of a mixture first.
_FEED_FORWARD = ("block_sparse_moe", "mlp", "feed_forward", "ffn", "mlp_block")
_NOTE = (
    "peft does not read row tables. `row_table.py` beside the weights needs torch and safetensors alone: "
    "`row_table.load(model, DIR)` gives a model of transformers the tables in DIR"
)


class TableRowSource(Protocol):
    """Gives the newest rows of tables, and takes their gradients."""

    def gather(self, unit: int, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return rows `ids`, which ascend, of a unit's table: (n, width)."""

    def add(self, unit: int, ids: NDArray[np.int64], gradient: NDArray[np.float32]) -> None:
        """Add the gradients of rows `ids` to those that came before in this step."""

    def weights(self, unit: int) -> Iterator[NDArray[np.float32]]:
        """Yield all rows of a unit's table, some at a time."""


@dataclass(frozen=True, kw_only=True)
class RowTables(BesideKind):
    """The tables of a model. Their tensors are called `MODULE.table.keys` and `MODULE.table.values`.

    Attributes:
        settings: how many rows there are, and how many a token reads.
        places: the feed-forward part that has a table, by unit.
        width: numbers of a row.
        by_rows: whether values come from a source, row by row; if not, they lie in the layouts as keys do.
        groups: learning-rate factor and weight decay, by unit.
    """

    settings: Table
    places: Mapping[int, str]
    width: int
    by_rows: bool
    groups: Mapping[int, tuple[float, float]]
    _source: list[TableRowSource] = field(default_factory=list)

    @classmethod
    def of(cls, model: nn.Module, layouts: Sequence[UnitLayout], settings: Table, seed: int = 0) -> "RowTables":
        """Return the tables that `settings` ask for, of a model whose units are laid out so.

        Raises:
            ConfigError: a block that is not there, or has no feed-forward part in a module of its own; or an odd width.
        """
        blocks = find_blocks(model)
        chosen = settings.blocks(len(blocks.modules))
        places = {index + 1: f"{blocks.name}.{index}.{_feed_forward(blocks.modules[index], index)}" for index in chosen}
        width = int(model.config.get_text_config().hidden_size)  # type: ignore[union-attr,operator]
        return cls.over(layouts, settings, places, width, seed, by_rows=settings.policy != DENSE)

    @classmethod
    def over(
        cls,
        layouts: Sequence[UnitLayout],
        settings: Table,
        places: Mapping[int, str],
        width: int,
        seed: int = 0,
        *,
        by_rows: bool = False,
    ) -> "RowTables":
        """Return tables with rows of `width` numbers beside the feed-forward parts `places`, by unit.

        Raises:
            ConfigError: the width is odd.
        """
        if width % 2:
            raise ConfigError(f"adapter: table: hidden states have {width} numbers, which have no halves; train lora")
        shapes: dict[str, tuple[int, ...]] = {KEYS: (2, math.isqrt(settings.rows), width // 2)}
        shapes |= {} if by_rows else {VALUES: (settings.rows, width)}
        groups = {unit: _group(layouts[unit], name) for unit, name in places.items()}
        placed = {unit: _lay_out(layouts[unit].name, name, shapes, groups[unit]) for unit, name in places.items()}
        return cls(
            seed=seed,
            layouts=placed,
            notes=(_NOTE,),
            settings=settings,
            places=dict(places),
            width=width,
            by_rows=by_rows,
            groups=groups,
        )

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors, by name, in the order of a file."""
        values = (self.settings.rows, self.width)
        return {
            name: shape
            for unit, place in self.places.items()
            for name, shape in (
                *((spec.name, spec.shape) for spec in self.layouts[unit].parameters),
                *([(f"{place}.{VALUES}", values)] if self.by_rows else []),
            )
        }

    def tensors(self, unit: int, flat: Tensor) -> dict[str, Iterable[np.ndarray]]:
        """Return a unit's tensors by name, in that order, as arrays that follow one another; values come from the source."""
        values = {f"{self.places[unit]}.{VALUES}": self._source[0].weights(unit)} if self.by_rows else {}
        return super().tensors(unit, flat) | values

    def whole(self) -> "RowTables":
        """Return the same tables with values in their layouts."""
        shapes = {KEYS: (2, math.isqrt(self.settings.rows), self.width // 2), VALUES: (self.settings.rows, self.width)}
        placed = {
            unit: _lay_out(layout.name, self.places[unit], shapes, self.groups[unit]) for unit, layout in self.layouts.items()
        }
        return replace(self, layouts=placed, by_rows=False, _source=[], _bound={})

    def serve(self, source: TableRowSource) -> None:
        """Take values from `source` from now on."""
        self._source[:] = [source]

    def table(self, unit: int) -> TableFigures | None:
        """Return what a plan knows of a unit's table whose values come row by row; None if there is none."""
        has = self.by_rows and unit in self.places
        return TableFigures(rows=self.settings.rows, width=self.width, top=self.settings.top) if has else None

    def install(self, model: nn.Module) -> Callable[[], None]:
        """Let feed-forward parts of `model` add what their tables compute; return the function that undoes it."""
        hooks = [model.get_submodule(name).register_forward_hook(self._hook(unit, name)) for unit, name in self.places.items()]

        def undo() -> None:
            for hook in hooks:
                hook.remove()

        return undo

    def first(self, unit: int, layout: UnitLayout, weights: Mapping[str, Tensor], into: Tensor) -> None:
        """Fill `into`, laid out by `layout`, with keys drawn from the seed and the module's name, and values of zero."""
        into.zero_()
        name = self.places[unit]
        spec = next(each for each in layout.parameters if each.name == f"{name}.{KEYS}")
        seed = hashlib.blake2b(f"{self.seed}/{name}".encode(), digest_size=7).digest()
        bound = 1 / math.sqrt(spec.shape[-1])
        part(into, spec).uniform_(-bound, bound, generator=torch.Generator().manual_seed(int.from_bytes(seed, "little")))

    def merge(self, unit: int, tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
        """Refuse: no matrix computes what a table does.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("merge: a row table is no matrix, and cannot be merged; leave --merge out")

    def merging_bytes(self, unit: int) -> int:
        """Return 0: nothing is merged."""
        return 0

    def _hook(self, unit: int, name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], Any]:
        def add(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            keys, *values = self.bound(name, KEYS, *(() if self.by_rows else (VALUES,)))
            if (found := args[0].shape[-1]) != self.width:
                raise ConfigError(f"adapter: table: {name} takes {found} numbers, hidden states have {self.width}; train lora")
            inputs = args[0].reshape(-1, self.width).to(keys.dtype)
            ids, weights = look_up(inputs, keys, self.settings.top)
            of_rows, ids = (values[0], ids) if values else self._rows(unit, ids, learns=keys.requires_grad)
            return added(output, WeightedRows.apply(of_rows, ids, weights))  # type: ignore[no-untyped-call]

        return add

    def _rows(self, unit: int, ids: Tensor, *, learns: bool) -> tuple[Tensor, Tensor]:
        """Return the rows (n, width) that `ids` name, and where each of these is. If it `learns`, they hand gradients over.

        Without a source, as for a plan, they are zeros.
        """
        different, places = different_rows(ids, self.settings.rows)
        if not self._source:
            return torch.zeros(
                (len(different), self.width), device=ids.device, requires_grad=learns, dtype=torch.float32
            ), places
        source, known = self._source[0], different.cpu().numpy()
        rows = torch.from_numpy(source.gather(unit, known)).to(ids.device).requires_grad_(learns)
        if learns:

            def hand_over(found: Tensor) -> None:
                assert found.grad is not None, "it was just accumulated"
                source.add(unit, known, found.grad.cpu().numpy())
                found.grad = None

            rows.register_post_accumulate_grad_hook(hand_over)  # type: ignore[no-untyped-call]
        return rows, places


def _feed_forward(block: nn.Module, index: int) -> str:
    """Return the name of a block's feed-forward part."""
    names = [name for name, _ in block.named_children()]
    for name in _FEED_FORWARD:
        if name in names:
            return name
    raise ConfigError(
        f"adapter: table: block {index} ({type(block).__name__}) has no feed-forward part in a module of its own; it has "
        f"{', '.join(names)}. Choose other layers, or train lora"
    )


def _group(layout: UnitLayout, name: str) -> tuple[float, float]:
    """Return the learning-rate factor and the weight decay of a table: those of a matrix of its feed-forward part."""
    group = next(each.group for each in layout.parameters if each.is_matrix and each.name.startswith(f"{name}."))
    return layout.groups[group].learning_rate_scale, layout.groups[group].weight_decay


def _lay_out(unit: str, name: str, shapes: Mapping[str, tuple[int, ...]], group: tuple[float, float]) -> UnitLayout:
    return lay_out(unit, [(f"{name}.{end}", shape, group) for end, shape in shapes.items()])
