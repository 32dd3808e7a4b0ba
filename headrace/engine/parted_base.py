"""Frozen experts as parts: a run reads them one at a time in the model's own files, and the rest of their blocks as units.

Invariant: exactly the bytes of the files that the run began with are read, as with lent weights (`lent_base`).
"""

from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.engine.lent_base import PARTED, marks_of
from headrace.files import Reader
from headrace.flow.expert_source import ExpertSource, expert_figures
from headrace.model import Chain, WeightMap
from headrace.model.banks import BlockExperts, find_experts
from headrace.model.in_place import paths_of, stored_units
from headrace.model.parted_costs import part_experts
from headrace.model.parting_check import why_not_parted
from headrace.model.stored_experts import NotStoredSingly, StoredExperts, stored_experts, without
from headrace.plan.expert_plan import ExpertParts
from headrace.terms.layout import UnitLayout, planes_with


@dataclass(frozen=True)
class PartedBase:
    """The experts of a chain's blocks, in the model's files. `layouts` are those of whole units."""

    layouts: tuple[UnitLayout, ...]
    blocks: tuple[BlockExperts | None, ...]
    stored: StoredExperts
    experts: ExpertParts

    @classmethod
    def of(cls, chain: Chain, weights: WeightMap, *, on_cpu: bool) -> "PartedBase":
        """Return the experts of `chain` in the files of `weights`; on_cpu: the CPU computes.

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
        units = stored_units(chain.layouts, weights, chain.dtype, on_cpu=on_cpu)
        stored = stored_experts(units, blocks, weights, chain.dtype, on_cpu=on_cpu)
        figures = expert_figures(stored, (), chain.dtype, on_cpu=on_cpu)
        return cls(tuple(chain.layouts), blocks, stored, ExpertParts(figures=figures, choices=1, in_round=1))

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files of the experts."""
        return paths_of([each for experts in self.stored.experts for each in experts])

    @property
    def identity(self) -> dict[str, Any]:
        """What a run's state says of the files."""
        return {PARTED: marks_of(self.paths)}

    def whole(self, chain: Chain) -> Chain:
        """Return the chain with whole units: for the names of all parameters, not to be run."""
        found = copy(chain)
        found.layouts = self.layouts
        return found

    def install(self, chain: Chain) -> None:
        """Have the chain's units be without experts, and its blocks stop at them. Nothing is bound."""
        layouts = list(chain.layouts)
        for unit, block in enumerate(self.blocks, start=1):
            if block is not None:
                layouts[unit] = without(layouts[unit], frozenset(block.names.values()))
        chain.lay_out(layouts)
        part_experts(chain, self.blocks)

    def source(self, chain: Chain, weights: WeightMap, reader: Reader) -> ExpertSource:
        """Return what reads the experts by `reader`, which has their files open."""
        plane = planes_with(chain.compute_dtype, ()).weight
        return ExpertSource(self.stored, (), self.blocks, reader, weights, plane, self.experts.figures)
