"""Plans whose frozen ends are not in memory all the time: the embedding is read by rows, the head comes for the loss."""

from collections.abc import Callable
from dataclasses import replace

from headrace.plan.forecast.footprint import with_footprint
from headrace.plan.schedules.ranks import ranks_on
from headrace.plan.search.problem import Problem
from headrace.plan.value.plan import Plan
from headrace.plan.value.refusal import least_of
from headrace.terms.embedding_rows import note_on_rows
from headrace.terms.errors import PlanInfeasible
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.sizes import format_bytes


def spared(problem: Problem, machine: Ceilings) -> Problem | None:
    """Return `problem` with both ends out of memory, as far as they may be; None where neither may."""
    if ranks_on(machine) > 1 or not (problem.has_rows or problem.head_may_visit):
        return None
    return problem.saving(by_rows=problem.has_rows, head_is_loaded_for_loss=problem.head_may_visit)


def no_more_than_needed(problem: Problem, search: Callable[[Problem], Plan]) -> Plan:
    """Return the plan that `search` finds for a problem whose ends are spared, with notes. The head stays where that fits.

    Raises:
        PlanInfeasible: as `search`.
    """
    notes = list[str]()
    plan = _first_that_fits(problem, search)
    if plan.visiting_head is not None and plan.head_slot_bytes is None:
        costs = problem.costs_of(plan.batch.micro_batch_sequences)
        staying = with_footprint(replace(plan, visiting_head=None), costs, problem.allowance)
        plan = staying if staying.fits else plan
    if plan.embedding is not None:
        notes.append(note_on_rows(plan.embedding.whole_bytes))
    if plan.visiting_head is not None:
        where = "host memory" if plan.visiting_head == "host" else "the drives"
        how = "for each step's loss, and leaves" if plan.head_slot_bytes is None else "range by range, twice for each loss"
        notes.append(f"the head comes from {where} {how}: {format_bytes(plan.visiting_bytes)}")
    return plan.with_notes(notes)


def _first_that_fits(problem: Problem, search: Callable[[Problem], Plan]) -> Plan:
    """Return the plan of the first way to spare the ends that fits. If none does, raise what asks for least where the first was
    short.
    """
    # A head that visits takes memory, too, where it waits. One that comes by ranges takes less, and comes more often.
    ways = [problem]
    if problem.savings.by_rows and problem.savings.head_is_loaded_for_loss:
        ways.append(problem.saving(head_is_loaded_for_loss=False))
    if problem.savings.head_is_loaded_for_loss and problem.head_may_come_by_ranges:
        ways.append(problem.saving(head_in_row_ranges=True))
    refusals: list[PlanInfeasible] = []
    for way in ways:
        try:
            return search(way)
        except PlanInfeasible as refusal:
            refusals.append(refusal)
    raise least_of(*refusals)
