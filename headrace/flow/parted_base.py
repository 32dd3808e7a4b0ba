"""Frozen experts as parts: they are read one at a time in the model's own files, and the rest of their blocks are units.

Without files, as for a plan, each expert counts as it is computed.
"""

from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.files import Reader
from headrace.flow.expert_source import ExpertSource, expert_figures
from headrace.model import Chain, WeightMap
from headrace.model.banks import BlockExperts, find_experts
from headrace.model.in_place import StoredUnit, paths_of, stored_units
from headrace.model.parted_costs import part_experts
from headrace.model.parting_check import why_not_parted
from headrace.model.stored_experts import NotStoredSingly, StoredExperts, expert_layout, stored_experts, without
from headrace.plan.expert_plan import ExpertParts
from headrace.terms.layout import UnitLayout, planes_with


@dataclass(frozen=True)
class PartedBase:
    """The experts of a chain's blocks, and how they are `stored`. `layouts` are those of whole units."""

    layouts: tuple[UnitLayout, ...]
    blocks: tuple[BlockExperts | None, ...]
    stored: StoredExperts
    experts: ExpertParts

    @classmethod
    def of(cls, chain: Chain, weights: WeightMap | None, *, on_cpu: bool) -> "PartedBase":
        """Return the experts of `chain` in the files of `weights`, if there are some; on_cpu: the CPU computes.

        Raises:
            NotStoredSingly: they cannot be parts; the message says why.
        """
        blocks = find_experts(chain.model, chain.runner.blocks)
        if not any(blocks):
            raise NotStoredSingly("it has no stacked experts")
        if not chain.replayable:
            raise NotStoredSingly("blocks do not run by the model's own code")
        if reason := why_not_parted(chain.config):
            raise NotStoredSingly(reason)
        if weights is None:
            stored = _as_computed(chain, blocks)
        else:
            units = stored_units(chain.layouts, weights, chain.dtype, on_cpu=on_cpu)
            stored = stored_experts(units, blocks, weights, chain.dtype, on_cpu=on_cpu)
        figures = expert_figures(stored, (), chain.dtype, on_cpu=on_cpu)
        return cls(tuple(chain.layouts), blocks, stored, ExpertParts(figures=figures, choices=1, in_round=1))

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files of the experts."""
        return paths_of([each for experts in self.stored.experts for each in experts])

    def whole(self, chain: Chain) -> Chain:
        """Return the chain with whole units: for the names of all parameters, not to be run."""
        found = copy(chain)
        found.layouts = self.layouts
        return found

    def install(self, chain: Chain) -> None:
        """Have the chain's units be without experts, and its blocks stop at them. Nothing is bound."""
        chain.lay_out([unit.layout for unit in _commons(chain, self.blocks)])
        part_experts(chain, self.blocks)

    def source(self, chain: Chain, weights: WeightMap, reader: Reader) -> ExpertSource:
        """Return what reads the experts by `reader`, which has their files open."""
        plane = planes_with(chain.compute_dtype, ()).weight
        return ExpertSource(self.stored, (), self.blocks, reader, weights, plane, self.experts.figures)


def _commons(chain: Chain, blocks: tuple[BlockExperts | None, ...]) -> tuple[StoredUnit, ...]:
    found = []
    for unit, layout in enumerate(chain.layouts):
        block = blocks[unit - 1] if 1 <= unit <= len(blocks) else None
        common = without(layout, frozenset(block.names.values())) if block else layout
        found.append(StoredUnit(common, common.num_elements * chain.dtype.itemsize))
    return tuple(found)


def _as_computed(chain: Chain, blocks: tuple[BlockExperts | None, ...]) -> StoredExperts:
    """Return experts that lie nowhere yet, each with the bytes of its slot."""
    experts: list[tuple[StoredUnit, ...]] = [()] * len(chain.layouts)
    for unit, block in enumerate(blocks, start=1):
        if block is not None:
            layout = expert_layout(chain.layouts[unit], frozenset(block.names.values()), 0)
            each = StoredUnit(layout, layout.num_elements * chain.dtype.itemsize)
            experts[unit] = tuple(replace(each) for _ in range(block.num_experts))
    return StoredExperts(_commons(chain, blocks), tuple(experts))
