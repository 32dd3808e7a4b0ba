"""Plans in which copies run further ahead of compute: weights come in pages, and block inputs are read from drives early.

A device has room for two blocks then, where the lean buffers have one. Uploads take turns with what micro-batches wait for.
Reads from drives that compute waits for come before those of states. Such plans are searched where they might be faster.
"""

from dataclasses import replace

from headrace.plan.forecast.forecast import SEARCH_OPERATIONS, StepSeconds
from headrace.plan.search.problem import Problem
from headrace.plan.value.plan import Plan

# Inputs of blocks on their way from the drives: a block's, as a rule. Each has a buffer in host memory.
_DEEP_STASH_SLOTS = 18
# Fewer blocks are on the device at once anyway, or hardly wait for one another.
_LEAST_BLOCKS = 4
# A step that is less above its bound has little to gain; nor has one that would hardly be faster if memory were no matter.
_OVER_BOUND, _WORTH_IT = 1.05, 1.02


def paged(plan: Plan, *, lean: bool) -> Plan:
    """Return `plan` with weights in pages, and with buffers for what is read early."""
    prefetch = 1 if lean else plan.prefetch
    slots = min(plan.batch.num_micro_batches + 2, _DEEP_STASH_SLOTS) if plan.stash.slots else 0
    return replace(
        plan,
        batch=replace(plan.batch, pages=True),
        prefetch=prefetch,
        device_slots=prefetch + 1,
        host_slots=min(plan.num_blocks, max(plan.host_slots, prefetch + 3)),
        stash=replace(plan.stash, slots=max(plan.stash.slots, slots)),
    )


def may_page(problem: Problem, plan: Plan, seconds_of: StepSeconds) -> bool:
    """Return whether weights can come in pages, and a step would be faster if there were memory enough for that."""
    several = plan.batch.num_micro_batches > 1 and plan.num_blocks >= _LEAST_BLOCKS
    alone = problem.place is None and not plan.far_units and plan.device_slots < plan.num_blocks
    whole = problem.savings.parts is None and problem.experts is None and not problem.savings.one_block_in_host_memory
    if not (problem.separate_device and several and alone and whole):
        return False
    found = seconds_of.forecast(plan)
    if found.step_seconds <= _OVER_BOUND * found.lower_bound_seconds:
        return False
    ahead = paged(plan, lean=plan.prefetch < 2)
    return seconds_of(ahead, 2 * SEARCH_OPERATIONS) * _WORTH_IT < seconds_of(plan, 2 * SEARCH_OPERATIONS)
