"""How a generation's plan may load single experts: which ways are tried, and their seconds by a closed formula.

Reading ahead reads all E experts of a block while others compute. Waiting for routers reads only the wanted share s, but reads
nothing until all seats have been to their routers. Let t be the seconds of reading one expert, and c those of computing the
part before the routers. A block then takes max(E t, all its computing) in the first way, and at least c + s E t in the second.
So reading ahead pays from s = 1 - c / (E t) on, and always where computing limits.
"""

from collections.abc import Iterator
from dataclasses import replace

from headrace.generate.plan.plan import GenerationPlan
from headrace.plan.clock.rates import Rates
from headrace.plan.value.expert_plan import ExpertFigures, ExpertPlan, experts_in_round
from headrace.terms.lanes import Lane

# Above this share nearly all experts are wanted, whatever the formula says leaving out the rest would save.
_MOST_SHARE = 0.9


def ways_of_experts(plan: GenerationPlan, figures: ExpertFigures | None, rates: Rates) -> Iterator[GenerationPlan]:
    """Yield `plan`, whose blocks come whole, and the same plan with experts that come by themselves."""
    yield plan
    if figures is not None and plan.costs.choices:
        experts = ExpertPlan(figures=figures, choices=plan.costs.choices, in_round=experts_in_round(max(figures.num_experts)))
        apart = replace(plan, units=figures.units, experts=experts)
        yield replace(apart, experts=replace(experts, ahead_share=_break_even(apart, experts, rates)))


def _break_even(plan: GenerationPlan, experts: ExpertPlan, rates: Rates) -> float:
    """Return the share of wanted experts from which on reading ahead is not slower."""
    unit = max(range(len(plan.units)), key=lambda each: experts.figures.num_experts[each])
    read = experts.figures.num_experts[unit] * _seconds_of_one(plan, experts, rates)
    before, whole = _compute_seconds(plan, experts, unit, rates)
    return 0.0 if whole >= read else min(_MOST_SHARE, max(0.0, 1 - before / read))


def _seconds_of_one(plan: GenerationPlan, experts: ExpertPlan, rates: Rates) -> float:
    """Return the seconds in which one expert comes, by the slowest lane."""
    figures, lanes = experts.figures, rates.bytes_per_second
    seconds = [figures.stored_bytes * (1 - experts.cached_share) / lanes[Lane.SSD_READ]]
    if plan.separate_device:
        seconds.append(figures.stored_bytes / lanes[Lane.HOST_TO_DEVICE])
    if figures.is_made:
        seconds.append(figures.moved_bytes(plan.planes.weight.num_bytes(figures.elements)) / lanes[Lane.MAKE])
    return max(seconds)


def _compute_seconds(plan: GenerationPlan, experts: ExpertPlan, unit: int, rates: Rates) -> tuple[float, float]:
    """Return the seconds of computing one token of all rows in a block: before its routers, and in all of it."""
    rows, figures = plan.rows, experts.figures
    each = plan.planes.weight.num_bytes(figures.elements) - figures.packed_bytes
    each += plan.packed_like(figures.packed_weights, figures.packed_bytes, max(1, rows // figures.num_experts[unit]))
    flops = plan.costs.next.flops[unit - 1]
    of_experts = min(flops, 2.0 * experts.figures.num_parameters * experts.choices * rows)
    before = rates.compute_seconds(flops - of_experts, plan.slot_bytes(unit))
    after = rates.compute_seconds(of_experts, experts.touched(unit, rows) * each)
    return plan.seats * before, plan.seats * (before + after)


def rough_expert_seconds(plan: GenerationPlan, rates: Rates) -> float:
    """Return the least seconds of a pass whose experts come by themselves: those of the slowest lane alone."""
    experts, total = plan.experts, 0.0
    if experts is None:
        return 0.0
    tokens, one = plan.rows * plan.seats, _seconds_of_one(plan, experts, rates)
    ahead = experts.is_ahead(tokens)
    for unit, count in enumerate(experts.figures.num_experts):
        if count:
            before, whole = _compute_seconds(plan, experts, unit, rates)
            wanted = experts.touched(unit, tokens)
            total += max(whole, count * one) if ahead else before + max(whole - before, wanted * one)
    return total


def with_cached_experts(plan: GenerationPlan, allowed_bytes: int) -> GenerationPlan:
    """Return the plan with as many experts in host memory as fit into the rest of `allowed_bytes`."""
    experts = plan.experts
    if experts is None:
        return plan
    more = max(0, allowed_bytes - plan.peak("host")) // experts.slot_bytes
    cached = min(sum(experts.figures.num_experts), experts.cached + more)
    return replace(plan, experts=replace(experts, cached=cached))
