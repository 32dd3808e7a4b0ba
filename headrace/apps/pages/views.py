"""One step as bars on lanes, in the same form for measured and planned steps.

Invariant: all times are seconds from the beginning of the step, which is where compute's first operation begins. Operations of
the step before that continue in this one are part of the view. Their parts outside the window are cut off.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from headrace.plan.clock.simulate import Timeline
from headrace.report.lanes import Recording
from headrace.terms.lanes import Lane, Peer, lane_named, split_lane


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """An operation, or `count` short ones drawn as one. Operations that run at once on one lane have different `row`s."""

    lane: str
    verb: str
    label: str
    start_seconds: float
    stop_seconds: float
    bytes: int
    row: int = 0
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """The bars of one step of `seconds`; `step` is its number, None for a plan."""

    seconds: float
    bars: tuple[Bar, ...]
    step: int | None = None
    memory: tuple[tuple[float, dict[str, int]], ...] = ()

    def lane(self, lane: str) -> tuple[Bar, ...]:
        """Return the bars of one lane by start."""
        return tuple(sorted((bar for bar in self.bars if bar.lane == lane), key=lambda bar: bar.start_seconds))


def measured_view(recording: Recording) -> StepView | None:
    """Return the newest recorded step, None if there is none."""
    if not recording.steps:
        return None
    step = recording.steps[-1]
    bars = [
        Bar(
            lane=op.lane,
            verb=op.verb,
            label=op.label if op.step == step.step else f"{op.label} (of step {op.step})",
            start_seconds=op.start_seconds - step.begin_seconds,
            stop_seconds=op.stop_seconds - step.begin_seconds,
            bytes=op.bytes,
        )
        for each in recording.steps
        for op in each.ops
    ]
    memory = [(seconds - step.begin_seconds, tiers) for seconds, tiers in recording.memory]
    inside = tuple(sample for sample in memory if 0 <= sample[0] <= step.seconds)
    return StepView(seconds=step.seconds, bars=_window(bars, step.seconds), step=step.step, memory=inside)


def planned_view(timeline: Timeline) -> StepView:
    """Return the simulated step in the steady state."""
    computing = [timed.start_seconds for timed in timeline.step_ops() if timed.op.lane is Lane.COMPUTE]
    begin = min(computing, default=0.0)
    bars = [
        Bar(
            lane=timed.op.lane,
            verb=timed.op.act,
            label=timed.op.label if timed.program == timeline.measured else f"{timed.op.label} (of the step beside)",
            start_seconds=timed.start_seconds - begin,
            stop_seconds=timed.stop_seconds - begin,
            bytes=timed.op.bytes,
        )
        for timed in timeline.ops
        if abs(timed.program - timeline.measured) <= 1
    ]
    return StepView(seconds=timeline.step_seconds, bars=_window(bars, timeline.step_seconds))


def lane_heading(lane: str, beside: Collection[str] = ()) -> str:
    """Return what a lane is called above its row. Beside lanes of ranks or stages, those of this process are number 0's."""
    peer, number, name = split_lane(lane)
    known = lane_named(name)
    heading = known.row.heading if known else name
    alike = {split_lane(each)[0] for each in beside} & {Peer.RANK, Peer.STAGE}
    who = peer or next(iter(alike), None)
    return f"{who.capitalize()} {number}: {heading}" if who else heading


def lane_place(lane: str) -> tuple[int, int, str]:
    """Return what lanes are sorted by: this process's come before those of others, which come by rank; each in the order of
    the table.
    """
    _, number, name = split_lane(lane)
    known = list(Lane)
    return number, next((place for place, each in enumerate(known) if each == name), len(known)), name


def in_rows(bars: Iterable[Bar]) -> tuple[Bar, ...]:
    """Return the bars of one lane; each gets the first row that is free, so that simultaneous bars have rows of their own."""
    free: list[float] = []
    placed = []
    for bar in sorted(bars, key=lambda bar: (bar.start_seconds, bar.stop_seconds)):
        # Clocks are read to the microsecond, so the next operation may seem to begin within the last one.
        row = next((row for row, until in enumerate(free) if until <= bar.start_seconds + 2e-6), len(free))
        free[row : row + 1] = [bar.stop_seconds]
        placed.append(replace(bar, row=row))
    return tuple(placed)


def joined_bars(bars: Iterable[Bar], resolution_seconds: float) -> tuple[Bar, ...]:
    """Return the bars after joining neighbours of one verb and row, if each bar and gap is below the resolution."""
    rows: dict[int, list[Bar]] = {}
    for bar in bars:
        row = rows.setdefault(bar.row, [])
        last = row[-1] if row else None
        if (
            last is not None
            and last.verb == bar.verb
            and bar.start_seconds - last.stop_seconds < resolution_seconds
            and bar.stop_seconds - bar.start_seconds < resolution_seconds
        ):
            count = last.count + 1
            label = f"{count} × {bar.verb}"
            row[-1] = replace(last, stop_seconds=bar.stop_seconds, bytes=last.bytes + bar.bytes, count=count, label=label)
        else:
            row.append(bar)
    return tuple(bar for row in sorted(rows) for bar in rows[row])


def _window(bars: Iterable[Bar], seconds: float) -> tuple[Bar, ...]:
    return tuple(
        replace(bar, start_seconds=max(0.0, bar.start_seconds), stop_seconds=min(seconds, bar.stop_seconds))
        for bar in bars
        if bar.stop_seconds > 0 and bar.start_seconds < seconds
    )
