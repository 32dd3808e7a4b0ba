"""How the experts of a training plan come, where they are parts: how many at a time, and for how many micro-batches together.

An expert is read once for each group of micro-batches, so a plan takes the largest groups that fit. What a group holds while it
is at the experts is measured (`BlockCosts.waiting_bytes`).
"""

from dataclasses import replace

from headrace.plan.forecast.footprint import with_footprint
from headrace.plan.search.problem import Problem
from headrace.plan.value.buffer_sizes import TENSOR_ALIGNMENT_BYTES
from headrace.plan.value.expert_plan import ExpertParts, experts_in_round
from headrace.plan.value.plan import Plan
from headrace.terms.costs import ModelCosts

# The fewest rounds of a block that are tried: larger ones take more memory, smaller ones more operations.
_FEWEST_ROUNDS = 16


def fitted(plan: Plan, problem: Problem, costs: ModelCosts) -> Plan:
    """Return `plan` with its footprint. Where experts are parts, it has the largest groups and rounds that fit. What experts
    made waits for backward beside the block's input.
    """
    if problem.experts is None:
        return with_footprint(plan, costs, problem.allowance)
    output, counts = plan.hidden_bytes + TENSOR_ALIGNMENT_BYTES, problem.experts.figures.num_experts
    kept = tuple(size + (output if count else 0) for size, count in zip(plan.stash.kept_bytes, counts[1:], strict=False))
    plan = replace(plan, stash=replace(plan.stash, kept_bytes=kept))
    known = replace(problem.experts, choices=max(block.choices for block in costs.blocks))
    sizes = _sizes(plan.batch.num_micro_batches)
    found = _of_size(plan, problem, costs, replace(known, together=1))
    least, most = 0, len(sizes) - 1 if found.fits else 0
    while least < most:
        middle = (least + most + 1) // 2
        larger = _of_size(plan, problem, costs, replace(known, together=sizes[middle]))
        found, least, most = (larger, middle, most) if larger.fits else (found, least, middle - 1)
    return found


def _sizes(count: int) -> list[int]:
    """Return the sizes of groups of `count` micro-batches, ascending: the smallest for each number of groups."""
    return sorted({-(-count // groups) for groups in range(1, count + 1)})


def _of_size(plan: Plan, problem: Problem, costs: ModelCosts, experts: ExpertParts) -> Plan:
    """Return `plan` with these groups of micro-batches, and the largest rounds that fit; the smallest where none do."""
    most = max(experts.figures.num_experts)
    experts = replace(experts, remakes=problem.savings.remakes and experts.together > 1)
    for in_round in dict.fromkeys((-(-most // _FEWEST_ROUNDS), experts_in_round(most))):
        found = with_footprint(replace(plan, experts=replace(experts, in_round=in_round)), costs, problem.allowance)
        if found.fits:
            break
    return found


def with_cached(plan: Plan, spare_bytes: int) -> tuple[Plan, int]:
    """Return `plan` with as many frozen experts in host memory as have room there, and the bytes that are still spare. Each is
    then read from the drives once in a run, not once for each group of each pass.
    """
    experts = plan.experts
    if experts is None or experts.is_trained:
        return plan, spare_bytes
    more = max(0, min(sum(experts.figures.num_experts) - experts.cached, spare_bytes // experts.slot_bytes))
    return replace(plan, experts=replace(experts, cached=experts.cached + more)), spare_bytes - more * experts.slot_bytes
