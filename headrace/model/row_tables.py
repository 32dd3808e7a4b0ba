"""Tables of rows beside the feed-forward parts of some blocks; `row_table` says what one computes.

Invariant: what a block computes with a table bound is what the module that `row_table.load` makes computes.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headrace.model.beside import Beside
from headrace.model.find_blocks import find_blocks
from headrace.model.row_table import KEYS, VALUES, added, table_output
from headrace.terms.errors import ConfigError
from headrace.terms.layout import UnitLayout, lay_out, part
from headrace.terms.row_table import Table

# What architectures call the feed-forward part of a block, the routed one of a mixture first.
_FEED_FORWARD = ("block_sparse_moe", "mlp", "feed_forward", "ffn", "mlp_block")
_NOTE = (
    "peft does not read row tables. `row_table.py` beside the weights needs torch and safetensors alone: "
    "`row_table.load(model, DIR)` gives a model of transformers the tables in DIR"
)


@dataclass(frozen=True, kw_only=True)
class RowTables(Beside):
    """The tables of a model. Their tensors are called `MODULE.table.keys` and `MODULE.table.values`.

    Attributes:
        settings: how many rows there are, and how many a token reads.
        places: the feed-forward part that has a table, by unit.
    """

    settings: Table
    places: Mapping[int, str]

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
        return cls.over(layouts, settings, places, width, seed)

    @classmethod
    def over(
        cls, layouts: Sequence[UnitLayout], settings: Table, places: Mapping[int, str], width: int, seed: int = 0
    ) -> "RowTables":
        """Return tables with rows of `width` numbers beside the feed-forward parts `places`, by unit.

        Raises:
            ConfigError: the width is odd.
        """
        if width % 2:
            raise ConfigError(f"adapter: table: hidden states have {width} numbers, which have no halves; train lora")
        shapes = {KEYS: (2, math.isqrt(settings.rows), width // 2), VALUES: (settings.rows, width)}
        placed = {unit: _lay_out(layouts[unit], name, shapes) for unit, name in places.items()}
        return cls(seed=seed, layouts=placed, notes=(_NOTE,), settings=settings, places=dict(places))

    def install(self, model: nn.Module) -> Callable[[], None]:
        """Let feed-forward parts of `model` add what their tables compute; return the function that undoes it."""
        hooks = [model.get_submodule(name).register_forward_hook(self._hook(name)) for name in self.places.values()]

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

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], Any]:
        def add(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            keys, values = self.bound(name, KEYS, VALUES)
            if (found := args[0].shape[-1]) != (width := values.shape[1]):
                raise ConfigError(f"adapter: table: {name} takes {found} numbers, hidden states have {width}; train lora")
            return added(output, table_output(args[0], keys, values, self.settings.top))

        return add


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


def _lay_out(layout: UnitLayout, name: str, shapes: Mapping[str, tuple[int, ...]]) -> UnitLayout:
    """Place a unit's table; it is decayed and learns as a matrix of its feed-forward part would."""
    group = next(each.group for each in layout.parameters if each.is_matrix and each.name.startswith(f"{name}."))
    key = layout.groups[group].learning_rate_scale, layout.groups[group].weight_decay
    return lay_out(layout.name, [(f"{name}.{end}", shape, key) for end, shape in shapes.items()])
