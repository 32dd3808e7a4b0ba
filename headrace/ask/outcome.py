"""After a run: planned figures beside measured ones, row by row, for people and for `summary.json`.

Invariant: every tier of the plan has its row; a figure that was not measured is null, and never taken from the plan.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.ask.between_steps import Evaluating
from headrace.ask.plan_report import NOMINAL, PlanReport
from headrace.report.metrics import Record, steady_ssd_bytes
from headrace.terms.tables import Report, line, quantity, row


@dataclass(frozen=True, slots=True)
class OutcomeRow:
    """One quantity. `key` is its name for scripts, `name` for people; `unit` is `bytes`, `seconds` or `tokens/s`."""

    key: str
    name: str
    unit: str
    planned: float | None
    measured: float | None

    @property
    def ratio(self) -> float | None:
        """Measured over planned; None where either is missing, or nothing was planned."""
        return self.measured / self.planned if self.planned and self.measured is not None else None

    def to_json(self) -> dict[str, Any]:
        """Return the row as plain JSON values."""
        return {"unit": self.unit, "planned": self.planned, "measured": self.measured, "ratio": self.ratio}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome(Report):
    """The rows of a run of `steps` steps. `on_measured_machine` is false if times were planned for a nominal machine."""

    rows: tuple[OutcomeRow, ...]
    steps: int
    skipped_steps: int
    machine: str
    on_measured_machine: bool

    def lines(self) -> Iterator[str]:
        """Yield planned beside measured figures."""
        yield row("", ("planned", "measured", "ratio"))
        for each in self.rows:
            ratio = "-" if each.ratio is None else f"{each.ratio:.2f}"
            yield row(each.name, (quantity(each.planned, each.unit), quantity(each.measured, each.unit), ratio))
        skipped = f", {self.skipped_steps} of them skipped" if self.skipped_steps else ""
        yield line("steps", f"{self.steps}{skipped}; times are the median, bytes the mean of those after the first")
        times_planned = any(each.unit == "seconds" and each.planned is not None for each in self.rows)
        if times_planned and not self.on_measured_machine:
            yield line("machine", self.machine + NOMINAL)

    def to_json(self) -> dict[str, Any]:
        """Return one object of plain JSON values."""
        return {
            "steps": self.steps,
            "skipped_steps": self.skipped_steps,
            "machine": self.machine,
            "measured_machine": self.on_measured_machine,
            "planned_and_measured": {each.key: each.to_json() for each in self.rows},
        }


def run_outcome_of(
    report: PlanReport, records: Sequence[Record], evaluations: Sequence[Record] = (), *, host_peak_bytes: int = 0
) -> RunOutcome:
    """Return what `records` and `evaluations`, the lines of `metrics.jsonl`, say about the plan in `report`.

    `host_peak_bytes` is the peak of this process's whole life: data are tokenised before the steps, and the model is written
    after them.

    Times are the median of the steps after the first, in which kernels compile and caches fill. Bytes are the mean of these
    steps, because a commit may come only every few steps. Peaks are the greatest of all steps and of the process.
    """
    plan, forecast = report.plan, report.forecast
    steady = records[1:] or records
    peaks = {
        tier: [record["peak_bytes"][tier] for record in records if tier in record["peak_bytes"]]
        for tier in (plan.results.peak_bytes if plan else ())
    }
    if host_peak_bytes and "host" in peaks:
        # A device tier inside host memory does not count as the host's; if no record has one, its peak was not measured.
        apart = plan.peak("device") if plan and plan.separate_device and not peaks["device"] else 0
        peaks["host"].append(host_peak_bytes - apart)
    planned = {tier: plan.peak(tier) for tier in peaks} if plan else {}
    rows = [
        OutcomeRow(f"{tier}_peak_bytes", f"peak, {tier}", "bytes", size, max(peaks[tier], default=None))
        for tier, size in planned.items()
    ]
    found: tuple[tuple[str, str, str, float | None], ...] = (
        ("step_seconds", "step", "seconds", _median(steady, "seconds")),
        ("tokens_per_second", "tokens/s", "tokens/s", _median(steady, "tokens_per_second")),
        ("ssd_bytes_read_per_step", "ssd read/step", "bytes", steady_ssd_bytes(records, "bytes_read")),
        ("ssd_bytes_written_per_step", "ssd written/step", "bytes", steady_ssd_bytes(records, "bytes_written")),
    )
    rows += [OutcomeRow(key, name, unit, getattr(forecast, key, None), measured) for key, name, unit, measured in found]
    if evaluations:
        ahead = next((each.seconds for each in report.between if isinstance(each, Evaluating)), None)
        rows.append(OutcomeRow("evaluation_seconds", "evaluation", "seconds", ahead, _median(evaluations, "eval_seconds")))
    return RunOutcome(
        rows=tuple(rows),
        steps=len(records),
        skipped_steps=sum("skipped" in record for record in records),
        machine=report.machine,
        on_measured_machine=report.measured,
    )


def _median(records: Sequence[Record], name: str) -> float | None:
    return statistics.median(record[name] for record in records) if records else None
