"""What `headrace plan` answers, as a value, and as the table that people read before a run.

Invariant: it fits if and only if there is a plan, and a plan's peaks are within what is allowed. Every printed number is one of
the report's; nothing is computed for the table but sums and units.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from headrace.ask.between_steps import BesideSteps
from headrace.plan.clock.endurance import Endurance
from headrace.plan.forecast.forecast import Forecast
from headrace.plan.value.plan import Plan
from headrace.plan.value.words import explain_plan, explain_step
from headrace.terms.plain_figures import plain_figure
from headrace.terms.sizes import about_seconds, format_bytes, format_seconds, rough_figure
from headrace.terms.tables import Memory, Report, figures, line, memory_line, memory_table, ten_lines

NOMINAL = ": no figures of this machine, so times are guesses; measure it with `headrace bench machine`"

# So many alternatives stand in a brief report.
_BEST = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A variant that fits: what to change, in words and as options, and what it gives before any search for what to replay.

    If the plan fits, its alternatives are variants that would be faster where the SSDs limit the step, otherwise unchanged.
    """

    change: str
    options: dict[str, Any]
    step_seconds: float
    tokens_per_second: float
    peak_bytes: dict[str, int]
    ssd_bytes_written_per_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingReport(Report):
    """What the report of any training has. `reason` says why it does not fit."""

    model: str
    parameters: int
    compute_dtype: str
    rule: str
    tokens_per_step: int
    sequence_length: int
    reason: str = ""
    endurance: Endurance | None = None

    def asked_json(self, *names: str) -> dict[str, Any]:
        """Return what was asked, the attributes `names` of it included, and whether it fits, as plain JSON values."""
        common = ("model", "parameters", "compute_dtype", "rule", "tokens_per_step", "sequence_length")
        return figures(self, *common, *names, "fits", "reason")

    def wear_json(self) -> dict[str, float]:
        """Return the length of the run and the wear of its drives; nothing where there is no plan."""
        return self.endurance.to_json() if self.endurance is not None else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport(TrainingReport):
    """Whether a model can be trained on a machine, how, how fast, and what would be better.

    `needed_bytes` and `allowed_bytes` are per tier. `needed_bytes` are the plan's peaks. Without a plan they are the needs of
    the leanest plan in the tier that lacks most. `doubled` maps a resource, in words, to the seconds per step with twice of it.
    `measured` is false where the machine is a nominal one, because there is no profile. `unused_tensors` are stored with the
    model, which has no place for them; None where no files were opened.
    """

    machine: str
    measured: bool
    allowed_bytes: dict[str, int]
    needed_bytes: dict[str, int] = field(default_factory=dict)
    plan: Plan | None = None
    forecast: Forecast | None = None
    doubled: dict[str, float] = field(default_factory=dict)
    alternatives: tuple[Alternative, ...] = ()
    unused_tensors: tuple[str, ...] | None = None
    between: tuple[BesideSteps, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether there is a plan within the budgets."""
        return self.plan is not None

    def lines(self) -> Iterator[str]:
        """Yield the lines that people read."""
        yield line("model", f"{self.model}, {_count(self.parameters)} parameters, {self.compute_dtype} compute, {self.rule}")
        yield line("machine", self.machine + ("" if self.measured else NOMINAL))
        yield line("step", f"{self.tokens_per_step} tokens, sequences of {self.sequence_length}")
        if self.plan is None:
            yield line("fits", f"no: {self.reason}")
            yield from _alternatives(self, self.alternatives)
            return
        yield line("fits", "yes")
        yield ""
        peaks = self.plan.results.peak_bytes
        columns = [Memory(tier, purposes, self.allowed_bytes.get(tier)) for tier, purposes in peaks.items()]
        yield from memory_table(columns, free=True)
        yield ""
        yield from _choices(self.plan)
        yield from _times(self)
        if self.alternatives:
            yield from _alternatives(self, self.alternatives)

    def brief(self) -> str:
        """Return what decides, in ten lines: the best alternatives, and no word that only its makers use."""
        if self.plan is None or self.forecast is None or self.endurance is None:
            return ten_lines(self.lines())
        plan, found, results = self.plan, self.forecast, self.plan.results
        limit = found.explanation
        if self.doubled:
            part, seconds = min(self.doubled.items(), key=lambda pair: pair[1])
            limit += f"; twice the {part}: {found.step_seconds / seconds:.2f} times as fast"
        wear = self.endurance.explain().rsplit(" (", 1)[0]
        head = [each for each in self.lines() if each.startswith(("model ", "machine "))]
        best = sorted(self.alternatives, key=lambda each: each.step_seconds)[:_BEST]
        return ten_lines(
            (
                *head,
                line("step", explain_step(plan)),
                line("fits", f"yes: {memory_line(self.needed_bytes, self.allowed_bytes)}"),
                line("time", _time_of(self, found)),
                line("limit", limit),
                line("run", wear),
                *(line(each.label, each.explain()) for each in self.between),
                *_alternatives(self, best),
                *(line("note", note) for note in results.notes),
            )
        )

    def to_json(self) -> dict[str, Any]:
        """Return one object of plain JSON values; unknown figures are null."""
        forecast, plan = self.forecast, self.plan
        return {
            **self.asked_json("machine", "measured"),
            "peak_bytes": self.needed_bytes,
            "allowed_bytes": self.allowed_bytes,
            "peak_bytes_by_purpose": plan.results.peak_bytes if plan else None,
            **figures(forecast, "step_seconds", "lower_bound_seconds", "tokens_per_second"),
            "bottleneck": forecast.explanation if forecast else None,
            "bottleneck_lane": str(forecast.bottleneck) if forecast else None,
            "utilisation": {str(lane): share for lane, share in forecast.utilisation.items()} if forecast else None,
            **figures(forecast, "ssd_bytes_read_per_step", "ssd_bytes_written_per_step"),
            "step_seconds_with_twice": self.doubled,
            "plan": plan.to_json() if plan else None,
            "alternatives": list(map(asdict, self.alternatives)),
            **self.wear_json(),
            **{key: value for each in self.between for key, value in each.to_json().items()},
            **({} if self.unused_tensors is None else {"unused_tensors": list(self.unused_tensors)}),
        }


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
    yield line("time", _time_of(report, forecast))
    yield line("limit", forecast.explanation)
    for resource, seconds in report.doubled.items():
        gain = forecast.step_seconds / seconds
        yield line("", f"twice the {resource}: {_seconds(report, seconds)} per step, {gain:.2f} times as fast")
    read, written = forecast.ssd_bytes_read_per_step, forecast.ssd_bytes_written_per_step
    yield line("ssd", f"{format_bytes(read)} read and {format_bytes(written)} written per step")
    yield line("run", wear.explain())
    for each in report.between:
        yield line(each.label, each.explain())


def _time_of(report: PlanReport, found: Forecast) -> str:
    best = _seconds(report, found.lower_bound_seconds)
    speed = plain_figure(found.tokens_per_second, 4) if report.measured else f"about {rough_figure(found.tokens_per_second)}"
    return f"{_seconds(report, found.step_seconds)} per step, {speed} tokens/s (at best {best}, if nothing waited)"


def _seconds(report: PlanReport, seconds: float) -> str:
    """Return a duration; one of a machine that nobody measured looks like the guess that it is."""
    return format_seconds(seconds) if report.measured else about_seconds(seconds)


def _alternatives(report: PlanReport, chosen: Sequence[Alternative]) -> Iterator[str]:
    if not report.alternatives and report.plan is None:
        yield line("instead", "no variant was found that fits; a smaller model, or a machine with more memory, is needed")
    for alternative in chosen:
        speed = alternative.tokens_per_second
        figure = plain_figure(speed, 4) if report.measured else f"about {rough_figure(speed)}"
        time = f"{_seconds(report, alternative.step_seconds)} per step, {figure} tokens/s"
        takes = f"{format_bytes(alternative.peak_bytes['host'])} of host memory"
        wear = f"{format_bytes(alternative.ssd_bytes_written_per_step)} written per step"
        yield line("instead", f"{alternative.change}: {time}, {takes}, {wear}")


def _count(parameters: int) -> str:
    return f"{plain_figure(parameters / 1e9)} billion" if parameters >= 1e9 else f"{parameters / 1e6:.3g} million"
