"""What `headrace plan --stages` answers, as a value and as text.

Invariant: the report says that it fits only if each stage has a plan. Every printed number is one of the report's.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from headrace.ask.plan_report import PlanReport
from headrace.peers.stages.pipeline import StepOfStages, most_busy_share
from headrace.plan.value.plan import Plan
from headrace.plan.value.stage_place import StageChoices, StagePlace
from headrace.terms.plain_figures import plain_figure
from headrace.terms.sizes import format_bytes, format_seconds
from headrace.terms.tables import figures, line, row

# AxoNN keeps 4 bytes a parameter on the device, of 20 with master, moments and gradients in float32: so about a quarter.
_AXONN = "AxoNN (Singh and Bhatele 2022) keeps a quarter there"
_COLUMN = 14


@dataclass(frozen=True, kw_only=True)
class StageFigures:
    """A stage at its `place`, and the `report` of its blocks."""

    place: StagePlace
    report: PlanReport

    @property
    def found(self) -> Plan:
        """Its plan, which it has."""
        assert self.report.plan is not None, "asked for only where all fit"
        return self.report.plan

    @property
    def choices(self) -> StageChoices:
        """How a step goes through it."""
        assert self.found.stage is not None, "the plan of a stage"
        return self.found.stage

    @cached_property
    def group_seconds(self) -> float:
        """Seconds in which it has a group forward and backward, if it never waits for others."""
        assert self.report.forecast is not None, "a plan has times"
        return self.report.forecast.step_seconds / self.choices.filling / self.choices.groups

    @property
    def onward_seconds(self) -> float:
        """Those of a group's forward: its share of the operations."""
        plan = self.found
        forward = sum(plan.results.forward_flops)
        backward = sum(
            (2 if unit.is_beside else 3) * flops for unit, flops in zip(plan.units, plan.results.forward_flops, strict=True)
        )
        backward -= sum(plan.results.spared_flops)
        return self.group_seconds * forward / (forward + backward)

    @property
    def back_seconds(self) -> float:
        """Those of its backward."""
        return self.group_seconds - self.onward_seconds

    @property
    def parameters(self) -> int:
        """Parameters of the stage."""
        return sum(unit.num_parameters for unit in self.found.units if unit.num_elements and not unit.is_far)

    @property
    def device_share(self) -> float:
        """The part of the stage's state that lies where compute reads it: weights, states and gradients in float32."""
        plan = self.found
        peaks = plan.results.peak_bytes["device" if plan.separate_device else "host"]
        there = sum(peaks.get(purpose, 0) for purpose in ("weights", "gradients", "states"))
        whole = sum(
            plan.slot_bytes(unit) + plan.state_bytes(unit) + 4 * figures.gradient_elements
            for unit, figures in enumerate(plan.units)
        )
        return there / max(1, whole)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        place, plan = self.place, self.report
        values = {"blocks": [place.blocks.start - 1, place.blocks.stop - 1], **plan.to_json()}
        if plan.plan is None:
            return values
        return values | figures(self, "group_seconds", "parameters", "device_share") | {"in_flight": self.choices.in_flight}


@dataclass(frozen=True, kw_only=True)
class StagesReport:
    """Whether stages can train a model, how fast, and what crosses their cuts.

    `stages` are `count` of them, or fewer where the last of these does not fit. Each way `token_bytes` cross a cut for a token.
    """

    stages: tuple[StageFigures, ...]
    cuts: tuple[int, ...]
    count: int
    link_bytes_per_second: float
    token_bytes: int
    step: StepOfStages | None = None

    @property
    def fits(self) -> bool:
        """Whether each stage has a plan within its budgets."""
        return len(self.stages) == self.count and all(each.report.fits for each in self.stages)

    @property
    def reason(self) -> str:
        """Why it does not fit."""
        return "" if self.fits else f"stage {len(self.stages) - 1}: {self.stages[-1].report.reason}"

    @property
    def step_seconds(self) -> float:
        """Seconds of a step; 0 where it does not fit."""
        return self.step.step_seconds if self.step else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens of a step in a second; 0 where it does not fit."""
        return self.tokens_per_step / self.step_seconds if self.step else 0.0

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step."""
        return self.stages[0].report.tokens_per_step

    @property
    def groups(self) -> int:
        """Groups of micro-batches in which a step goes through the stages."""
        return self.stages[0].choices.groups

    @property
    def transfer_seconds(self) -> float:
        """Seconds in which a group crosses a cut, one way."""
        return self.tokens_per_step * self.token_bytes / self.groups / self.link_bytes_per_second

    @property
    def cut_bytes(self) -> int:
        """Bytes that cross a cut in a step, both ways together."""
        return 2 * self.tokens_per_step * self.token_bytes

    @property
    def utilisation(self) -> float:
        """Share of a step for which the slowest stage is busy."""
        return max(self.step.busy_shares) if self.step else 0.0

    @property
    def bound(self) -> float:
        """The most that this can be (`pipeline.bound`)."""
        return most_busy_share([each.group_seconds for each in self.stages], self.transfer_seconds, self.groups)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; unknown figures are null."""
        first, found = self.stages[0].report, self if self.fits else None
        return {
            **figures(first, "model", "parameters", "compute_dtype", "rule", "tokens_per_step", "sequence_length"),
            **figures(self, "fits", "reason", "cuts", "link_bytes_per_second"),
            **figures(found, "step_seconds", "tokens_per_second", "groups", "transfer_seconds", "cut_bytes"),
            **figures(found, "utilisation", "bound"),
            "busy_shares": list(self.step.busy_shares) if self.step else None,
            "stages": [each.to_json() for each in self.stages],
        }

    def explain(self) -> str:
        """Return the report as lines for people."""
        return "\n".join(_lines(self))


def _lines(report: StagesReport) -> Iterator[str]:
    first, rate = report.stages[0].report, f"{plain_figure(report.link_bytes_per_second * 8 / 1e6)} Mbit/s each way"
    size = f"{plain_figure(first.parameters / 1e9)} billion parameters"
    yield line("model", f"{first.model}, {size}, {first.compute_dtype} compute, {first.rule}")
    names = dict.fromkeys(each.report.machine for each in report.stages)
    yield line("stages", f"{report.count} x {', '.join(names)}, links of {rate}")
    yield line("step", f"{report.tokens_per_step} tokens, sequences of {first.sequence_length}")
    if not report.fits:
        yield line("fits", f"no: {report.reason}")
        return
    yield line("fits", f"yes: {report.groups} groups of micro-batches")
    yield ""
    yield from _table(report)
    yield ""
    yield line(
        "time", f"{format_seconds(report.step_seconds)} per step, {plain_figure(report.tokens_per_second, 4)} tokens/s together"
    )
    yield line(
        "busy",
        f"the slowest stage {report.utilisation:.0%} of the time, where {report.bound:.0%} is the most: G t / (G t + "
        f"(S-1)(t + 2c)) with G = {report.groups}, t = {format_seconds(max(each.group_seconds for each in report.stages))}, "
        f"c = {format_seconds(report.transfer_seconds)}",
    )
    yield line("link", f"a cut carries {format_bytes(report.cut_bytes)} a step, half of it each way")
    yield line("device", f"of a stage's weights, states and gradients the part above lies on its device; {_AXONN}")


def _table(report: StagesReport) -> Iterator[str]:
    """Yield a column for each stage."""
    stages = report.stages
    yield row("", (f"stage {number}" for number in range(len(stages))), _COLUMN)
    if len({each.report.machine for each in stages}) > 1:
        yield row("machine", (each.report.machine for each in stages), _COLUMN)
    yield row("blocks", (f"{each.place.blocks.start - 1}-{each.place.blocks.stop - 2}" for each in stages), _COLUMN)
    yield row("parameters", (f"{plain_figure(each.parameters / 1e9)} G" for each in stages), _COLUMN)
    for tier in stages[0].found.results.peak_bytes:
        yield row(f"{tier} peak", (format_bytes(each.found.peak(tier)) for each in stages), _COLUMN)
        allowed = [each.report.allowed_bytes.get(tier) for each in stages]
        if any(allowed):
            yield row("  allowed", (format_bytes(size) if size else "unknown" for size in allowed), _COLUMN)
    yield row("on the device", (f"{each.device_share:.0%}" for each in stages), _COLUMN)
    waiting = [4 * sum(each.found.units[unit].gradient_elements for unit in each.found.parked_units) for each in stages]
    places = (" on SSD" if each.choices.sums == "ssd" else "" for each in stages)
    yield row("waiting sums", (format_bytes(size) + place for size, place in zip(waiting, places, strict=True)), _COLUMN)
    yield row("groups in flight", (str(each.choices.in_flight) for each in stages), _COLUMN)
    yield row("a group", (format_seconds(each.group_seconds) for each in stages), _COLUMN)
    assert report.step is not None, "all fit"
    yield row("busy", (f"{share:.0%}" for share in report.step.busy_shares), _COLUMN)
    for words, way in (("read a step", "ssd_bytes_read_per_step"), ("written a step", "ssd_bytes_written_per_step")):
        yield row(words, (format_bytes(getattr(each.report.forecast, way)) for each in stages), _COLUMN)
