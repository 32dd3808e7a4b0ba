"""Blocks come in parts where whole ones have no room on the device: a search without them comes first, and is as it was."""

from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Protocol

from headrace.plan.plan import Plan
from headrace.terms.block_parts import note_on_block_parts
from headrace.terms.ceilings import Ceilings
from headrace.terms.errors import PlanInfeasible

if TYPE_CHECKING:  # both import this
    from headrace.plan.forecast import StepSeconds
    from headrace.plan.space import Problem


class Search(Protocol):
    """What finds the plan that fits and is fastest. Raises `PlanInfeasible` where none fits."""

    def __call__(self, problem: "Problem", ceilings: Ceilings | None = None, seconds_of: "StepSeconds | None" = None) -> Plan:
        """Return the plan for a problem on a machine, None: a nominal one."""


def in_parts_if_needed(search: Search) -> Search:
    """Return a `search` that cuts blocks where the device has no room for whole ones, if `Problem.cuts` says how."""

    @wraps(search)
    def searched(problem: "Problem", ceilings: Ceilings | None = None, seconds_of: "StepSeconds | None" = None) -> Plan:
        try:
            return search(problem, ceilings, seconds_of)
        except PlanInfeasible as refusal:
            parts = problem.cuts() if refusal.tier == "device" and not problem.costs_of(1).by_samples else None
            if parts is None:
                raise
            note = note_on_block_parts(refusal.tier, refusal.needed_bytes)
            return search(replace(problem, parts=parts), ceilings, seconds_of).with_notes((note,))

    return searched
