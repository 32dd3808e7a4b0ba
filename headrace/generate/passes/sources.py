"""Where the weights of a generation come from: a model's own files, or a store. Both keep one contract.

The seam is `make`: there a unit's bytes as they were read become the slot that compute reads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Protocol, TypeVar

import torch

from headrace.files import ExtentReader, Reader
from headrace.flow.weights.expert_source import ExpertSource, FileSource, expert_figures
from headrace.flow.weights.weights import StoreSource, WeightSource
from headrace.generate.plan.plan import GenerationPlan
from headrace.model import Chain, WeightMap
from headrace.model.blocks.beside import StoredBeside
from headrace.model.blocks.binding import Bound
from headrace.model.directory.coded_unit import UnitInCodes, as_coded
from headrace.model.directory.in_place import StoredUnit, paths_of, stored_units
from headrace.model.parts.banks import find_experts
from headrace.model.seats.bank_check import why_no_banks
from headrace.model.seats.coded_check import may_stay, why_not_coded
from headrace.model.stored.operand import Workspace
from headrace.model.streams.stored_experts import NotStoredSingly, StoredExperts, stored_experts
from headrace.terms.events import Sink
from headrace.terms.forms import UnitFigures, home_of
from headrace.terms.layout import UnitLayout, planes_with
from headrace.terms.sizes import format_bytes

_T = TypeVar("_T")


class GenerationSource(WeightSource, Protocol):
    """The weights of a generation, with what its plan must know of them.

    `others` give what units have in the place of views of their slots.
    """

    others: Mapping[int, Bound]

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
    def in_codes(self) -> "InCodes | None":
        """The same weights with matrices that stay in their codes; None where none can."""

    @property
    def bytes_read(self) -> int:
        """Bytes read so far."""

    def close(self) -> None:
        """Close the files."""


@dataclass(frozen=True)
class InCodes:
    """Sources of weights whose matrices stay in their codes: whole blocks, and experts by themselves; either may be missing.

    All matrices are decoded in one `workspace`.
    """

    blocks: "CodedBlocks | None"
    experts: ExpertSource | None
    workspace: Workspace


class CodedBlocks(FileSource):
    """Units of which some stay in their codes."""

    by_experts = in_codes = None
    figures: tuple[UnitFigures, ...]

    def close(self) -> None:
        """Do nothing: the reader belongs to another source."""


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
        self._stored_experts: StoredExperts | None = None
        self.by_experts, self.why_whole = self._by_experts(chain, on_cpu=on_cpu)
        self.in_codes = self._in_codes(chain) if on_cpu and adapters is None else None
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
        self._stored_experts = stored
        figures = tuple(_figures_of(index, unit, chain, on_cpu) for index, unit in enumerate(stored.commons))
        of_experts = expert_figures(stored, figures, chain.dtype, on_cpu=on_cpu)
        return ExpertSource(stored, figures, blocks, self.reader, self._weights, self._plane, of_experts), ""

    def _in_codes(self, chain: Chain) -> InCodes | None:
        """Return the same weights in their codes, where this architecture only multiplies by them."""
        stored, plain, workspace = self._stored_experts, self.by_experts, Workspace(chain.dtype)
        names = may_stay(chain.model, chain.runner.blocks)
        coded = _coded_blocks(self._units, chain, names)
        experts = None
        if stored is not None and plain is not None:
            every = [[as_coded(each, chain.dtype, names) for each in own] for own in stored.experts]
            experts = (
                None if any(None in own for own in every) else [[each for each in own if each is not None] for own in every]
            )
        if not (coded or experts) or why_not_coded(chain.config):
            return None
        blocks = None
        if coded:
            blocks = CodedBlocks(_with(self._units, _stored(coded)), self.reader, self._weights, self._plane)
            blocks.others = _bound(coded, workspace)
            blocks.figures = _with_codes(self.figures, coded, chain.dtype)
        return InCodes(blocks, self._experts_in_codes(chain, experts, names, workspace) if experts else None, workspace)

    def _experts_in_codes(
        self, chain: Chain, experts: Sequence[Sequence[UnitInCodes]], names: frozenset[str], workspace: Workspace
    ) -> ExpertSource:
        """Return single experts that stay in their codes, with the rest of their blocks."""
        stored, plain = self._stored_experts, self.by_experts
        assert stored is not None, "there are experts"
        assert plain is not None, "that come by themselves"
        coded = _coded_blocks(stored.commons, chain, names)
        in_codes = StoredExperts(
            _with(stored.commons, _stored(coded)), tuple(tuple(each.stored for each in own) for own in experts)
        )
        figures = _with_codes(plain.figures, coded, chain.dtype)
        every = [each for own in experts for each in own]
        of_experts = replace(
            expert_figures(in_codes, figures, chain.dtype, on_cpu=True),
            making_bytes=max(each.making_bytes(chain.dtype) for each in every),
            packed_bytes=every[0].coded_bytes,
            packed_weights=every[0].weights,
        )
        found = ExpertSource(in_codes, figures, plain.places.blocks, self.reader, self._weights, self._plane, of_experts)
        found.others = _bound(coded, workspace)
        bound = {unit: tuple(_bound(dict(enumerate(own)), workspace).values()) for unit, own in enumerate(experts) if own}
        found.places = replace(found.places, others=bound)
        return found

    def read_by(self, reader: Reader) -> None:
        """Read by another reader of the same files from now on; it is closed with the source."""
        self.reader.close()
        self.reader = reader
        in_codes = (self.in_codes.blocks, self.in_codes.experts) if self.in_codes is not None else ()
        for other in (self.by_experts, *in_codes):
            if other is not None:
                other.reader = reader

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

    def close(self) -> None:
        """Close the files."""
        self.reader.close()


class RunSource(StoreSource):
    """The weights of the last commit in a run's store."""

    by_experts = in_codes = None
    others: Mapping[int, Bound] = MappingProxyType({})

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

    def close(self) -> None:
        """Close the store."""
        self.store.close()


def _read_only(figures: UnitFigures) -> UnitFigures:
    """Return the figures of a unit that nothing updates: weights that were trained in place are only read."""
    return replace(figures, trained_elements=0, cuts=()) if figures.in_place else figures


def _coded_blocks(units: Sequence[StoredUnit], chain: Chain, names: frozenset[str]) -> dict[int, UnitInCodes]:
    found = {unit: as_coded(units[unit], chain.dtype, names) for unit in range(1, chain.num_blocks + 1)}
    return {unit: each for unit, each in found.items() if each is not None}


def _stored(coded: Mapping[int, UnitInCodes]) -> dict[int, StoredUnit]:
    return {unit: each.stored for unit, each in coded.items()}


def _bound(coded: Mapping[int, UnitInCodes], workspace: Workspace) -> dict[int, Bound]:
    return {unit: partial(each.parameters, workspace=workspace) for unit, each in coded.items()}


def _with_codes(every: Sequence[UnitFigures], coded: Mapping[int, UnitInCodes], dtype: torch.dtype) -> tuple[UnitFigures, ...]:
    """Return figures of units some of which stay in their codes."""
    changed = {
        unit: replace(
            every[unit],
            num_elements=each.stored.layout.num_elements,
            stored_bytes=None,
            decodes=(),
            making_bytes=each.making_bytes(dtype),
            packed_bytes=each.coded_bytes,
            packed_weights=each.weights,
            packing_bytes=each.packing_bytes(dtype),
        )
        for unit, each in coded.items()
    }
    return _with(every, changed)


def _with(every: Sequence[_T], others: Mapping[int, _T]) -> tuple[_T, ...]:
    """Return `every` with `others` in some places."""
    return tuple(others.get(index, each) for index, each in enumerate(every))


def _figures_of(index: int, unit: StoredUnit, chain: Chain, on_cpu: bool) -> UnitFigures:
    return UnitFigures(
        name=unit.layout.name,
        num_elements=unit.layout.num_elements,
        num_parameters=unit.layout.num_parameters,
        home=home_of(index, chain.num_blocks),
        trained_elements=0,
        stored_bytes=unit.num_bytes if unit.is_made else None,
        making_bytes=unit.making_bytes(chain.dtype, on_host=on_cpu),
        decodes=unit.decodes,
    )


def source_of_plan(source: GenerationSource, plan: GenerationPlan) -> GenerationSource:
    """Return the source that a plan brings weights from."""
    if plan.packed_rows:
        assert source.in_codes is not None, "it was planned for"
        source.in_codes.workspace.use(plan.packed_rows, stay=plan.packs)
        found: GenerationSource | None
        found = source.in_codes.blocks if plan.experts is None else source.in_codes.experts
    else:
        found = source if plan.experts is None else source.by_experts
    assert found is not None, "it was planned for"
    return found
