"""Plans for tests that are not about planning: the first that fits, made once for each problem."""

import dataclasses
from typing import Any

from headrace.plan.search.search import make_plan
from headrace.plan.search.space import THRIFTS, filled, placements_of, plan_of
from headrace.terms.sizes import GIB


class Plans:
    """Plans each problem once: the same few are opened hundreds of times here. Most tests are not about planning: they get the
    first plan that fits.
    """

    def __init__(self) -> None:
        self.searches = True
        self._found: dict[tuple[Any, ...], Any] = {}

    def __call__(self, problem: Any, ceilings: Any = None) -> Any:
        stated = {field.name: getattr(problem, field.name) for field in dataclasses.fields(problem)}
        # What is free changes from test to test; where it is more than these models could use, it does not matter.
        space = min(stated["allowance"].ssd_bytes or GIB, GIB)
        stated["allowance"] = dataclasses.replace(stated["allowance"], ssd_bytes=space)
        costs = stated.pop("costs_of")(1)
        key = (self.searches, repr(stated), repr(costs), repr(ceilings))
        if key not in self._found:
            first = None if self.searches else first_that_fits(problem)
            self._found[key] = first or make_plan(problem, ceilings)
        return self._found[key]


def first_that_fits(problem: Any) -> Any:
    """Return the first placement that fits under the usual policy, None if none does."""
    choices = (choice for thrift in THRIFTS for choice in placements_of(problem, problem.policies[0], thrift))
    plans = (plan_of(problem, choice) for choice in choices)
    return next((filled(problem, plan) for plan in plans if plan.fits), None)
