"""Plans whose frozen ends are not in memory all the time: the embedding is read by rows, the head comes for the loss."""

from collections.abc import Callable
from dataclasses import replace

from headrace.plan.footprint import with_footprint
from headrace.plan.plan import Plan
from headrace.plan.ranks import ranks_on
from headrace.plan.space import Problem
from headrace.terms.ceilings import Ceilings
from headrace.terms.embedding_rows import note_on_rows
from headrace.terms.errors import PlanInfeasible
from headrace.terms.sizes import format_bytes


def spared(problem: Problem, machine: Ceilings) -> Problem | None:
    """Return `problem` with both ends out of memory, as far as they may be; None where neither may."""
    if ranks_on(machine) > 1 or not (problem.has_rows or problem.head_may_visit):
        return None
    return replace(problem, by_rows=problem.has_rows, visits=problem.head_may_visit)


def no_more_than_needed(problem: Problem, search: Callable[[Problem], Plan]) -> Plan:
    """Return the plan that `search` finds for a problem whose ends are spared, with notes. The head stays where that fits.

    Raises:
        PlanInfeasible: as `search`.
    """
    notes = list[str]()
    try:
        plan = search(problem)
    except PlanInfeasible as refusal:
        if not (problem.by_rows and problem.visits):
            raise
        try:
            plan = search(replace(problem, visits=False))  # a head that visits takes memory, too, where it waits
        except PlanInfeasible:
            raise refusal from None
    if plan.visiting_head is not None:
        costs = problem.costs_of(plan.batch.micro_batch_sequences)
        staying = with_footprint(replace(plan, visiting_head=None), costs, problem.allowance)
        plan = staying if staying.fits else plan
    if plan.embedding is not None:
        notes.append(note_on_rows(plan.embedding.whole_bytes))
    if plan.visiting_head is not None:
        where = "host memory" if plan.visiting_head == "host" else "the drives"
        notes.append(f"the head comes from {where} for each step's loss, and leaves: {format_bytes(plan.visiting_bytes)}")
    return plan.with_notes(notes)
