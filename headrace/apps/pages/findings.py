"""What the records of a run say: which lane limits it, who waits for whom, rates beside ceilings, SSD wear.

Invariant: a figure is derived from records of steps or from the simulation of the plan, and says which; what cannot be derived
is None. The first recorded step is left out if there are others, because kernels compile and caches fill in it.
"""

import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from headrace.apps.pages.run_files import RunFiles
from headrace.apps.pages.views import StepView, measured_view, planned_view
from headrace.plan.clock.endurance import Endurance, endurance
from headrace.plan.clock.simulate import union_seconds
from headrace.plan.forecast.forecast import Forecast, forecast
from headrace.plan.search.search import nominal_machine_of
from headrace.plan.value.plan import Plan
from headrace.report.metrics import Record, ssd_bytes, steady_ssd_bytes
from headrace.terms.errors import HeadraceError
from headrace.terms.lanes import Lane, Peer, lane_named, split_lane
from headrace.terms.machine.ceilings import Ceilings

_RECENT_STEPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneShare:
    """A lane over the recent steps: means per step. `share` is the share of the step for which it is busy."""

    lane: str
    busy_seconds: float
    idle_seconds: float
    bytes: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRate:
    """A rate in `unit` per second: while busy, over the whole step, and the machine profile's figure."""

    name: str
    unit: str
    busy: float
    mean: float
    ceiling: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """How long in a step a lane stood still until an operation of another lane ended."""

    lane: str
    verb: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Bytes written to the SSDs so far and in the whole run; `wear` if the drives are known."""

    so_far_bytes: int
    steps: int
    per_step_bytes: float
    forecast_bytes: float | None
    total_steps: int | None
    wear: Endurance | None


@dataclass(frozen=True, slots=True, kw_only=True)
class IoCpu:
    """CPU seconds of the I/O threads and of checksums, and the bytes that they moved: means over the recent steps."""

    step_seconds: float
    step_bytes: float

    @property
    def seconds_per_gigabyte(self) -> float:
        """CPU seconds for 10^9 bytes."""
        return self.step_seconds / self.step_bytes * 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """All that the page states. `step_seconds` is the median of recent steps. `planned` is the simulation of the plan; without
    measurements of the machine it uses usual figures, and `forecast` is None.

    `waits` has, for compute and for the busiest lane, what it waited for in the measured step.
    """

    step_seconds: float | None
    shares: tuple[LaneShare, ...]
    waits: Mapping[str, tuple[Wait, ...]]
    rates: tuple[MeasuredRate, ...]
    measured: StepView | None
    planned: StepView | None
    forecast: Forecast | None
    doubled: tuple[tuple[str, float], ...]
    written: Written | None
    io_cpu: IoCpu | None

    @property
    def busiest(self) -> LaneShare | None:
        """The lane that is busy for the largest share of the step."""
        return max(self.shares, key=lambda share: share.share, default=None)


def find(run: RunFiles) -> Findings:
    """Return the findings of a run. Cost: a few simulations of the plan, if plan and machine profile exist."""
    ahead = _forecast(run.plan, run.ceilings)
    shown = ahead if run.plan is None or run.ceilings is not None else _forecast(run.plan, nominal_machine_of(run.plan))
    lanes = _recent(run.lanes)
    measured = measured_view(run.recording) if run.recording is not None else None
    shares = _shares(lanes)
    busiest = max(shares, key=lambda share: share.share).lane if shares else (str(ahead.bottleneck) if ahead else None)
    waiting = dict.fromkeys(["compute", *([shares[0].lane] if shares else [])])
    seconds = [float(record["seconds"]) for record in (lanes or _recent(run.metrics))]
    return Findings(
        step_seconds=statistics.median(seconds) if seconds else None,
        shares=shares,
        waits={lane: waits(measured, lane) for lane in waiting} if measured is not None else {},
        rates=_rates(lanes, run, ahead),
        measured=measured,
        planned=planned_view(shown.timeline) if shown is not None else None,
        forecast=ahead,
        doubled=_doubled(run, busiest) if ahead is not None and busiest is not None else (),
        written=_written(run),
        io_cpu=_io_cpu(_recent(run.metrics)),
    )


def waits(view: StepView, lane: str) -> tuple[Wait, ...]:
    """Return what `lane` waited for in the step, longest waits first.

    A gap is charged to the operation of another lane that ended last before the gap did, because its end let the lane go on.
    What other ranks do comes by a lane of this one, so theirs are left out.
    """
    own = view.lane(lane)
    seen = (bar for bar in view.bars if bar.lane != lane and split_lane(bar.lane)[0] is not Peer.RANK)
    others = sorted(seen, key=lambda bar: bar.stop_seconds)
    totals: dict[tuple[str, str], float] = defaultdict(float)
    reached, index = 0.0, 0
    slack = 1e-4  # threads wake a little after the end of what they waited for
    last = None
    for bar in own:
        while index < len(others) and others[index].stop_seconds <= bar.start_seconds + slack / 100:
            last = others[index]
            index += 1
        if bar.start_seconds - reached > slack and last is not None and last.stop_seconds > reached:
            totals[last.lane, last.verb] += bar.start_seconds - reached
        reached = max(reached, bar.stop_seconds)
    found = [Wait(lane=other, verb=verb, seconds=seconds) for (other, verb), seconds in totals.items()]
    return tuple(sorted(found, key=lambda wait: -wait.seconds))


def together_share(view: StepView, lanes: Collection[str]) -> float:
    """Return the share of the step for which at least one of `lanes` is busy."""
    spans = [(bar.start_seconds, bar.stop_seconds) for bar in view.bars if bar.lane in lanes]
    return union_seconds(spans) / view.seconds if view.seconds > 0 else 0.0


def _recent(records: tuple[Record, ...]) -> tuple[Record, ...]:
    return records[1:][-_RECENT_STEPS:] if len(records) > 1 else records


def _shares(lanes: tuple[Record, ...]) -> tuple[LaneShare, ...]:
    names = [name for record in lanes for name in record["lanes"]]
    shares = []
    for name in dict.fromkeys(names):
        uses = [
            record["lanes"].get(name, {"busy_seconds": 0.0, "idle_seconds": record["seconds"], "bytes": 0}) for record in lanes
        ]
        busy, idle = (sum(use[which] for use in uses) / len(uses) for which in ("busy_seconds", "idle_seconds"))
        num_bytes = sum(use["bytes"] for use in uses) / len(uses)
        share = busy / (busy + idle) if busy + idle > 0 else 0.0
        shares.append(LaneShare(lane=name, busy_seconds=busy, idle_seconds=idle, bytes=num_bytes, share=share))
    return tuple(sorted(shares, key=lambda share: -share.share))


def _rates(lanes: tuple[Record, ...], run: RunFiles, ahead: Forecast | None) -> tuple[MeasuredRate, ...]:
    """Return the rates of links, of the update and of compute, as far as something was moved."""
    ceilings, plan = run.ceilings, run.plan
    limits: dict[str, float] = {}
    if ceilings is not None:
        limits = {lane: getattr(ceilings, lane.row.rate) for lane in Lane if lane.row.rate is not None}
    found = []
    for share in _shares(lanes):
        if share.bytes and share.busy_seconds > 0:
            step_seconds = share.busy_seconds + share.idle_seconds
            rate = MeasuredRate(
                name=share.lane,
                unit="B",
                busy=share.bytes / share.busy_seconds,
                mean=share.bytes / step_seconds,
                ceiling=limits.get(share.lane),
            )
            found.append(rate)
    compute = next((share for share in _shares(lanes) if share.lane == Lane.COMPUTE), None)
    if ahead is not None and plan is not None and ceilings is not None and compute is not None and compute.busy_seconds > 0:
        flops = ahead.flops_per_step
        limit = ceilings.matrix_flops_per_second(plan.compute_dtype)
        mean = flops / (compute.busy_seconds + compute.idle_seconds)
        found.append(MeasuredRate(name=Lane.COMPUTE, unit="FLOP", busy=flops / compute.busy_seconds, mean=mean, ceiling=limit))
    return tuple(found)


def _forecast(plan: Plan | None, ceilings: Ceilings | None) -> Forecast | None:
    if plan is None or ceilings is None:
        return None
    try:
        return forecast(plan, ceilings)
    except HeadraceError:
        return None  # the profile has no figure for this dtype, so the page says that the plan could not be simulated


def _doubled(run: RunFiles, lane: str) -> tuple[tuple[str, float], ...]:
    """Return the seconds of a step, in the plan's simulation, with twice of the part that limits it."""
    assert run.plan is not None
    assert run.ceilings is not None
    known = lane_named(lane)
    part = known.row.part if known else None
    ahead = _forecast(run.plan, run.ceilings.with_twice(part)) if part else None
    return ((part.twice, ahead.step_seconds),) if part and ahead else ()


def _io_cpu(records: tuple[Record, ...]) -> IoCpu | None:
    """Return the CPU cost of the traffic; None if it was not counted or nothing moved."""
    counted = [record for record in records if record.keys() >= {"io_cpu_seconds", "bytes_read", "bytes_written"}]
    moved = sum(ssd_bytes(record, name) for record in counted for name in ("bytes_read", "bytes_written"))
    if not moved:
        return None
    spent = sum(float(part.get("io_cpu_seconds", 0.0)) for record in counted for part in (record, record.get("flushed", {})))
    return IoCpu(step_seconds=spent / len(counted), step_bytes=moved / len(counted))


def _written(run: RunFiles) -> Written | None:
    if not run.metrics:
        return None
    sizes = [ssd_bytes(record, "bytes_written") for record in run.metrics]
    recent = _recent(run.metrics)
    per_step = steady_ssd_bytes(run.metrics[-_RECENT_STEPS - 1 :], "bytes_written") or 0.0
    total, done = run.total_steps, int(run.metrics[-1]["step"])
    steps = max(total or done, done)
    wear = None
    if run.ceilings is not None:
        step_seconds = statistics.median(float(record["seconds"]) for record in recent)
        whole = sum(sizes) + per_step * (steps - done)
        wear = endurance(run.ceilings.drives, whole / steps, num_steps=steps, step_seconds=step_seconds) if steps else None
    return Written(
        so_far_bytes=sum(sizes),
        steps=len(sizes),
        per_step_bytes=per_step,
        forecast_bytes=sum(sizes) + per_step * (total - done) if total is not None and total > done else None,
        total_steps=total,
        wear=wear,
    )
