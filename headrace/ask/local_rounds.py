"""Local steps: what a round of one learner computes and moves, and how many steps a link asks for.

Invariant: seconds of a step are those of the learner's own plan; a learner waits while its changes travel, as in a run.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.ask.plan_report import PlanReport
from headrace.terms.forms import UnitFigures
from headrace.terms.options.plan_options import PlanOptions
from headrace.terms.sizes import format_bytes, format_seconds
from headrace.terms.tables import Report, figures, line
from headrace.update.sites.travel import TRAVELS

# Bytes per second of a network without a given rate: 100 Mbit/s, for which local steps are made.
_LINK_BYTES_PER_SECOND = 12.5e6
# The share of a round that compute should have.
_BUSY = 0.9
# Copies of 16-bit weights that workers without local steps pull in a step: for forward and for backward.
_PULLED_BYTES = 2 * 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalReport(Report):
    """The plan of a learner, and its rounds of `local_steps`. `numbers` are those that travel, `way_bytes` their bytes."""

    plan: PlanReport
    local_steps: int
    exchange_dtype: str
    link_bytes_per_second: float
    numbers: int
    way_bytes: int

    @classmethod
    def of(cls, plan: PlanReport, options: PlanOptions) -> "LocalReport":
        """Return the report for `options`, which have local steps."""
        assert options.local_steps is not None, "asked for"
        travel = TRAVELS[options.exchange_dtype]
        numbers = sum(map(_travelling, plan.plan.units)) if plan.plan is not None else 0
        (size,) = travel.sizes([numbers])
        return cls(
            plan=plan,
            local_steps=options.local_steps,
            exchange_dtype=options.exchange_dtype,
            link_bytes_per_second=float(options.link or _LINK_BYTES_PER_SECOND),
            numbers=numbers,
            way_bytes=size * np.dtype(travel.dtype).itemsize,
        )

    @property
    def step_seconds(self) -> float:
        """Seconds of one step of the learner; 0 where there is no plan."""
        return self.plan.forecast.step_seconds if self.plan.forecast is not None else 0.0

    @property
    def exchange_seconds(self) -> float:
        """Seconds in which changes go up and come down."""
        return 2 * self.way_bytes / self.link_bytes_per_second

    @property
    def busy_share(self) -> float:
        """Share of a round in which the learner computes; 0 where there is no plan."""
        computing = self.local_steps * self.step_seconds
        return computing / (computing + self.exchange_seconds) if computing else 0.0

    @property
    def least_steps(self) -> int:
        """The least number of local steps with which the learner computes nine tenths of the time."""
        return max(1, math.ceil(_BUSY / (1 - _BUSY) * self.exchange_seconds / self.step_seconds)) if self.step_seconds else 1

    @property
    def together_seconds(self) -> float:
        """Seconds in which weights alone would cross this link in each step without local steps."""
        return _PULLED_BYTES * self.plan.parameters / self.link_bytes_per_second

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values: those of the learner's plan, and of its rounds."""
        names = ("local_steps", "exchange_dtype", "link_bytes_per_second", "numbers", "way_bytes", "exchange_seconds")
        return self.plan.to_json() | figures(self, *names, "busy_share", "least_steps", "together_seconds")

    def lines(self) -> Iterator[str]:
        """Yield the lines that people read."""
        yield from self.plan.lines()
        if not self.plan.fits:
            return
        way, rate = format_bytes(self.way_bytes), f"{8 * self.link_bytes_per_second / 1e6:g} Mbit/s"
        computing, moving = format_seconds(self.local_steps * self.step_seconds), format_seconds(self.exchange_seconds)
        words = f"{self.local_steps} local steps in {computing}; then {way} up and {way} down in {moving} at {rate}"
        yield line("round", f"{words}: computes {self.busy_share:.0%} of the time")
        yield line("", f"from {self.least_steps} local steps on it computes {_BUSY:.0%} of the time")
        seconds = format_seconds(self.together_seconds)
        yield line("", f"without local steps weights alone would take {seconds} in each step")


def _travelling(unit: UnitFigures) -> int:
    """Return how many numbers of a unit travel: of a subspace, the weights that it is merged with."""
    return unit.num_parameters if unit.in_place or unit.basis_elements else unit.gradient_elements
