"""What the lanes of a worker, a rank or a stage did in a step, told in few bytes to the process that has the run.

They are for the report page, and to know how fast each is. Times travel as microseconds since a process heard of the step. Who
told it counts them from then: both clocks differ by what that message took on its way.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from headrace.terms.events import NO_STEP, Event, OpDone, Sink
from headrace.terms.lanes import Lane, Peer, lane_of_peer
from headrace.terms.program import Verb, label_of

MAX_LANE_ROWS_PER_STEP = 400  # about 20 KB; neighbours are merged beyond that


class LaneDiary:
    """A sink that keeps the operations of a step, and passes all events on to `sink`. Lanes may call it at once."""

    def __init__(self, sink: Sink) -> None:
        self._sink, self._lock, self._begin = sink, threading.Lock(), 0.0
        self._ops: list[OpDone] = []

    def __call__(self, event: Event) -> None:
        """Keep an operation."""
        if isinstance(event, OpDone):
            with self._lock:
                self._ops.append(event)
        self._sink(event)

    def begin(self) -> None:
        """A step begins."""
        self._begin = time.perf_counter()

    def told(self) -> dict[str, Any]:
        """Return a JSON value with what has ended since this was asked last."""
        with self._lock:
            ops, self._ops = self._ops, []
        return {
            "ops": [self._row(each) for each in _joined(ops)],
            # Without what waits for other processes.
            "compute_seconds": sum(
                op.stop_seconds - op.start_seconds for op in ops if op.lane == Lane.COMPUTE and op.verb != Verb.DECIDE
            ),
        }

    def _row(self, op: OpDone) -> list[Any]:
        start, stop = (round((each - self._begin) * 1e6) for each in (op.start_seconds, op.stop_seconds))
        return [op.step, op.lane, op.verb, op.unit, op.micro, op.chunk, start, stop - start, op.bytes]


def ops_of(rows: Sequence[Sequence[Any]], *, step: int, peer: Peer, number: int, begin_seconds: float) -> Iterator[OpDone]:
    """Yield the operations that a process told of at the end of `step`, on lanes that have its name.

    What ended very late counts as the step's before: nobody here waits for what belongs to an older one.
    """
    for own_step, lane, verb, unit, micro, chunk, start, microseconds, num_bytes in rows:
        yield OpDone(
            step=NO_STEP if own_step == NO_STEP else max(int(own_step), step - 1),
            label=label_of(str(verb), unit=int(unit), micro=int(micro), chunk=int(chunk)),
            verb=str(verb),
            lane=lane_of_peer(peer, number, str(lane)),
            unit=int(unit),
            micro=int(micro),
            chunk=int(chunk),
            start_seconds=begin_seconds + start / 1e6,
            stop_seconds=begin_seconds + (start + microseconds) / 1e6,
            bytes=int(num_bytes),
        )


def _joined(ops: Sequence[OpDone]) -> list[OpDone]:
    """Return at most `MAX_LANE_ROWS_PER_STEP` operations: beyond that, neighbours of a lane, verb and step are merged."""
    kinds: dict[tuple[int, str, str], list[OpDone]] = {}
    for op in sorted(ops, key=lambda op: op.start_seconds):
        kinds.setdefault((op.step, op.lane, op.verb), []).append(op)
    found = []
    together = -(-len(ops) // max(1, MAX_LANE_ROWS_PER_STEP - len(kinds)))
    for each in kinds.values():
        for start in range(0, len(each), max(1, together)):
            some = each[start : start + together]
            stop, moved = max(op.stop_seconds for op in some), sum(op.bytes for op in some)
            found.append(replace(some[0], stop_seconds=stop, bytes=moved))
    return found
