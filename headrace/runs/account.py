"""What a run says about its plan: the table before the first step, and planned beside measured figures after the last.

Invariant: the tables are those of `headrace plan`; `summary.json` has the figures of the second one. A run that could go on is
never refused because a figure in them is missing.
"""

import contextlib
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.ask.answer import report_of
from headrace.ask.between_steps import BesideSteps
from headrace.ask.outcome import run_outcome_of
from headrace.ask.plan_report import PlanReport
from headrace.data.batches.open_data import read_model_config
from headrace.files import file_systems
from headrace.plan.clock.machine_profiles import load_profile
from headrace.plan.value.plan import Plan
from headrace.report.metrics import Record
from headrace.runs.measuring import MachineHere
from headrace.runs.protocols import Display
from headrace.store.run_directory import RunDirectory
from headrace.terms.errors import ConfigError, ModelError
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.sizes import format_bytes, format_seconds

# The forecast is corrected if steps are longer or shorter by more than this factor, and at least so many seconds are left.
_OFF, _WORTH_SAYING_SECONDS = 1.25, 60.0
_REFINED_AFTER_STEPS = 3


class Account:
    """The report of a run's plan, and when it is shown."""

    def __init__(
        self,
        plan: Plan,
        model: Path,
        directory: RunDirectory,
        machine: MachineHere,
        num_steps: int,
        between: Sequence[BesideSteps] = (),
        *,
        ceilings: Ceilings | None = None,
    ) -> None:
        """Report on a run of `num_steps` steps, and on what it does `between` them. `ceilings` stand in for those with which it
        began.
        """
        if ceilings is None:
            ceilings = _ceilings(machine, directory)
        self._directory, self._ceilings = directory, ceilings
        self._report: PlanReport = report_of(
            plan,
            ceilings,
            model=_architecture(model),
            num_steps=num_steps,
            between=between,
        )
        self._plan = plan

    def tell_before(self, display: Display) -> None:
        """Show the plan."""
        display.say(self._report.explain())

    def in_short(self, *, steps_left: int) -> str:
        """Return the plan in half a line, for a resumed run. The whole plan was shown at its begin."""
        words = f"the plan is unchanged, {format_bytes(self._plan.peak('host'))} of host memory"
        if not self._report.measured or self._report.forecast is None:
            return words
        return f"{words}, {format_seconds(steps_left * self._report.forecast.step_seconds)} left"

    def refined(self, step_seconds: Sequence[float], *, steps_left: int) -> str:
        """Return a correction of the forecast after this process's third step; `step_seconds` are those of its steps so far. It
        is "" at other times, if the forecast was about right, or if hardly any time is left.
        """
        if len(step_seconds) != _REFINED_AFTER_STEPS:
            return ""
        planned = self._report.forecast.step_seconds if self._report.forecast else 0.0
        taken = statistics.median(step_seconds[1:])  # kernels compile in the first step
        if not planned or steps_left * taken < _WORTH_SAYING_SECONDS or 1 / _OFF < taken / planned < _OFF:
            return ""
        return (
            f"steps take {format_seconds(taken)} where {format_seconds(planned)} were forecast: "
            f"{format_seconds(steps_left * taken)} are left"
        )

    def keep_plan(self) -> None:
        """Write the plan into the run directory, for `headrace report`. Call it once there is a run that can be resumed."""
        self._directory.write_plan(self._plan.to_json())
        if self._ceilings is not None:
            self._directory.write_machine(self._ceilings.to_json())

    def sum_up(self, records: Sequence[Record], evaluations: Sequence[Record], *, host_peak_bytes: int) -> str:
        """Write planned beside measured figures into `summary.json`; return them in words, "" without a step.
        `host_peak_bytes` is the peak of the process's whole life.
        """
        if not records:
            return ""
        outcome = run_outcome_of(self._report, records, evaluations, host_peak_bytes=host_peak_bytes)
        self._directory.write_summary(outcome.to_json())
        return outcome.explain()


def _ceilings(machine: MachineHere, directory: RunDirectory) -> Ceilings | None:
    """Return the machine with the drives of the run's directories; None if there is none.

    A resumed run has them in its directory, whatever became of the profile. They must not be divided again, because drive i no
    longer belongs to directory i.
    """
    systems, named = file_systems(machine.directories), machine.named
    with contextlib.suppress(ConfigError):
        return load_profile(directory.path / "machine.json")
    with contextlib.suppress(ConfigError):  # a new run has read it before
        found = load_profile(named) if isinstance(named, str) else named
        if found is not None:
            return found.of_directories(systems)
    return None


def _architecture(model: Path) -> str:
    """Return the class of the model, which is also its name in `headrace plan`; the directory's name if it names none."""
    try:
        names: Any = read_model_config(model).get("architectures")
    except ModelError:
        return model.name
    return str(names[0]) if isinstance(names, list) and names else model.name
