"""From the operations of a run to figures: what its SSD lanes attained, and what compute pays for what runs beside it.

Invariant: functions of what was recorded alone; spans are seconds of one monotonic clock. A figure that the run cannot give is
None, never a guess.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import prod
from statistics import median
from typing import Any

from headrace.plan.base import Plan
from headrace.report.lanes import union_seconds
from headrace.spec.events import OpDone
from headrace.spec.program import Lane, Verb

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


def interference(
    together: Sequence[OpDone],
    alone: Sequence[OpDone],
    plan: Plan,
    verb: Verb,
    fair: float,
    beside_drives: Mapping[str, float],
) -> dict[str, Any]:
    """Return what compute's operations of `verb` (forward or backward) cost with all lanes at work and with none beside them.

    `together` has the operations of overlapped steps, `alone` those of a step whose operations ran one after the other; each is
    compared with its own kind, block and micro-batch. Of the operations behind which an update ran for some time: `ratio` is
    their seconds over those of the same operations alone, `expected` the same if compute kept the share `fair` of its rate
    while an update ran, and lost nothing else. `expected_with_drives` is the same if it also lost what the profile says that it
    loses while the SSDs read and write (`beside_drives`: the share that it keeps, by lane): cores are not all that it shares.
    """
    updates = sorted((op.start_seconds, op.stop_seconds) for op in together if op.lane == Lane.UPDATE)
    others = [(fair, updates)]
    for lane in (Lane.SSD_READ, Lane.SSD_WRITE):
        spans = sorted((op.start_seconds, op.stop_seconds) for op in together if op.lane == lane)
        others.append((beside_drives.get(lane, 1.0), spans))
    reference: dict[tuple[int, int], list[float]] = defaultdict(list)
    for op in alone:
        if op.verb == verb:
            reference[op.unit, op.micro].append(op.stop_seconds - op.start_seconds)
    seconds = alone_seconds = beside_seconds = kept_seconds = flops = 0.0
    count = 0
    for op in together:
        if op.verb == verb and (known := reference.get((op.unit, op.micro))):
            beside = union_seconds(clipped(updates, op.start_seconds, op.stop_seconds))
            if beside > 0:
                count += 1
                seconds += op.stop_seconds - op.start_seconds
                alone_seconds += median(known)
                beside_seconds += beside
                kept_seconds += seconds_kept(op.start_seconds, op.stop_seconds, others)
                flops += flops_of(plan, verb, op.unit)
    if not count or not flops:
        return {"verb": verb, "operations": 0, "ratio": None, "expected": None, "expected_with_drives": None}
    return {
        "verb": verb,
        "operations": count,
        "seconds_per_tflop_together": seconds / flops * 1e12,
        "seconds_per_tflop_alone": alone_seconds / flops * 1e12,
        "update_beside_share": beside_seconds / seconds,
        "ratio": seconds / alone_seconds,
        # While the update ran, compute did `fair` of a second's work in a second.
        "expected": seconds / (seconds - (1 - fair) * beside_seconds),
        "expected_with_drives": seconds / kept_seconds,
    }


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
    forward = plan.forward_flops[unit]
    return forward if verb == Verb.FORWARD else 3 * forward - plan.spared_flops[unit - 1]


def fair_share(cores: int, compute_threads: int, update_threads: int) -> float:
    """Return what compute keeps where all threads get equal shares of the cores: its slowest thread decides."""
    return min(1.0, cores / (compute_threads + update_threads))


def median_rate(ops: Sequence[OpDone], verb: Verb) -> float | None:
    """Return the median bytes per second of the operations of a verb."""
    rates = [
        op.bytes / (op.stop_seconds - op.start_seconds) for op in ops if op.verb == verb and op.stop_seconds > op.start_seconds
    ]
    return median(rates) if rates else None
