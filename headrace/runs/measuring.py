"""The machine figures that a run is planned with: a profile, an earlier measurement, or one made now.

Invariant: a resumed run is not measured again, because its record has the figures and the plan with which it began. Where
figures were kept, they are used, so that rates which differ from one measurement to the next never change a plan.
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.machine.host_memory import anonymous_bytes
from headrace.machine.protocol import Machine
from headrace.measure.kept import Wanted, alone, find_kept, keep
from headrace.plan.forecast.forecast import forecast
from headrace.plan.search.search import nominal_machine_of
from headrace.plan.value.plan import Plan
from headrace.terms.errors import HeadraceError
from headrace.terms.events import Notice, Sink
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.options.run_options import RunOptions
from headrace.terms.sizes import format_seconds

if TYPE_CHECKING:
    from headrace.measure.brief import MeasuringRoom

# A run that takes no longer than the first figure is not worth measuring. The usual figures may estimate too little: for a run
# that takes more than the second figure by them, products are looked at first.
_LONG_SECONDS, _DOUBTFUL_SECONDS = 120.0, 15.0
# Another process that measures is done in a third of this time.
_WAIT_SECONDS = 30.0
# The share of what a plan has left that is used: rounding to whole pages, pieces and threads comes on top.
_ROOM_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class MachineHere:
    """What is known of this machine before a run: the profile that is `named`, if any, and the `directories` of the state.

    `cache` has what earlier runs measured. `measures`: it may be measured.
    """

    named: str | Ceilings | None
    directories: tuple[Path, ...]
    compute_dtype: str
    cache: Path
    measures: bool

    @classmethod
    def of(cls, options: RunOptions, directories: tuple[Path, ...]) -> "MachineHere":
        """Return the machine of a run whose state lies in `directories`."""
        return cls(options.machine, directories, options.compute_dtype, options.cache, options.measure)


class MachineOfRun:
    """The figures of the machine for one run of `total_steps` steps; `sink` is told what is done.

    `ceilings` are what is known without measuring. Called with the plan that is made without any, it measures if the run is
    long, and returns what it found.
    """

    def __init__(self, here: MachineHere, *, total_steps: int, sink: Sink) -> None:
        self._cache, self._steps, self._sink = here.cache, total_steps, sink
        self._wanted = Wanted(directories=here.directories, compute_dtype=here.compute_dtype)
        self.may_measure = here.measures and here.named is None
        self.ceilings: Ceilings | None = None
        if here.named is None:
            self.ceilings = find_kept(self._cache, self._wanted)

    def __call__(self, plan: Plan, machine: Machine) -> Ceilings | None:
        """Return the figures of this machine, if the run under `plan` takes long enough to be worth measuring; else None."""
        if not self.may_measure or self.ceilings is not None:
            return self.ceilings
        seconds = self._run_seconds(plan, machine)
        if seconds > _LONG_SECONDS:
            self.ceilings = self._kept_or_measured(plan, machine, seconds)
        return self.ceilings

    def _run_seconds(self, plan: Plan, machine: Machine) -> float:
        """Return the seconds of the run by usual figures; where these say little, by a short look at products."""
        usual = nominal_machine_of(plan)
        seconds = self._steps * forecast(plan, usual).step_seconds
        if not _DOUBTFUL_SECONDS < seconds <= _LONG_SECONDS:
            return seconds
        from headrace.measure.brief import look_at_products  # late, as below

        rates = {plan.compute_dtype: look_at_products(machine, plan.compute_dtype)}
        return self._steps * forecast(plan, replace(usual, flops_per_second=rates)).step_seconds

    def _kept_or_measured(self, plan: Plan, machine: Machine, run_seconds: float) -> Ceilings | None:
        from headrace.measure.brief import BRIEF_SECONDS, measure_briefly  # late: it brings the kernels and their compiler

        self._say(
            f"measuring this machine for at most {BRIEF_SECONDS:.0f} s, because the run may take {format_seconds(run_seconds)} "
            "and there are no figures yet; --no-measure skips this"
        )
        begin = time.perf_counter()
        with alone(_WAIT_SECONDS) as first:
            # Another process may have measured while this one waited; its figures serve this run, too.
            if kept := find_kept(self._cache, self._wanted):
                self._say("another process has measured it")
                return kept
            if not first:
                self._say("not measured: another process has been measuring for too long; times are guesses", level="warning")
                return None
            try:
                found = measure_briefly(machine, self._wanted.measured, plan.compute_dtype, _room(plan))
            except HeadraceError as error:
                self._say(f"not measured: {error}; times are guesses", level="warning")
                return None
            path = keep(self._cache, self._wanted, found)
        where = f"kept for later runs in {path}" if path else "it cannot be kept: the cache cannot be written"
        self._say(f"measured in {format_seconds(time.perf_counter() - begin)}; {where}")
        return self._wanted.of_directories(found)

    def _say(self, text: str, level: str = "info") -> None:
        self._sink(Notice(text=text, level=level))


def _room(plan: Plan) -> "MeasuringRoom":
    """Return what measuring may take under the budgets: the memory for those parts of the plan that do not exist yet."""
    from headrace.measure.brief import MeasuringRoom

    left = plan.peak("host") - anonymous_bytes()
    device = 0 if "device" not in plan.results.peak_bytes else plan.peak("device")
    return MeasuringRoom(host_bytes=int(_ROOM_SHARE * left), device_bytes=int(_ROOM_SHARE * device))
