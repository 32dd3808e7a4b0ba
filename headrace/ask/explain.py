"""The report as the table that people read: before a run (`plan`, `train`), and afterwards beside what was measured.

Invariant: every printed number is one of the report's or the outcome's; nothing is computed here but sums and units.
"""

from collections.abc import Iterator

from headrace.ask.outcome import RunOutcome
from headrace.ask.plan_report import PlanReport
from headrace.plan.value.plan import Plan
from headrace.plan.value.words import explain_plan
from headrace.terms.plain_figures import plain_figure
from headrace.terms.sizes import format_bytes, format_seconds
from headrace.terms.tables import Memory, line, memory_table, row

_NOMINAL = ": no figures of this machine, so times are guesses; measure it with `headrace bench machine`"


def explain(report: PlanReport) -> str:
    """Return `report` as lines of text."""
    return "\n".join(_lines(report))


def _lines(report: PlanReport) -> Iterator[str]:
    yield line(
        "model", f"{report.model}, {_count(report.parameters)} parameters, {report.compute_dtype} compute, {report.rule}"
    )
    yield line("machine", report.machine + ("" if report.measured else _NOMINAL))
    yield line("step", f"{report.tokens_per_step} tokens, sequences of {report.sequence_length}")
    if report.plan is None:
        yield line("fits", f"no: {report.reason}")
        yield from _alternatives(report)
        return
    yield line("fits", "yes")
    yield ""
    peaks = report.plan.results.peak_bytes
    columns = [Memory(tier, purposes, report.allowed_bytes.get(tier)) for tier, purposes in peaks.items()]
    yield from memory_table(columns, free=True)
    yield ""
    yield from _choices(report.plan)
    yield from _times(report)
    if report.alternatives:
        yield from _alternatives(report)


def _choices(plan: Plan) -> Iterator[str]:
    """Yield the plan's own words, without those that the table already has."""
    told = {"model", "step", *plan.results.peak_bytes}
    for words in explain_plan(plan).splitlines():
        label, _, text = words.partition(" ")
        if label not in told:
            yield line(label, text.strip())


def _times(report: PlanReport) -> Iterator[str]:
    forecast, wear = report.forecast, report.endurance
    if forecast is None or wear is None:
        return
    yield line(
        "time",
        f"{format_seconds(forecast.step_seconds)} per step, {plain_figure(forecast.tokens_per_second, 4)} tokens/s (at best "
        f"{format_seconds(forecast.lower_bound_seconds)}, if nothing waited)",
    )
    yield line("limit", forecast.explanation)
    for resource, seconds in report.doubled.items():
        gain = forecast.step_seconds / seconds
        yield line("", f"twice the {resource}: {format_seconds(seconds)} per step, {gain:.2f} times as fast")
    read, written = forecast.ssd_bytes_read_per_step, forecast.ssd_bytes_written_per_step
    yield line("ssd", f"{format_bytes(read)} read and {format_bytes(written)} written per step")
    yield line("run", wear.explain())
    for each in report.between:
        yield line(each.label, each.explain())


def explain_outcome(outcome: RunOutcome) -> str:
    """Return planned and measured figures as lines of text."""
    lines = [row("", ("planned", "measured", "ratio"))]
    for each in outcome.rows:
        ratio = "-" if each.ratio is None else f"{each.ratio:.2f}"
        lines.append(row(each.name, (_quantity(each.planned, each.unit), _quantity(each.measured, each.unit), ratio)))
    skipped = f", {outcome.skipped_steps} of them skipped" if outcome.skipped_steps else ""
    lines.append(line("steps", f"{outcome.steps}{skipped}; times are the median, bytes the mean of those after the first"))
    times_planned = any(each.unit == "seconds" and each.planned is not None for each in outcome.rows)
    if times_planned and not outcome.on_measured_machine:
        lines.append(line("machine", outcome.machine + _NOMINAL))
    return "\n".join(lines)


def _quantity(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "bytes":
        return format_bytes(value)
    return format_seconds(value) if unit == "seconds" else plain_figure(value, 4)


def _alternatives(report: PlanReport) -> Iterator[str]:
    if not report.alternatives:
        yield line("instead", "no variant was found that fits; a smaller model, or a machine with more memory, is needed")
    for alternative in report.alternatives:
        time = f"{format_seconds(alternative.step_seconds)} per step, {plain_figure(alternative.tokens_per_second, 4)} tokens/s"
        takes = f"{format_bytes(alternative.peak_bytes['host'])} of host memory"
        wear = f"{format_bytes(alternative.ssd_bytes_written_per_step)} written per step"
        yield line("instead", f"{alternative.change}: {time}, {takes}, {wear}")


def _count(parameters: int) -> str:
    return f"{plain_figure(parameters / 1e9)} billion" if parameters >= 1e9 else f"{parameters / 1e6:.3g} million"
