"""Adapters: only small matrices beside frozen ones are trained (`model/adapters.py` says what they compute).

The model's code is imported once a chain is there: choices that exclude one another are refused before transformers is loaded.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headrace.terms.adapter import ADAPTERS, Lora
from headrace.terms.contradictions import refuse_adapters_and_parts
from headrace.terms.layout import UnitLayout, part
from headrace.terms.optimizer import Optimizer
from headrace.update.wire import Content, ReadTrained, Sink, Wire

if TYPE_CHECKING:
    from headrace.model import Chain, Checkpoint
    from headrace.model.adapter_reading import StoredAdapters
    from headrace.model.adapters import Adapters


@dataclass(frozen=True)
class AdapterWire(Wire):
    """Trains the adapters that `settings` ask for. Before `of` a chain is known, it has no more than a name."""

    ways = tuple(ADAPTERS.values())
    is_beside = True

    settings: Lora
    seed: int = 0
    adapters: "Adapters | None" = None

    def of(self, chain: "Chain") -> "AdapterWire":
        """Return the wire of the adapters of a chain's blocks; itself, if it knows them.

        Raises:
            ConfigError: no block has a module that was asked for, or a rank is above the sides of its matrix.
        """
        if self.adapters is not None:
            return self
        from headrace.model.adapters import Adapters

        adapters = Adapters.of(chain.model, chain.layouts, chain.num_blocks, self.settings, self.seed, chain.stored_type)
        return AdapterWire(self.settings, self.seed, adapters)

    @property
    def known(self) -> "Adapters":
        """The adapters, once the chain is known."""
        assert self.adapters is not None, "the adapters of a chain are known"
        return self.adapters

    def refuse(self, optimizer: Optimizer) -> None:
        """Refuse to train some of a model's own parameters only: none of them is trained."""
        refuse_adapters_and_parts(optimizer.train)

    def trained(self, unit: int, layout: UnitLayout, *, is_block: bool) -> UnitLayout | None:
        """Return where the adapters of a unit lie; nothing else is trained."""
        return self.known.layouts.get(unit)

    @contextmanager
    def beside(self, unit: int, trained: UnitLayout, weights: Tensor, sink: Sink | None) -> Iterator[None]:
        """Let the block compute with its adapters in this context; see `Adapters.bind`."""
        self.known.bind(unit, trained, weights, sink)
        try:
            yield
        finally:
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

    def export_bytes(self, checkpoint: "Checkpoint") -> int:
        """Return the bytes of PEFT's files."""
        from headrace.model.adapter_files import adapter_file_bytes

        return adapter_file_bytes(self.known)

    def export(self, content: Content, directory: Path) -> None:
        """Write the adapters alone, as PEFT's files."""
        from headrace.model.adapter_files import write_adapters

        read = partial(self._flat, content.read_trained)
        write_adapters(directory, self.known, content.chain, content.weights, read, content.notes)

    def stored(self, read_trained: ReadTrained) -> "StoredAdapters":
        """Return the adapters and their newest tensors."""
        from headrace.model.adapter_reading import StoredAdapters

        return StoredAdapters(self.known, {unit: self._flat(read_trained, unit) for unit in self.known.layouts})

    def _flat(self, read_trained: ReadTrained, unit: int) -> Tensor:
        """Return a unit's tensors in the adapters' own layout: a rule may align parameters otherwise."""
        layout, found = self.known.layouts[unit], read_trained(unit)
        flat = torch.zeros(layout.num_elements)
        for spec in layout.parameters:
            part(flat, spec).copy_(found[spec.name])
        return flat


def _views(layout: UnitLayout, flat: Tensor) -> Mapping[str, Tensor]:
    return {spec.name: part(flat, spec).view(spec.shape) for spec in layout.parameters}
