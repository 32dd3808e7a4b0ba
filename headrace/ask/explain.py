"""The report as the table that people read: before a run (`plan`, `train`), and afterwards beside what was measured.

Invariant: every printed number is one of the report's or the outcome's; nothing is computed here but sums and units.
"""

from collections.abc import Iterator

from headrace.ask.outcome import Outcome
from headrace.ask.plan_report import PlanReport
from headrace.plan.plan import Plan
from headrace.plan.words import explain_plan
from headrace.terms.plain_figures import plain_figure
from headrace.terms.sizes import format_bytes, format_seconds

_LABEL = 10
_ROW, _COLUMN = 20, 12
_NOMINAL = ": no figures of this machine, so times are guesses; measure it with `headrace bench machine`"


def explain(report: PlanReport) -> str:
    """Return `report` as lines of text."""
    return "\n".join(_lines(report))


def _lines(report: PlanReport) -> Iterator[str]:
    yield _line(
        "model", f"{report.model}, {_count(report.parameters)} parameters, {report.compute_dtype} compute, {report.rule}"
    )
    yield _line("machine", report.machine + ("" if report.measured else _NOMINAL))
    yield _line("step", f"{report.tokens_per_step} tokens, sequences of {report.sequence_length}")
    if report.plan is None:
        yield _line("fits", f"no: {report.reason}")
        yield from _alternatives(report)
        return
    yield _line("fits", "yes")
    yield ""
    yield from _tiers(report.plan, report.allowed_bytes)
    yield ""
    yield from _choices(report.plan)
    yield from _times(report)
    if report.alternatives:
        yield from _alternatives(report)


def _choices(plan: Plan) -> Iterator[str]:
    """Yield the plan's own words, without those that the table already has."""
    told = {"model", "step", *plan.results.peak_bytes}
    for line in explain_plan(plan).splitlines():
        label, _, text = line.partition(" ")
        if label not in told:
            yield _line(label, text.strip())


def _tiers(plan: Plan, allowed: dict[str, int]) -> Iterator[str]:
    """Yield one column per tier: its contents, stacked, and what is left."""
    tiers = list(plan.results.peak_bytes)
    purposes = list(dict.fromkeys(purpose for rows in plan.results.peak_bytes.values() for purpose in rows))
    yield "".ljust(_ROW) + "".join(tier.rjust(_COLUMN) for tier in tiers)
    for purpose in purposes:
        sizes = [plan.results.peak_bytes[tier].get(purpose, 0) for tier in tiers]
        if any(sizes):
            yield purpose.ljust(_ROW) + "".join((format_bytes(size) if size else "-").rjust(_COLUMN) for size in sizes)
    yield "peak".ljust(_ROW) + "".join(format_bytes(plan.peak(tier)).rjust(_COLUMN) for tier in tiers)
    free = [format_bytes(allowed[tier] - plan.peak(tier)) if tier in allowed else "unknown" for tier in tiers]
    yield "free".ljust(_ROW) + "".join(text.rjust(_COLUMN) for text in free)
    budgets = [format_bytes(allowed[tier]) if tier in allowed else "unknown" for tier in tiers]
    yield "allowed".ljust(_ROW) + "".join(text.rjust(_COLUMN) for text in budgets)


def _times(report: PlanReport) -> Iterator[str]:
    forecast, wear = report.forecast, report.endurance
    if forecast is None or wear is None:
        return
    yield _line(
        "time",
        f"{format_seconds(forecast.step_seconds)} per step, {plain_figure(forecast.tokens_per_second, 4)} tokens/s (at best "
        f"{format_seconds(forecast.lower_bound_seconds)}, if nothing waited)",
    )
    yield _line("limit", forecast.explanation)
    for resource, seconds in report.doubled.items():
        gain = forecast.step_seconds / seconds
        yield _line("", f"twice the {resource}: {format_seconds(seconds)} per step, {gain:.2f} times as fast")
    read, written = forecast.ssd_bytes_read_per_step, forecast.ssd_bytes_written_per_step
    yield _line("ssd", f"{format_bytes(read)} read and {format_bytes(written)} written per step")
    yield _line("run", wear.explain())


def explain_outcome(outcome: Outcome) -> str:
    """Return planned and measured figures as lines of text."""
    lines = ["".ljust(_ROW) + "".join(word.rjust(_COLUMN) for word in ("planned", "measured", "ratio"))]
    for row in outcome.rows:
        planned = "-" if row.planned is None else _quantity(row.planned, row.unit)
        measured = "-" if row.measured is None else _quantity(row.measured, row.unit)
        ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
        lines.append(row.name.ljust(_ROW) + "".join(text.rjust(_COLUMN) for text in (planned, measured, ratio)))
    skipped = f", {outcome.skipped_steps} of them skipped" if outcome.skipped_steps else ""
    lines.append(_line("steps", f"{outcome.steps}{skipped}; times are the median, bytes the mean of those after the first"))
    times_planned = any(row.unit == "seconds" and row.planned is not None for row in outcome.rows)
    if times_planned and not outcome.on_measured_machine:
        lines.append(_line("machine", outcome.machine + _NOMINAL))
    return "\n".join(lines)


def _quantity(value: float, unit: str) -> str:
    if unit == "bytes":
        return format_bytes(value)
    return format_seconds(value) if unit == "seconds" else plain_figure(value, 4)


def _alternatives(report: PlanReport) -> Iterator[str]:
    if not report.alternatives:
        yield _line("instead", "no variant was found that fits; a smaller model, or a machine with more memory, is needed")
    for alternative in report.alternatives:
        time = f"{format_seconds(alternative.step_seconds)} per step, {plain_figure(alternative.tokens_per_second, 4)} tokens/s"
        takes = f"{format_bytes(alternative.peak_bytes['host'])} of host memory"
        wear = f"{format_bytes(alternative.ssd_bytes_written_per_step)} written per step"
        yield _line("instead", f"{alternative.change}: {time}, {takes}, {wear}")


def _count(parameters: int) -> str:
    return f"{plain_figure(parameters / 1e9)} billion" if parameters >= 1e9 else f"{parameters / 1e6:.3g} million"


def _line(label: str, text: str) -> str:
    return label.ljust(_LABEL) + text
