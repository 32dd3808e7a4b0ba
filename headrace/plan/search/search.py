"""Choose a plan: among the placements that fit into the budgets, the one that is fastest in the simulator.

Pure: model costs, budgets, a workload and a machine's ceilings go in, a frozen `Plan` comes out. No clock, no files, no torch.

The search decides these (Fuyou's automatic activation management, extended to the whole placement): rows per micro-batch; where
block inputs wait for backward; depths of buffers. It also decides how many operator outputs are kept and replayed instead of
computed again, and where they wait. Operators are taken in falling order of saved operations per byte (Fuyou's benefit OB =
FLOP / A). The rest of host memory goes to weights, then states. Step time is convex in the amount kept, so few amounts need to
be tried. Each lane's work is linear in it, and the step is about their maximum.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from headrace.plan.clock.nominal import nominal_machine
from headrace.plan.forecast.footprint import with_footprint
from headrace.plan.forecast.forecast import Forecast, StepSeconds
from headrace.plan.search.choice_seconds import ChoiceSeconds
from headrace.plan.search.cutting import in_parts_if_needed, words_on_largest
from headrace.plan.search.paging import may_page
from headrace.plan.search.policy import (
    ALIKE,
    balanced,
    expected_seconds,
    speculative_candidate,
    with_device_updates,
    with_speculation,
    with_threads,
    with_two_accumulators,
)
from headrace.plan.search.problem import Problem
from headrace.plan.search.space import THRIFTS, Choice, filled, placements_of, plan_of
from headrace.plan.search.spared_ends import no_more_than_needed, spared
from headrace.plan.value.plan import Plan
from headrace.plan.value.refusal import refusal
from headrace.terms.collector import without_collection
from headrace.terms.errors import PlanInfeasible
from headrace.terms.lanes import Lane
from headrace.terms.machine.ceilings import Ceilings

# Amounts of kept outputs that are tried, as shares of all; half steps are tried around the best one.
_AMOUNT_PARTS = 4
# So many kinds of placements, with the best forecasts without replay or with all that fits, enter the search for the amount.
_FINALISTS = 3
# Amounts are tried upwards until one is slower than the best by this factor: the time is convex in the amount, but for noise.
_WORSE = 1.02
_Found = TypeVar("_Found")

# How many choices within this factor of the best get their updates balanced, each with other buffers. Only then does it show
# which of them gains most.
_BALANCED, _CLOSE = 3, 1.1


@without_collection()
@in_parts_if_needed
def make_plan(problem: Problem, ceilings: Ceilings | None = None, seconds_of: StepSeconds | None = None) -> Plan:
    """Return the plan that fits and is fastest in the simulator on a machine with `ceilings` (None: a nominal machine).
    `seconds_of` remembers the forecasts that are made here, if they are for that machine.

    Hidden states wait in host memory between blocks, and a stage's sums of gradients on its SSD, where nothing else fits, or
    where that is faster. Likewise rows of a frozen embedding are read, and a frozen head comes for the loss only.

    Raises:
        PlanInfeasible: nothing fits; the message names the tier, what the leanest plan needs there, and what takes most of it.
    """
    machine = ceilings or nominal_ceilings(problem)
    problem = replace(problem, attention_share=machine.attention_share)
    if seconds_of is None or seconds_of.machine != machine:
        seconds_of = StepSeconds(machine)
    measured = ceilings is not None
    search = partial(_plan_of_sums, seconds_of=seconds_of, measured=measured)
    if (sparing := spared(problem, machine)) is None:
        return search(problem)
    try:
        plan = search(problem)
    except PlanInfeasible as refusal:
        try:
            return no_more_than_needed(sparing, search)
        except PlanInfeasible as least:
            raise least if least.tier == refusal.tier else refusal from None
    found = seconds_of.forecast(plan)
    if not measured or found.step_seconds <= _WORSE * _busy_seconds(plan, found):
        return plan
    return _or_faster(plan, lambda: no_more_than_needed(sparing, search), seconds_of)


def _plan_of_sums(problem: Problem, seconds_of: StepSeconds, *, measured: bool) -> Plan:
    """Return the plan that fits and is fastest, wherever a stage's sums wait. Raises as `make_plan`."""
    place = problem.place
    if place is None or place.sums == "ssd":
        return _plan_of_states(problem, seconds_of, measured=measured)
    laid_down = replace(problem, place=replace(place, sums="ssd"))
    try:
        plan = _plan_of_states(problem, seconds_of, measured=measured)
    except PlanInfeasible:
        return _plan_of_states(laid_down, seconds_of, measured=measured)
    # Sums in memory save more traffic for a byte than weights do. So only a step in fewer groups would be better without them.
    if plan.stage == place.choices(problem.workload.sequences):
        return plan
    return _or_faster(plan, lambda: _plan_of_states(laid_down, seconds_of, measured=measured), seconds_of)


def _plan_of_states(problem: Problem, seconds_of: StepSeconds, *, measured: bool) -> Plan:
    """Return the plan that fits and is fastest, wherever hidden states are between blocks.

    They wait in host memory where nothing else fits, or where that is faster.

    Raises:
        PlanInfeasible: see `make_plan`.
    """
    hosted = problem.saving(hosted=problem.can_host)
    try:
        plan = _fastest_plan(problem, seconds_of, measured=measured)
    except PlanInfeasible as refusal:
        if not hosted.savings.hosted:
            raise
        try:
            plan = _fastest_plan(hosted, seconds_of, measured=measured)
        except PlanInfeasible as least:  # it says what is needed at least
            raise least if least.tier == refusal.tier else refusal from None
    else:
        if hosted.savings.hosted and measured and _may_gain(plan, seconds_of):
            plan = _or_faster(plan, lambda: _fastest_plan(hosted, seconds_of, measured=measured), seconds_of)
    return _or_paged(plan, hosted if plan.hosted else problem, seconds_of) if measured else plan


def _or_paged(plan: Plan, problem: Problem, seconds_of: StepSeconds) -> Plan:
    """Return the plan, or one like it whose weights come in pages, where that is faster."""
    if not may_page(problem, plan, seconds_of):
        return plan
    problem, policy = problem.saving(paged=True), plan.updates.policy
    placements = _like(plan, problem)
    if not placements:
        return plan
    return _or_faster(plan, lambda: _plan_under(problem, policy, placements, seconds_of, measured=True), seconds_of)


def _like(plan: Plan, problem: Problem) -> list[Choice]:
    """Return the placements that fit and pass as many states through memory as `plan`. If none fits, or none passes so many,
    they are those that pass most of fewer.
    """
    choices = (choice for thrift in THRIFTS for choice in placements_of(problem, plan.updates.policy, thrift))
    kinds: dict[int, list[Choice]] = {}
    for choice in dict.fromkeys(choices):
        if choice.state_elements <= plan.updates.chunk_elements * plan.updates.state_slots:
            kinds.setdefault(choice.state_elements, []).append(choice)
    fitting = ([choice for choice in kinds[size] if plan_of(problem, choice).fits] for size in sorted(kinds, reverse=True))
    return next(filter(None, fitting), [])


def _or_faster(plan: Plan, make: Callable[[], Plan], seconds_of: StepSeconds) -> Plan:
    """Return the faster of a plan and another, if that fits."""
    try:
        other = make()
    except PlanInfeasible:
        return plan
    return _first_of_alike([(seconds_of(each), each) for each in (plan, other)])


def _may_gain(plan: Plan, seconds_of: StepSeconds) -> bool:
    """Return whether a step would be shorter if the device had room for everything: if nothing were recomputed or waited for,
    while other lanes do what they do. Those that bring experts do less in larger groups.
    """
    found = seconds_of.forecast(plan)
    # Larger groups read experts more seldom.
    may_join = plan.experts is not None and plan.experts.together < plan.batch.num_micro_batches
    others = () if may_join else tuple(seconds for lane, seconds in found.work.items() if lane is not Lane.COMPUTE)
    return found.step_seconds > _WORSE * max((_busy_seconds(plan, found), *others))


def _busy_seconds(plan: Plan, found: Forecast) -> float:
    """Return the seconds of compute in a step that recomputes nothing: no placement makes the step shorter."""
    results = plan.results
    again = plan.batch.num_micro_batches * (sum(results.forward_flops[1 : plan.num_blocks + 1]) - sum(results.spared_flops))
    return found.work[Lane.COMPUTE] * (1 - again / found.flops_per_step)


def _fastest_plan(problem: Problem, seconds_of: StepSeconds, *, measured: bool) -> Plan:
    """Return the plan that fits and is fastest, with hidden states where `problem` says.

    Every policy that the question allows is searched, so that a question that asks for less gets no worse answer.

    Raises:
        PlanInfeasible: see `make_plan`.
    """
    plans: list[Plan] = []
    refusals = []
    for policy in problem.policies:
        if plans and _is_as_fast_as_compute(plans[0], seconds_of):
            break  # no other order of updates could be faster
        try:
            placements = _fitting(problem, policy)
        except PlanInfeasible as refusal:
            refusals.append(refusal)
            continue
        if plans:
            # The only advantage over the usual policy is that states may stay in memory.
            placements = [choice for choice in placements if filled(problem, plan_of(problem, choice)).updates.resident_states]
        if placements:
            plans.append(_plan_under(problem, policy, placements, seconds_of, measured=measured))
    if not plans and problem.allowance.saves:  # then steps wait for checkpoints
        waiting = replace(problem, allowance=replace(problem.allowance, saves=False))
        return _fastest_plan(waiting, seconds_of, measured=measured)
    if not plans:
        raise refusals[0]
    return plans[0] if len(plans) == 1 else _first_of_alike([(seconds_of(plan), plan) for plan in plans])


def holds_states(problem: Problem) -> bool:
    """Return whether host memory holds the states of all that is trained beside frozen weights, in the leanest plan."""
    own = tuple(index for index, unit in enumerate(problem.units) if unit.has_own_family)
    for thrift in THRIFTS:
        for choice in placements_of(problem, "deferred", thrift):
            plan = plan_of(problem, choice).with_updates(resident_states=own)
            if with_footprint(plan, problem.costs_of(choice.rows), problem.allowance).fits:
                return True
    return False


def _is_as_fast_as_compute(plan: Plan, seconds_of: StepSeconds) -> bool:
    found = seconds_of.forecast(plan)
    return found.step_seconds <= ALIKE * found.work[Lane.COMPUTE]


def _plan_under(problem: Problem, policy: str, placements: list[Choice], seconds_of: StepSeconds, *, measured: bool) -> Plan:
    """Return the fastest plan under an update policy, with one of `placements` and an amount of kept outputs. Where the machine
    was not `measured`, the choice relies on what holds on any machine.
    """
    homes = problem.homes
    if not measured:
        # Drives that were not measured are used only where memory does not suffice, not to gain speed.
        homes = homes[:-1]
        placements = [choice for choice in placements if choice.input_home != "ssd"] or placements
        placements = [choice for choice in placements if choice.held != "ssd"] or placements

    # Where it was not measured how lanes share cores, or threads may not be chosen, compute has all threads.
    may_split = measured and problem.workload.grouping is None

    def split(plan: Plan) -> Plan:
        return with_threads(plan, seconds_of) if may_split else plan

    seconds = ChoiceSeconds(problem, seconds_of)
    promise = [(min(map(seconds, _extremes(problem, choice))), index) for index, choice in enumerate(placements)]
    found = [(seconds(choice), choice) for choice in placements]
    finalists: dict[tuple[object, ...], Choice] = {}
    for _, index in sorted(promise):
        choice = placements[index]
        # Of placements that differ only in buffer size, keep the fastest.
        finalists.setdefault((choice.rows, choice.input_home, choice.held, choice.freed_memory), choice)
    for choice in list(finalists.values())[:_FINALISTS]:
        found += [_best_amount(problem, replace(choice, kept_home=home), seconds) for home in homes]
    found = seconds.exactly(found)
    problem, found = _with_groups_as_large_as_pays(problem, found, seconds_of)
    best = _first_of_alike(found)
    plan = filled(problem, plan_of(problem, best))
    if policy == "immediate" and not problem.place:  # all stages commit at the same time
        plan = _balanced(problem, found, best, seconds_of, ("host", "ssd") if measured else ("host",))
        return split(with_two_accumulators(problem, with_device_updates(problem, plan, seconds_of), seconds_of))
    if policy != "deferred":
        return split(with_device_updates(problem, plan, seconds_of))
    candidates, guesses = [plan], problem.clips and not problem.place
    if guesses:
        candidates += speculative_candidate(problem, placements, best, seconds_of)
    if plan.updates.resident_states:
        # States in memory are not read, but each checkpoint writes them.
        costs = problem.costs_of(plan.batch.micro_batch_sequences)
        candidates.insert(0, with_footprint(plan.with_updates(resident_states=()), costs, problem.allowance))
    plan = min(candidates, key=lambda candidate: expected_seconds(candidate, seconds_of, clips=guesses))
    plan = split(with_two_accumulators(problem, with_device_updates(problem, plan, seconds_of), seconds_of))
    return with_speculation(plan, seconds_of) if guesses else plan


def _with_groups_as_large_as_pays(
    problem: Problem, found: list[tuple[float, Choice]], seconds_of: StepSeconds
) -> tuple[Problem, list[tuple[float, Choice]]]:
    """Return the question and its choices with larger groups at the experts of a block, if that is faster: micro-batches wait
    there without graphs, which are made again.
    """
    remaking = problem.saving(remakes=True)
    plans = ((choice, plan_of(remaking, choice)) for _, choice in found) if problem.experts else ()
    again = [(seconds_of(filled(remaking, plan)), choice) for choice, plan in plans if plan.fits]
    if again and min(again, key=_seconds)[0] * ALIKE < min(found, key=_seconds)[0]:
        return remaking, again
    return problem, found


def _seconds(found: tuple[float, Choice]) -> float:
    return found[0]


def _first_of_alike(found: Sequence[tuple[float, _Found]]) -> _Found:
    """Return the one that takes least time; among equally fast ones the first, which is the simplest."""
    least = min(seconds for seconds, _ in found)
    return next(each for seconds, each in found if seconds <= ALIKE * least)


def _balanced(
    problem: Problem, found: list[tuple[float, Choice]], best: Choice, seconds_of: StepSeconds, homes: tuple[str, ...]
) -> Plan:
    """Return the fastest plan with balanced updates, of the best choice and of others that are close to it."""
    least = min(seconds for seconds, _ in found)
    close = sorted((taken, index) for index, (taken, _) in enumerate(found) if taken < _CLOSE * ALIKE * least)
    choices: dict[tuple[object, ...], Choice] = {}
    for choice in (best, *(found[index][1] for _, index in close)):
        choices.setdefault((choice.buffers, choice.freed_memory), choice)  # the best of each kind
    plans = [
        balanced(problem, plan_of(problem, choice), filled(problem, plan_of(problem, choice)), seconds_of, homes)
        for choice in list(choices.values())[:_BALANCED]
    ]
    return min(plans, key=seconds_of)


def _extremes(problem: Problem, placement: Choice) -> list[Choice]:
    """Return a placement without replay, and with as many kept outputs as fit where block inputs wait."""
    least, most = 0, len(problem.replay_order(placement.rows))
    while least < most:
        middle = (least + most + 1) // 2
        if plan_of(problem, replace(placement, amount=middle, kept_home=placement.input_home)).fits:
            least = middle
        else:
            most = middle - 1
    return [placement, replace(placement, amount=least, kept_home=placement.input_home)]


def _fitting(problem: Problem, policy: str) -> list[Choice]:
    """Return the placements without replay that fit under a policy; the thriftiest ones only where memory is short."""
    generous = list(placements_of(problem, policy, 0))
    found = [choice for choice in generous if plan_of(problem, choice).fits]
    # Thrift may pay as long as something does not fit without it; so more memory never leads to a slower plan.
    for kind in THRIFTS[1:-1] if len(found) == len(generous) else THRIFTS[1:]:
        found += [choice for choice in placements_of(problem, policy, kind) if plan_of(problem, choice).fits]
    if found:
        return list(dict.fromkeys(found))  # where units are small, kinds of buffers coincide
    # The thriftiest take the least memory, but not always the least space: states are written in more and smaller chunks.
    # Those that fit into memory come first: the message then names the space that they need, and with more memory less may do.
    choices = (choice for thrift in reversed(THRIFTS) for choice in placements_of(problem, policy, thrift))
    raise infeasible(min((plan_of(problem, choice) for choice in choices), key=_shortage))


def _shortage(plan: Plan) -> tuple[int, int]:
    """Return the bytes that are short: of memory, and of space. Space makes up for memory where something can wait there."""
    excess = plan.excess_bytes
    ssd = excess.pop("ssd", 0)
    return sum(excess.values()), ssd


def _best_amount(problem: Problem, start: Choice, seconds: Callable[[Choice], float]) -> tuple[float, Choice]:
    """Return the best amount of kept outputs for a placement: a coarse grid, then half steps around its best point."""
    total = len(problem.replay_order(start.rows))
    tried: dict[int, float] = {}

    def try_amounts(amounts: list[int]) -> None:
        for amount in amounts:
            choice = replace(start, amount=amount)
            if amount not in tried and plan_of(problem, choice).fits:
                tried[amount] = seconds(choice)
                if amount > min(tried) and tried[amount] > _WORSE * min(tried.values()):
                    break  # the time is convex in the amount: more only takes longer

    try_amounts([total * part // _AMOUNT_PARTS for part in range(_AMOUNT_PARTS + 1)])
    step = total // _AMOUNT_PARTS
    while tried and step > max(1, total // 24):
        step //= 2
        centre = min(tried, key=lambda amount: (tried[amount], amount))
        try_amounts([amount for amount in (centre - step, centre + step) if 0 <= amount <= total])
    if not tried:
        return float("inf"), start
    best = min(tried, key=lambda amount: (tried[amount], amount))
    return tried[best], replace(start, amount=best)


def nominal_ceilings(problem: Problem) -> Ceilings:
    """Return a machine to plan for where none was measured; see `nominal_machine`."""
    allowance = problem.allowance
    return nominal_machine(allowance.cores, host_bytes=allowance.host_bytes, device_bytes=allowance.device_bytes)


def nominal_machine_of(plan: Plan) -> Ceilings:
    """Return the nominal machine for the times of an existing plan."""
    allowed = plan.results.allowed_bytes
    return nominal_machine(plan.compute_threads, host_bytes=allowed["host"], device_bytes=allowed.get("device"))


def infeasible(plan: Plan) -> PlanInfeasible:
    """Return the refusal of the leanest plan, which exceeds tiers."""
    return refusal(
        plan, "at least {} are needed", f"shorter sequences (now {plan.batch.sequence_length})", words_on_largest(plan)
    )
