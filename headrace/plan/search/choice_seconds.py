"""Seconds of a step for many choices of placement, by coarse forecasts."""

import math
from dataclasses import replace

from headrace.plan.forecast.forecast import SEARCH_OPERATIONS, StepSeconds
from headrace.plan.search.problem import Problem
from headrace.plan.search.space import Choice, filled, plan_of

# So many choices, each the best of its kind, are forecast in full.
_EXACT = 8


class ChoiceSeconds:
    """Seconds of a step for every choice, by coarse forecasts that are corrected for each kind of buffers.

    A coarse forecast is too fast, and more so with smaller buffers (`forecast`). For each kind, the first choice is also
    forecast exactly, and the ratio of the two serves for the others of its kind.
    """

    def __init__(self, problem: Problem, seconds_of: StepSeconds) -> None:
        self._problem, self._seconds_of = problem, seconds_of
        self._known: dict[Choice, float] = {}
        self._factors: dict[tuple[bool, int, int], float] = {}

    def __call__(self, choice: Choice) -> float:
        """Return the seconds of a step."""
        if choice.amount == 0:
            choice = replace(choice, kept_home="device")  # without kept outputs their home does not matter
        if choice not in self._known:
            plan = filled(self._problem, plan_of(self._problem, choice))
            coarse = self._seconds_of(plan, SEARCH_OPERATIONS)
            if choice.buffers not in self._factors:
                self._factors[choice.buffers] = self._seconds_of(plan) / coarse
            self._known[choice] = coarse * self._factors[choice.buffers]
        return self._known[choice]

    def exactly(self, found: list[tuple[float, Choice]]) -> list[tuple[float, Choice]]:
        """Return the best choice of each kind among those found, for the best kinds only, with seconds as `forecast` gives
        them.
        """
        kinds: dict[tuple[object, ...], tuple[float, int]] = {}
        for index, (seconds, choice) in enumerate(found):
            kind = *choice.buffers, choice.rows, choice.freed_memory, choice.held, choice.kept_home if choice.amount else ""
            kinds[kind] = min(kinds.get(kind, (math.inf, index)), (seconds, index))
        best = sorted(kinds.values())[:_EXACT]
        plans = {index: plan_of(self._problem, found[index][1]) for _, index in best}
        return [(self._seconds_of(filled(self._problem, plans[index])), found[index][1]) for index in sorted(plans)]
