"""Experts as parts: the chain has blocks without them, and stops at them.

Frozen ones are read one at a time in the model's own files, and the rest of their blocks are units. Without files, as for a
plan, each counts as it is computed. Trained ones stay in their units: in the state, in host memory, in updates.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.files import Reader
from headrace.flow.weights.expert_source import ExpertSource, expert_figures
from headrace.model import Chain, WeightMap
from headrace.model.costs.parted_costs import part_experts
from headrace.model.directory.in_place import StoredUnit, paths_of, stored_units
from headrace.model.parts.banks import BlockExperts, find_experts
from headrace.model.streams.stored_experts import NotStoredSingly, StoredExperts, expert_layout, stored_experts, without
from headrace.model.trials.parting_check import why_not_parted
from headrace.model.trials.tiny import EXPERT_COUNTS
from headrace.plan.value.expert_plan import ExpertFigures, ExpertParts
from headrace.terms.forms import Form
from headrace.terms.layout import Runs, UnitLayout, cut_out, planes_with
from headrace.terms.options.summing import SEQUENTIAL


@dataclass(frozen=True)
class PartedUnits:
    """The experts of a chain's blocks. `layouts` are those of whole units."""

    layouts: tuple[UnitLayout, ...]
    blocks: tuple[BlockExperts | None, ...]
    experts: ExpertParts

    def whole(self, chain: Chain) -> Chain:
        """Return the chain with whole units: for the names of all parameters, not to be run."""
        found = copy(chain)
        found.layouts = self.layouts
        return found

    def kept(self, chain: Chain) -> Chain:
        """Return the chain with units as a run's state has them, not to be run."""
        return self.whole(chain) if self.experts.is_trained else chain


def refuse_dense(chain: Chain) -> None:
    """Refuse a model without experts: none of the other reasons concerns it.

    Raises:
        NotStoredSingly: the message is empty.
    """
    text = chain.config.get_text_config()
    counts = [getattr(text, name, None) or 0 for name in EXPERT_COUNTS]
    if not any(find_experts(chain.model, chain.runner.blocks)) and not any(
        isinstance(each, int) and each > 1 for each in counts
    ):
        raise NotStoredSingly("")


def refuse_trained_parts(forms: Sequence[Form], gradient_sum: str) -> None:
    """Refuse a run whose experts cannot be trained as parts.

    Raises:
        NotStoredSingly: the message says why.
    """
    if not all(form.in_place and not form.left for form in forms):
        raise NotStoredSingly("not all of the model is trained in place")
    if gradient_sum != SEQUENTIAL:
        raise NotStoredSingly(f"gradients are summed as a {gradient_sum}")


@dataclass(frozen=True)
class TrainedUnits(PartedUnits):
    """Experts that are trained. `commons` are units without them, as compute has them."""

    commons: tuple[UnitLayout, ...]

    @classmethod
    def of(cls, chain: Chain, *, separate: bool) -> "TrainedUnits":
        """Return the experts of `chain`, all of which is trained in place. On a separate device the rest has a slot of its own.

        Raises:
            NotStoredSingly: they cannot be parts; the message says why.
        """
        blocks, layouts = _experts_of(chain, trained=True), tuple(chain.layouts)
        commons, every = list(layouts), list[UnitLayout]()
        runs: list[Runs] = [()] * len(layouts)
        for unit, block in enumerate(blocks, start=1):
            if block is None:
                continue
            names = frozenset(block.names.values())
            every.append(expert_layout(layouts[unit], names, 0))
            common, left = cut_out(layouts[unit], names)
            rest = tuple(spec for spec in layouts[unit].parameters if spec.name not in names)
            commons[unit] = common if separate else replace(layouts[unit], parameters=rest)
            runs[unit] = left
        figures = ExpertFigures(
            units=(),
            num_experts=(0, *(block.num_experts if block else 0 for block in blocks), 0)[: len(layouts)],
            elements=max(layout.num_elements for layout in every),
            stored_bytes=max(layout.num_elements for layout in every) * chain.dtype.itemsize,
            is_made=False,
            making_bytes=0,
            num_parameters=max(layout.num_parameters for layout in every),
        )
        experts = ExpertParts(figures=figures, choices=1, in_round=1, is_trained=True, commons=tuple(runs) if separate else ())
        return cls(layouts, blocks, experts, tuple(commons))

    def install(self, chain: Chain) -> None:
        """Have the chain's units be without experts, and its blocks stop at them. Nothing is bound."""
        chain.lay_out(self.commons)
        part_experts(chain, self.blocks, trained=True)


@dataclass(frozen=True)
class PartedBase(PartedUnits):
    """Frozen experts, and how they are `stored`."""

    stored: StoredExperts

    @classmethod
    def of(cls, chain: Chain, weights: WeightMap | None, *, on_cpu: bool) -> "PartedBase":
        """Return the experts of `chain` in the files of `weights`, if there are some; on_cpu: the CPU computes.

        Raises:
            NotStoredSingly: they cannot be parts; the message says why.
        """
        blocks = _experts_of(chain, trained=False)
        if weights is None:
            stored = _as_computed(chain, blocks)
        else:
            units = stored_units(chain.layouts, weights, chain.dtype, on_cpu=on_cpu)
            stored = stored_experts(units, blocks, weights, chain.dtype, on_cpu=on_cpu)
        figures = expert_figures(stored, (), chain.dtype, on_cpu=on_cpu)
        return cls(tuple(chain.layouts), blocks, ExpertParts(figures=figures, choices=1, in_round=1), stored)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files of the experts."""
        return paths_of([each for experts in self.stored.experts for each in experts])

    def install(self, chain: Chain) -> None:
        """As `TrainedUnits.install`."""
        chain.lay_out([unit.layout for unit in _commons(chain, self.blocks)])
        part_experts(chain, self.blocks)

    def source(self, chain: Chain, weights: WeightMap, reader: Reader) -> ExpertSource:
        """Return what reads the experts by `reader`, which has their files open."""
        plane = planes_with(chain.compute_dtype, ()).weight
        return ExpertSource(self.stored, (), self.blocks, reader, weights, plane, self.experts.figures)


def _experts_of(chain: Chain, *, trained: bool) -> tuple[BlockExperts | None, ...]:
    blocks = find_experts(chain.model, chain.runner.blocks)
    if not any(blocks):
        raise NotStoredSingly("it has no stacked experts")
    if not chain.replayable:
        raise NotStoredSingly("blocks do not run by the model's own code")
    if reason := why_not_parted(chain.config, trained=trained):
        raise NotStoredSingly(reason)
    return blocks


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
