"""When updates run: behind backward, behind the next forward, or both; and the cost of clipping (docs/decisions/0007)."""

import math
from collections.abc import Iterator
from dataclasses import replace

from headrace.plan.forecast.footprint import with_footprint
from headrace.plan.forecast.forecast import SEARCH_OPERATIONS, StepSeconds, core_update_bytes_per_second, redo_seconds
from headrace.plan.search.problem import Problem
from headrace.plan.search.space import Choice, filled, plan_of
from headrace.plan.value.plan import Plan, spread
from headrace.plan.value.speculation import Speculation
from headrace.terms.options.summing import TREE

# Shares of the blocks whose updates may be held for the next forward: 0, 1/8, ... 7/8.
_LATE_PARTS = 8
# Strides at which chunks may be updated on the device; of equally fast strides the largest is taken, which moves the least.
_DEVICE_UPDATE_STRIDES = (4, 3, 2, 1)
# Plans whose times differ by less than this factor count as equal, and the simpler one is taken.
ALIKE = 1.005


def balanced(problem: Problem, bare: Plan, best: Plan, seconds_of: StepSeconds, homes: tuple[str, ...]) -> Plan:
    """Return `best`, or a faster plan with late units and more states read ahead; nothing has been filled into `bare` yet.

    Updates behind backward leave drives idle in forward. The updates of some units are held for forward, as many as make both
    halves equally long. It matters little which ones, if they are spread evenly over the depth. Their gradients wait in one of
    `homes`.
    """
    best_seconds, costs = seconds_of(best), problem.costs_of(bare.batch.micro_batch_sequences)
    unit_chunks = max(bare.num_chunks(block) for block in range(1, bare.num_blocks + 1))
    for held in homes:
        for slots in sorted({bare.updates.state_slots, max(bare.updates.state_slots, unit_chunks + 2)}):
            plans = []
            for late in late_choices(bare):
                plan = with_footprint(
                    bare.with_updates(late_units=late, state_slots=slots).with_gradients(held=held),
                    costs,
                    problem.allowance,
                )
                if plan.fits and (late or held == "host"):
                    plans.append(plan)
            if plans:
                plan = _fastest([filled(problem, plan) for plan in plans], seconds_of)
                seconds = seconds_of(plan)
                if seconds * ALIKE < best_seconds:
                    best_seconds, best = seconds, plan
    return best


def with_device_updates(problem: Problem, plan: Plan, seconds_of: StepSeconds) -> Plan:
    """Return `plan` with a stride of its chunks updated on the device, if that fits there and makes the step shorter.

    It takes two chunks and temporaries on the device. It moves 26 bytes per parameter over the link (bfloat16), instead of as
    many over the host's memory bus. It pays where the CPU's updates limit the step and the link has time to spare. Where the
    rule has no figure for it, all stays on the CPU.
    """
    possible = seconds_of.machine.has_device and problem.rule.device_traffic_bytes is not None
    if not (problem.separate_device and possible) or plan.updates.device_every:
        return plan

    machine, most_operations = seconds_of.machine, 2 * SEARCH_OPERATIONS
    # No stride gains more than updates that take the CPU no time. Mostly even they would gain nothing, and the search ends
    # here.
    free = replace(
        machine, update_bytes_per_second=1e15, update_bytes_per_second_per_core=1e15, host_memory_bytes_per_second=1e17
    )
    as_is = seconds_of(plan, most_operations)
    if StepSeconds(free)(plan, most_operations) * ALIKE >= as_is:
        return plan
    costs = problem.costs_of(plan.batch.micro_batch_sequences)
    strides = [
        with_footprint(plan.with_updates(device_every=every), costs, problem.allowance) for every in _DEVICE_UPDATE_STRIDES
    ]
    tried = [(seconds_of(candidate, most_operations), candidate) for candidate in strides if candidate.fits]
    best_seconds, best = min(tried, key=lambda entry: entry[0], default=(as_is, plan))
    if best_seconds * ALIKE >= as_is:
        return plan
    # Coarse forecasts choose the stride; a finer one tells whether it pays.
    return best if seconds_of(best) * ALIKE < seconds_of(plan) else plan


def with_two_accumulators(problem: Problem, plan: Plan, seconds_of: StepSeconds) -> Plan:
    """Return a worker's plan, or one with pages, with two buffers for sums of gradients on the device, if that fits and is
    faster. Then one block's gradient is summed while the last one's is drained. If it fits only then, weights are brought less
    far ahead. A tree's sum has its own buffers for partial sums, and gets no second set.
    """
    is_worker = len(plan.far_units) == len(plan.units)
    if not (plan.separate_device and (is_worker or plan.batch.pages)) or plan.gradients.order == TREE:
        return plan
    costs = problem.costs_of(plan.batch.micro_batch_sequences)
    doubled = plan.with_gradients(accumulators=2)
    leaner = replace(doubled, prefetch=min(1, plan.prefetch), device_slots=min(2, plan.device_slots))
    fitting = (with_footprint(each, costs, problem.allowance) for each in (doubled, leaner))
    best = next((each for each in fitting if each.fits), plan)
    return best if seconds_of(best) * ALIKE < seconds_of(plan) else plan


def late_choices(plan: Plan) -> list[tuple[int, ...]]:
    """Return the sets of units that are tried as late ones: several shares of the blocks, evenly spread."""
    counts = dict.fromkeys(round(plan.num_blocks * part / _LATE_PARTS) for part in range(_LATE_PARTS))
    return [spread(count, plan.num_blocks) for count in counts]


def with_threads(plan: Plan, seconds_of: StepSeconds) -> Plan:
    """Return `plan` with the fastest split of the cores between compute and updates; among equally fast ones the usual split.

    Where a GPU computes, updates may have as many cores as the memory's bandwidth can use. If the CPU computes, there are two
    ways. Either they share cores as measured (all for compute, half of them also for updates), or each has its own cores and
    compute has fewer. Threads of the I/O engine wait most of the time (0.01 to 0.02 s of a core per GB), so they have no cores
    of their own.
    """
    machine, cores = seconds_of.machine, plan.compute_threads
    enough = max(1, math.ceil(machine.update_bytes_per_second / core_update_bytes_per_second(machine, plan.rule)))
    if machine.has_device:
        splits = [(cores, min(cores, threads)) for threads in (enough, cores)]
    else:
        powers = (1 << power for power in range(cores.bit_length()))
        splits = [(cores - threads, threads) for threads in powers if threads <= min(enough, cores // 2)]
    usual = (plan.compute_threads, plan.updates.threads)
    candidates = [
        replace(plan.with_updates(threads=other), compute_threads=one) for one, other in dict.fromkeys([usual, *splits])
    ]
    seconds = [_coarse_seconds(candidate, seconds_of) for candidate in candidates]
    best = min(range(len(candidates)), key=seconds.__getitem__)
    return candidates[best] if seconds[best] * ALIKE < seconds[0] else plan


def speculative_candidate(problem: Problem, placements: list[Choice], best: Choice, seconds_of: StepSeconds) -> Iterator[Plan]:
    """Yield the deferred plan whose buffers serve speculation best: of `placements`, with and without what `best` keeps."""
    costs = problem.costs_of(best.rows)
    found: dict[tuple[str, str], tuple[float, int, Plan]] = {}
    for choice in placements:
        if choice.rows != best.rows or (choice.input_home, choice.held) in found:
            continue  # generous buffers come first; lean ones are only for where those do not fit
        for kept in dict.fromkeys((replace(choice, kept_home=best.kept_home, amount=best.amount), choice)):
            bare = with_footprint(plan_of(problem, kept).with_gradients(slots=2), costs, problem.allowance)
            if bare.updates.checkpoint_every == 1 and bare.fits:
                plan = with_footprint(filled(problem, bare).with_updates(resident_states=()), costs, problem.allowance)
                variant = _speculating(plan, spread(plan.num_blocks // 4, plan.num_blocks))
                found[choice.input_home, choice.held] = (_coarse_seconds(variant, seconds_of), len(found), plan)
                break
    if found:
        yield min(found.values(), key=lambda entry: entry[:2])[2]


def with_speculation(plan: Plan, seconds_of: StepSeconds) -> Plan:
    """Return a deferred plan together with the costs of speculating: the same buffers, another order."""
    if not _may_speculate(plan):
        return plan
    variant = _fastest([_speculating(plan, late) for late in late_choices(plan)], seconds_of)
    speculation = Speculation(
        late_units=variant.updates.late_units,
        deferred_seconds=seconds_of.forecast(plan).step_seconds,  # `forecast` keeps it: it is mostly asked for again
        hit_seconds=seconds_of(variant),
        redo_seconds=redo_seconds(variant, seconds_of.machine),
    )
    return plan.with_results(speculation=speculation)


def expected_seconds(plan: Plan, seconds_of: StepSeconds, *, clips: bool = True) -> float:
    """Return the seconds of a step if half of all runs clip hardly ever, so that speculation pays, and half clip often. Where
    nothing `clips`, a deferred plan has nothing to guess.

    They are coarse, for choosing among deferred plans.
    """
    deferred = _coarse_seconds(plan, seconds_of)
    if not (clips and _may_speculate(plan)):
        return deferred
    quarters = [spread(plan.num_blocks * part // 4, plan.num_blocks) for part in (1, 2)]
    hits = [_coarse_seconds(_speculating(plan, late), seconds_of) for late in quarters]
    return (deferred + min(deferred, *hits)) / 2


def _may_speculate(plan: Plan) -> bool:
    """Return whether a step can be taken back: no states live only in memory, and each step is committed."""
    return not plan.updates.resident_states and plan.updates.checkpoint_every == 1


def _speculating(plan: Plan, late_units: tuple[int, ...]) -> Plan:
    return plan.with_updates(policy="speculative", late_units=late_units)


def _fastest(plans: list[Plan], seconds_of: StepSeconds) -> Plan:
    """Return the fastest of plans with ever more late units; of equally fast ones the one with the fewest.

    The step is the longer of two halves, of which one grows and one shrinks. Every other plan is tried, then the neighbours of
    the best.
    """
    seconds = {index: _coarse_seconds(plans[index], seconds_of) for index in range(0, len(plans), 2)}
    best = min(seconds, key=seconds.__getitem__)
    for index in (best - 1, best + 1):
        if 0 <= index < len(plans):
            seconds[index] = _coarse_seconds(plans[index], seconds_of)
    return plans[min(seconds, key=lambda index: (seconds[index], index))]


def _coarse_seconds(plan: Plan, seconds_of: StepSeconds) -> float:
    return seconds_of(plan, SEARCH_OPERATIONS)
