"""Adapters: only small matrices beside frozen ones are trained (`model/adapters.py` says what they compute).

The model's code is imported once a chain is there: choices that exclude one another are refused before transformers is loaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from headrace.terms.adapter import Lora
from headrace.terms.layout import UnitLayout, part
from headrace.update.wires.dense import DenseWire

if TYPE_CHECKING:
    from headrace.model import Chain
    from headrace.model.adapters import Adapters
    from headrace.model.binding import GradientSink


@dataclass(frozen=True)
class AdapterWire(DenseWire):
    """Trains the adapters that `settings` ask for. Before `of` a chain is known, it has no more than a name."""

    settings: Lora
    seed: int = 0
    adapters: "Adapters | None" = None

    @property
    def name(self) -> str:  # type: ignore[override]
        """The kind and its settings. A run keeps those that it began with."""
        return self.settings.text

    def of(self, chain: "Chain") -> "AdapterWire":
        """Return the wire of the adapters of a chain's blocks.

        Raises:
            ConfigError: no block has a module that was asked for, or a rank is above the sides of its matrix.
        """
        from headrace.model.adapters import Adapters

        adapters = Adapters.of(chain.model, chain.layouts, chain.num_blocks, self.settings, self.seed, chain.stored_type)
        return AdapterWire(self.settings, self.seed, adapters)

    @property
    def known(self) -> "Adapters":
        """The adapters, once the chain is known."""
        assert self.adapters is not None, "the adapters of a chain are known"
        return self.adapters

    def trained(self, unit: int, layout: UnitLayout, *, is_block: bool) -> UnitLayout | None:
        """Return where the adapters of a unit lie; nothing else is trained."""
        return self.known.layouts.get(unit)

    def bind(self, unit: int, trained: UnitLayout, weights: Tensor, sink: "GradientSink | None") -> None:
        """Let the block compute with its adapters; see `Adapters.bind`."""
        self.known.bind(unit, trained, weights, sink)

    def release(self, unit: int) -> None:
        """Drop all references to the adapters' memory."""
        self.known.release(unit)

    def first_weights(self, unit: int, layout: UnitLayout, trained: UnitLayout, weights: Tensor) -> Tensor:
        """Return adapters that change nothing yet."""
        first = weights.new_empty(trained.num_elements)
        self.known.first(unit, trained, _views(layout, weights), first)
        return first

    def complete(self, unit: int, layout: UnitLayout, slot: Tensor, trained: UnitLayout, weights: Tensor) -> None:
        """Merge a block's matrices with what its adapters learned, for export only."""
        self.known.merge(unit, _views(trained, weights), _views(layout, slot))

    def making_bytes(self, layout: UnitLayout) -> int:
        """Return the bytes of a block's adapters where compute reads them, if that is elsewhere; or the bytes for merging."""
        found = {own.name: unit for unit, own in self.known.layouts.items()}
        unit = found[layout.name]
        from headrace.model.adapters import merging_bytes

        return max(4 * self.known.layouts[unit].num_elements, merging_bytes(self.known.products[unit]))


def _views(layout: UnitLayout, flat: Tensor) -> Mapping[str, Tensor]:
    return {spec.name: part(flat, spec).view(spec.shape) for spec in layout.parameters}
