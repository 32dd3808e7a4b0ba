"""Where the weights of a generation come from: a model's own files, or a store. Both keep one contract.

The seam is `make`: there a unit's bytes as they were read become the slot that compute reads.
"""

from dataclasses import replace
from typing import Protocol

import torch

from headrace.files import ExtentReader, Reader
from headrace.flow.weights.expert_source import ExpertSource, FileSource, expert_figures
from headrace.flow.weights.weights import StoreSource, WeightSource
from headrace.model import Chain, WeightMap
from headrace.model.blocks.beside import StoredBeside
from headrace.model.directory.in_place import StoredUnit, paths_of, stored_units
from headrace.model.kernels.packed import PackedBlocks, packed_bytes
from headrace.model.parts.banks import find_experts
from headrace.model.seats.bank_check import why_no_banks
from headrace.model.streams.stored_experts import NotStoredSingly, stored_experts
from headrace.terms.events import Sink
from headrace.terms.forms import UnitFigures, home_of
from headrace.terms.layout import UnitLayout, planes_with
from headrace.terms.sizes import format_bytes


class GenerationSource(WeightSource, Protocol):
    """The weights of a generation, with what its plan must know of them."""

    @property
    def layouts(self) -> tuple[UnitLayout, ...]:
        """Where parameters lie in slots."""

    @property
    def figures(self) -> tuple[UnitFigures, ...]:
        """The units as a plan sees them."""

    @property
    def by_experts(self) -> ExpertSource | None:
        """The same weights with experts that come one at a time; None where they cannot."""

    @property
    def bytes_read(self) -> int:
        """Bytes read so far."""

    def pack(self, unit: int, stored: torch.Tensor, into: torch.Tensor, blocks: PackedBlocks) -> None:
        """Add to `blocks` the packed matrices of a unit whose slot `into` was made of `stored`, and stays."""

    def close(self) -> None:
        """Close the files."""


class ShardSource(FileSource):
    """The weights in a model's own safetensors files, and adapters beside them. `chain` is laid out like the files from here
    on.

    `paths` are the files that are read, except for what is made whole.
    """

    def __init__(
        self, chain: Chain, weights: WeightMap, sink: Sink, *, on_cpu: bool, adapters: StoredBeside | None = None
    ) -> None:
        units = stored_units(chain.layouts, weights, chain.dtype, on_cpu=on_cpu)
        self.paths = paths_of(units)
        plane = planes_with(chain.compute_dtype, ()).weight
        super().__init__(units, ExtentReader(self.paths, sink=sink), weights, plane)
        self.figures = tuple(_figures_of(index, unit, chain, on_cpu) for index, unit in enumerate(self._units))
        self.by_experts, self.why_whole = self._by_experts(chain, on_cpu=on_cpu)
        if adapters is not None:
            adapters.bind(chain.device)
            elements = {unit: layout.num_elements for unit, layout in adapters.adapters.layouts.items()}
            self.figures = tuple(
                replace(each, trained_elements=elements[unit], is_beside=True) if unit in elements else each
                for unit, each in enumerate(self.figures)
            )
            if self.by_experts is not None:
                self.by_experts, self.why_whole = None, "blocks have adapters"

    def _by_experts(self, chain: Chain, *, on_cpu: bool) -> tuple[ExpertSource | None, str]:
        """Return the same weights with single experts, or why experts come with their blocks."""
        blocks = find_experts(chain.model, chain.runner.blocks)
        if not any(blocks):
            return None, ""
        if reason := why_no_banks(chain.config):
            return None, reason
        try:
            stored = stored_experts(self._units, blocks, self._weights, chain.dtype, on_cpu=on_cpu)
        except NotStoredSingly as error:
            return None, str(error)
        figures = tuple(_figures_of(index, unit, chain, on_cpu) for index, unit in enumerate(stored.commons))
        of_experts = expert_figures(stored, figures, chain.dtype, on_cpu=on_cpu)
        return ExpertSource(stored, figures, blocks, self.reader, self._weights, self._plane, of_experts), ""

    def read_by(self, reader: Reader) -> None:
        """Read by another reader of the same files from now on; it is closed with the source."""
        self.reader.close()
        self.reader = reader
        if self.by_experts is not None:
            self.by_experts.reader = reader

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know about how weights are read."""
        whole = sum(not unit.extents and unit.layout.num_elements > 0 for unit in self._units)
        coded = [number for number, unit in enumerate(self._units) if unit.decodings]
        notes = [f"experts come with their whole block: {self.why_whole}"] if self.why_whole else []
        if whole:
            notes.append(
                f"{whole} of {len(self._units)} units are stored in another form than computed, and converted for each pass"
            )
        if coded:
            read = sum(self._units[unit].num_bytes for unit in coded)
            dense = sum(self._units[unit].layout.num_elements for unit in coded) * self._plane.bytes_per_element
            notes.append(
                f"weights of {len(coded)} of {len(self._units)} units stay coded, as in the files: {format_bytes(read)} for "
                f"{format_bytes(dense)}; each block is decoded when it runs"
            )
        return tuple(notes)

    def pack(self, unit: int, stored: torch.Tensor, into: torch.Tensor, blocks: PackedBlocks) -> None:
        """See `GenerationSource.pack`."""
        blocks.add(self._units[unit], stored, into)

    def close(self) -> None:
        """Close the files."""
        self.reader.close()


class RunSource(StoreSource):
    """The weights of the last commit in a run's store."""

    by_experts = None

    @property
    def layouts(self) -> tuple[UnitLayout, ...]:
        """See `GenerationSource.layouts`."""
        return tuple(self.store.manifest.layouts)

    @property
    def figures(self) -> tuple[UnitFigures, ...]:
        """See `GenerationSource.figures`."""
        return tuple(_read_only(form.figures) for form in self.maker.forms)

    @property
    def bytes_read(self) -> int:
        """Bytes that the store has read so far."""
        return self.store.bytes_read

    def pack(self, unit: int, stored: torch.Tensor, into: torch.Tensor, blocks: PackedBlocks) -> None:
        """See `GenerationSource.pack`: units of a run have no packed bytes in their figures, so nothing is done."""

    def close(self) -> None:
        """Close the store."""
        self.store.close()


def _read_only(figures: UnitFigures) -> UnitFigures:
    """Return the figures of a unit that nothing updates: weights that were trained in place are only read."""
    return replace(figures, trained_elements=0, cuts=()) if figures.in_place else figures


def _figures_of(index: int, unit: StoredUnit, chain: Chain, on_cpu: bool) -> UnitFigures:
    packed, packing = packed_bytes(unit, chain.dtype) if on_cpu else (0, 0)
    return UnitFigures(
        name=unit.layout.name,
        num_elements=unit.layout.num_elements,
        num_parameters=unit.layout.num_parameters,
        home=home_of(index, chain.num_blocks),
        trained_elements=0,
        stored_bytes=unit.num_bytes if unit.is_made else None,
        making_bytes=unit.making_bytes(chain.dtype, on_host=on_cpu),
        decodes=unit.decodes,
        packed_bytes=packed,
        packing_bytes=packing,
    )
