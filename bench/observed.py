"""From the operations of a run to figures: what its SSD lanes attained, and what compute pays for what runs beside it.

Invariant: functions of what was recorded alone; spans are seconds of one monotonic clock. A figure that the run cannot give is
None, never a guess.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from statistics import median
from typing import Any

from headrace.plan.value.plan import Plan
from headrace.report.lanes import union_seconds
from headrace.terms.events import OpDone
from headrace.terms.lanes import Lane
from headrace.terms.program import Verb

Span = tuple[float, float]
_SSD = (Lane.SSD_READ, Lane.SSD_WRITE, Lane.COMMIT)  # a commit writes the states that live in memory


def clipped(spans: Iterable[Span], begin: float, end: float) -> list[Span]:
    """Return what of the spans lies inside the window."""
    return [(max(start, begin), min(stop, end)) for start, stop in spans if stop > begin and start < end]


def bytes_inside(spans: Iterable[tuple[float, float, int]], begin: float, end: float) -> float:
    """Return the bytes of `(start, stop, bytes)` inside the window, of those across its edge in proportion."""
    total = 0.0
    for start, stop, size in spans:
        inside = min(stop, end) - max(start, begin)
        if inside > 0:
            total += size * min(1.0, inside / max(stop - start, 1e-12))
    return total


def ssd_rates(
    ops: Sequence[OpDone], requests: Sequence[tuple[float, float, int]], begin: float, end: float
) -> dict[str, float | None]:
    """Return bytes per second while a lane of the SSD is busy, and while a request (start, stop, bytes) is under way."""
    moved = bytes_inside(requests, begin, end)
    lanes = union_seconds(clipped(((op.start_seconds, op.stop_seconds) for op in ops if op.lane in _SSD), begin, end))
    drive = union_seconds(clipped(((start, stop) for start, stop, _ in requests), begin, end))
    return {
        "bytes": moved,
        "lanes_busy_seconds": lanes,
        "bytes_per_second": moved / lanes if lanes else None,
        "drive_busy_seconds": drive,
        "drive_bytes_per_second": moved / drive if drive else None,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Cores:
    """What works on the cores: threads of lanes that compute or copy, and what moving a byte of the SSDs takes of a core."""

    count: int
    threads: Mapping[str, int]
    seconds_per_ssd_byte: float = 0.0


def interference(
    together: Sequence[OpDone],
    alone: Sequence[OpDone],
    plan: Plan,
    verb: Verb,
    cores: Cores,
    beside_drives: Mapping[str, float],
) -> dict[str, Any]:
    """Return what compute's operations of `verb` (forward or backward) cost with all lanes at work and with none beside them.

    `together` has the operations of overlapped steps, `alone` those of a step whose operations ran one after the other; each is
    compared with its own kind, block and micro-batch. Of the operations behind which an update ran for some time: `ratio` is
    their seconds over those of the same operations alone, `expected` the same if all they lost were the core seconds that the
    other lanes' work took meanwhile, shared by all cores. `expected_with_drives` is the same if compute also lost what the
    profile says that it loses while the SSDs read and write (`beside_drives`: the share that it keeps, by lane) instead of
    their core seconds: cores are not all that it shares.
    """
    known = _medians(alone)
    updates = sorted((op.start_seconds, op.stop_seconds) for op in together if op.lane == Lane.UPDATE)
    seconds = alone_seconds = beside_seconds = kept_seconds = flops = 0.0
    windows: list[Span] = []
    drives = [
        (beside_drives.get(lane, 1.0), sorted((op.start_seconds, op.stop_seconds) for op in together if op.lane == lane))
        for lane in (Lane.SSD_READ, Lane.SSD_WRITE)
    ]
    for op in together:
        if op.verb == verb and _kind(op) in known:
            beside = union_seconds(clipped(updates, op.start_seconds, op.stop_seconds))
            if beside > 0:
                windows.append((op.start_seconds, op.stop_seconds))
                seconds += op.stop_seconds - op.start_seconds
                alone_seconds += known[_kind(op)]
                beside_seconds += beside
                kept_seconds += seconds_kept(op.start_seconds, op.stop_seconds, drives)
                flops += flops_of(plan, verb, op.unit)
    if not windows or not flops:
        return {"verb": verb, "operations": 0, "ratio": None, "expected": None, "expected_with_drives": None}
    others = [op for op in together if op.lane != Lane.COMPUTE and op.lane in cores.threads]
    copied = core_seconds_inside(others, known, cores, windows)
    moved = core_seconds_inside([op for op in together if op.lane in _SSD], known, cores, windows)
    compute = cores.threads.get(Lane.COMPUTE, 0) * alone_seconds
    expected, without_drives = (
        max(1.0, (compute + other) / (cores.count * alone_seconds)) for other in (copied + moved, copied)
    )
    return {
        "verb": verb,
        "operations": len(windows),
        "seconds_per_tflop_together": seconds / flops * 1e12,
        "seconds_per_tflop_alone": alone_seconds / flops * 1e12,
        "update_beside_share": beside_seconds / seconds,
        "ratio": seconds / alone_seconds,
        "others_core_seconds": copied + moved,
        "expected": expected,
        "expected_with_drives": without_drives * seconds / kept_seconds,
    }


def core_seconds_inside(
    ops: Iterable[OpDone], known: Mapping[tuple[str, int, int, int], float], cores: Cores, windows: Sequence[Span]
) -> float:
    """Return the core seconds that `ops` take inside `windows`: of SSD lanes by their bytes, of others as long as alone.

    What an operation takes is spread evenly over the time in which it is under way. One that never ran alone counts as it ran.
    """
    total = 0.0
    for op in ops:
        duration = max(op.stop_seconds - op.start_seconds, 1e-12)
        inside = sum(stop - start for start, stop in clipped(windows, op.start_seconds, op.stop_seconds)) / duration
        if op.lane in _SSD:
            total += inside * op.bytes * cores.seconds_per_ssd_byte
        else:
            total += inside * known.get(_kind(op), duration) * cores.threads[op.lane]
    return total


def _kind(op: OpDone) -> tuple[str, int, int, int]:
    return op.verb, op.unit, op.micro, op.chunk


def _medians(ops: Iterable[OpDone]) -> dict[tuple[str, int, int, int], float]:
    """Return the median seconds of the operations of each kind."""
    taken: dict[tuple[str, int, int, int], list[float]] = defaultdict(list)
    for op in ops:
        taken[_kind(op)].append(op.stop_seconds - op.start_seconds)
    return {kind: median(seconds) for kind, seconds in taken.items()}


def seconds_kept(start: float, stop: float, others: Sequence[tuple[float, Sequence[Span]]]) -> float:
    """Return the seconds of work done between `start` and `stop` beside `others`: shares that are kept during some spans."""
    inside = [(share, clipped(spans, start, stop)) for share, spans in others]
    edges = sorted({start, stop, *(edge for _, spans in inside for span in spans for edge in span)})
    return sum(
        (after - before) * prod(share for share, spans in inside if any(low <= before < high for low, high in spans))
        for before, after in pairwise(edges)
    )


def flops_of(plan: Plan, verb: Verb, unit: int) -> float:
    """Return the floating-point operations that the planner counts for one micro-batch of a block."""
    forward = plan.results.forward_flops[unit]
    return forward if verb == Verb.FORWARD else 3 * forward - plan.results.spared_flops[unit - 1]


def median_rate(ops: Sequence[OpDone], verb: Verb) -> float | None:
    """Return the median bytes per second of the operations of a verb."""
    rates = [
        op.bytes / (op.stop_seconds - op.start_seconds) for op in ops if op.verb == verb and op.stop_seconds > op.start_seconds
    ]
    return median(rates) if rates else None
