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
from headrace.model.directory.in_place import paths_of, stored_units
from headrace.model.parts.banks import ExpertPlaces, find_experts
from headrace.model.streams.stored_experts import NotStoredSingly, StoredExperts, experts_as_computed, stored_experts
from headrace.model.trials.parting_check import why_not_parted
from headrace.model.trials.tiny import EXPERT_COUNTS
from headrace.plan.value.expert_plan import ExpertParts
from headrace.terms.forms import Form
from headrace.terms.layout import Runs, UnitLayout, cut_out, planes_with
from headrace.terms.options.summing import SEQUENTIAL


@dataclass(frozen=True)
class ExpertUnits:
    """The experts of a chain's blocks. `layouts` are those of whole units, `commons` those that compute has, without experts;
    `stored` is how frozen experts lie in files.
    """

    layouts: tuple[UnitLayout, ...]
    commons: tuple[UnitLayout, ...]
    stored: StoredExperts
    places: ExpertPlaces
    experts: ExpertParts

    @classmethod
    def trained(cls, chain: Chain, *, separate: bool) -> "ExpertUnits":
        """Return the experts of `chain`, all of which is trained in place. On a separate device the rest has a slot of its own.

        Raises:
            NotStoredSingly: they cannot be parts; the message says why.
        """
        found = cls._of(chain, None, trained=True, on_cpu=not separate)
        commons, runs = list(found.layouts), list[Runs]([()] * len(found.layouts))
        for unit, layout in enumerate(found.layouts):
            if names := found.places.names(unit):
                common, runs[unit] = cut_out(layout, names)
                rest = tuple(spec for spec in layout.parameters if spec.name not in names)
                commons[unit] = common if separate else replace(layout, parameters=rest)
        experts = replace(found.experts, is_trained=True, commons=tuple(runs) if separate else ())
        return replace(found, commons=tuple(commons), experts=experts)

    @classmethod
    def frozen(cls, chain: Chain, weights: WeightMap | None, *, on_cpu: bool) -> "ExpertUnits":
        """Return the experts of `chain` in the files of `weights`, if there are some; on_cpu: the CPU computes.

        Raises:
            NotStoredSingly: they cannot be parts; the message says why.
        """
        return cls._of(chain, weights, trained=False, on_cpu=on_cpu)

    @classmethod
    def _of(cls, chain: Chain, weights: WeightMap | None, *, trained: bool, on_cpu: bool) -> "ExpertUnits":
        blocks = find_experts(chain.model, chain.runner.blocks)
        if not any(blocks):
            raise NotStoredSingly("it has no stacked experts")
        if not chain.replayable:
            raise NotStoredSingly("blocks do not run by the model's own code")
        if reason := why_not_parted(chain.config, trained=trained):
            raise NotStoredSingly(reason)
        layouts = tuple(chain.layouts)
        stored = computed = experts_as_computed(layouts, blocks, chain.dtype)
        if weights is not None:
            units = stored_units(layouts, weights, chain.dtype, on_cpu=on_cpu)
            stored = stored_experts(units, blocks, weights, chain.dtype, on_cpu=on_cpu)
        experts = ExpertParts(figures=expert_figures(stored, (), chain.dtype, on_cpu=on_cpu), choices=1, in_round=1)
        commons = tuple(unit.layout for unit in computed.commons)
        return cls(layouts, commons, stored, stored.places(blocks, layouts), experts)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files of frozen experts."""
        return paths_of([each for experts in self.stored.experts for each in experts])

    def install(self, chain: Chain) -> None:
        """Have the chain's units be without experts, and its blocks stop at them. Nothing is bound."""
        chain.lay_out(self.commons)
        part_experts(chain, self.places.blocks, trained=self.experts.is_trained)

    def source(self, chain: Chain, weights: WeightMap, reader: Reader) -> ExpertSource:
        """Return what reads the experts by `reader`, which has their files open."""
        plane = planes_with(chain.compute_dtype, ()).weight
        return ExpertSource(self.stored, (), self.places.blocks, reader, weights, plane, self.experts.figures)

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
