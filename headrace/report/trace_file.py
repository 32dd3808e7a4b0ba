"""A timeline of the lanes in the Chrome trace format, which https://ui.perfetto.dev opens.

Lanes are threads, operations are complete events ("ph": "X"), times are microseconds on the events' own clock (viewers begin at
the earliest). A lane that does several things at once has several threads (`ssd-read`, `ssd-read 2`), because viewers drop or
cut slices that overlap on one thread. Invariants: no two slices of a thread overlap. The file is a valid trace at any moment,
even after a kill, because the format allows the closing bracket to be missing.
"""

import json
from pathlib import Path
from typing import Any, TextIO

from headrace.terms.events import Committed, Event, OpDone
from headrace.terms.lanes import Lane, lane_named

PROCESS_ID = 1
_MOST_THREADS_OF_A_LANE = 100  # only for the order of thread numbers


class TraceFile:
    """Writes the operations of the first `max_steps` steps that it sees; no viewer opens a trace of thousands of steps."""

    def __init__(self, path: Path, *, max_steps: int = 50) -> None:
        self._file: TextIO = path.open("w", encoding="utf-8")
        self._file.write("[\n")
        self._lanes: dict[str, int] = {}
        self._until_seconds: dict[str, list[float]] = {}
        self._steps: set[int] = set()
        self._max_steps = max_steps
        self._first = True
        self._put({"name": "process_name", "ph": "M", "pid": PROCESS_ID, "args": {"name": "headrace"}})

    def __call__(self, event: Event) -> None:
        """Take an operation that has ended, or a commit."""
        if isinstance(event, OpDone):
            self._operation(event)
        elif isinstance(event, Committed):
            self._file.flush()

    def close(self) -> None:
        """Close the list, so that strict JSON readers take the file too."""
        if not self._file.closed:
            with self._file:  # closed even if there is no space for the bracket
                self._file.write("\n]\n")

    def _operation(self, event: OpDone) -> None:
        if event.step not in self._steps:
            if len(self._steps) == self._max_steps:
                return
            self._steps.add(event.step)
        places = {"unit": event.unit, "micro": event.micro, "chunk": event.chunk}
        arguments: dict[str, Any] = {"step": event.step} | {name: value for name, value in places.items() if value >= 0}
        duration_seconds = event.stop_seconds - event.start_seconds
        if event.bytes:
            arguments["bytes"] = event.bytes
            if duration_seconds > 0:
                arguments["gigabytes_per_second"] = round(event.bytes / duration_seconds / 1e9, 3)
        self._put(
            {
                "name": event.label,
                "cat": event.verb,
                "ph": "X",
                "pid": PROCESS_ID,
                "tid": self._thread(event),
                "ts": round(event.start_seconds * 1e6, 3),
                "dur": round(duration_seconds * 1e6, 3),
                "args": arguments,
            }
        )

    def _thread(self, event: OpDone) -> int:
        """Return the first thread of the lane whose last slice had ended when this one began, or a new one."""
        until_seconds = self._until_seconds.setdefault(event.lane, [])
        rank = next((rank for rank, until in enumerate(until_seconds) if until <= event.start_seconds), len(until_seconds))
        thread = self._lane(event.lane) * _MOST_THREADS_OF_A_LANE + rank
        if rank == len(until_seconds):
            about = {"pid": PROCESS_ID, "tid": thread, "ph": "M"}
            name = event.lane if rank == 0 else f"{event.lane} {rank + 1}"
            self._put({"name": "thread_name", **about, "args": {"name": name}})
            self._put({"name": "thread_sort_index", **about, "args": {"sort_index": thread}})
        until_seconds[rank : rank + 1] = [event.stop_seconds]
        return thread

    def _lane(self, lane: str) -> int:
        # Known lanes keep the order of the table, whichever reports first.
        known, found = list(Lane), lane_named(lane)
        return self._lanes.setdefault(lane, known.index(found) if found else len(known) + len(self._lanes))

    def _put(self, entry: dict[str, Any]) -> None:
        self._file.write(("" if self._first else ",\n") + json.dumps(entry))
        self._first = False
