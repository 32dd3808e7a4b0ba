"""Blocks come in parts where whole ones have no room on the device, and one by one where host memory has no room for two.

A search without that comes first, and is as it was.
"""

from functools import wraps
from typing import Protocol

from headrace.plan.forecast.forecast import StepSeconds
from headrace.plan.search.problem import Problem
from headrace.plan.value.plan import Plan
from headrace.terms.block_parts import note_on_block_parts, note_on_one_block
from headrace.terms.errors import PlanInfeasible
from headrace.terms.forms import SSD
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.sizes import format_bytes


class Search(Protocol):
    """What finds the plan that fits and is fastest. Raises `PlanInfeasible` where none fits."""

    def __call__(self, problem: Problem, ceilings: Ceilings | None = None, seconds_of: StepSeconds | None = None) -> Plan:
        """Return the plan for a problem on a machine, None: a nominal one."""


def in_parts_if_needed(search: Search) -> Search:
    """Return a `search` that goes on where nothing fits. Where the device is short, blocks come in parts, if `Problem.cuts`
    says how. Where host memory is short, it has one block at a time.
    """

    @wraps(search)
    def searched(problem: Problem, ceilings: Ceilings | None = None, seconds_of: StepSeconds | None = None) -> Plan:
        try:
            return search(problem, ceilings, seconds_of)
        except PlanInfeasible as refusal:
            leaner = _leaner(problem, refusal)
            if leaner is None:
                raise
            note = (
                note_on_one_block
                if leaner.savings.one_block_in_host_memory != problem.savings.one_block_in_host_memory
                else note_on_block_parts
            )
            return searched(leaner, ceilings, seconds_of).with_notes((note(refusal.tier, refusal.needed_bytes),))

    return searched


def _leaner(problem: Problem, refusal: PlanInfeasible) -> Problem | None:
    """Return a question whose plans take less of the tier that is short; None where there is none."""
    if refusal.tier == "device" and problem.savings.parts is None and not problem.costs_of(1).by_samples:
        parts = problem.cuts()
        return problem.saving(parts=parts) if parts else None
    # What has room in memory then need not wait on the drives.
    if refusal.tier in ("host", "ssd") and not problem.savings.one_block_in_host_memory and _comes_whole(problem):
        return problem.saving(one_block_in_host_memory=True)
    return None


def _comes_whole(problem: Problem) -> bool:
    """Return whether blocks come whole from drives, to this process alone, so that one at a time may be in memory."""
    alone = problem.place is None and problem.experts is None and problem.allowance.sharers == 1
    return alone and sum(unit.home == SSD and not unit.is_far for unit in problem.units) > 1


def words_on_largest(plan: Plan) -> str:
    """Return a sentence on the largest unit; where blocks come in parts, also on these, and on the largest that comes whole."""
    largest = max(range(len(plan.units)), key=plan.slot_bytes)
    name, size = plan.units[largest].name, plan.slot_bytes(largest)
    words = f"The largest unit is {name} with {format_bytes(size)} of weights"
    if plan.parts is None:
        return f"{words}. "
    part = plan.planes.weight.num_bytes(plan.parts.elements)
    if size < part:
        return f"The largest unit is a part of a block with {format_bytes(part)} of weights. "
    return f"{words}, as blocks come in parts of at most {format_bytes(part)} already. "
