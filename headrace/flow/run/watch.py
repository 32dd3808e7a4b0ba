"""Names what stands still: the lane and its operation, once nothing has ended in any lane for most of a minute.

A drive that does not answer is named earlier, with file and offset (`files/threads.py`). This also sees what has no file:
compute, a device, a link. Invariant: an operation is named once, and only if it takes far longer than any before it.
"""

import threading
import time
from collections.abc import Callable

from headrace.terms.closing import Closing
from headrace.terms.events import Notice, Sink
from headrace.terms.program import Op
from headrace.terms.sizes import format_seconds

# With the time between two looks it is less than a minute.
LIMIT_SECONDS = 45.0
_EVERY_SECONDS = 5.0
_TIMES_THE_LONGEST = 3


class Watch(Closing):
    """Knows which operations are under way. Each is begun and ended by its own thread; one thread more looks at them."""

    def __init__(self, sink: Sink, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._sink, self._clock = sink, clock
        self._under_way: dict[int, tuple[Op, float]] = {}
        self._ended_seconds = self._longest_seconds = 0.0
        self._told: Op | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="headrace watch", daemon=True)
        self._thread.start()

    def begin(self, op: Op) -> None:
        """Take note that this thread begins an operation."""
        self._under_way[threading.get_ident()] = op, self._clock()

    def end(self) -> None:
        """Take note that it has ended."""
        _, begun = self._under_way.pop(threading.get_ident())
        self._ended_seconds = self._clock()
        self._longest_seconds = max(self._longest_seconds, self._ended_seconds - begun)

    def look(self) -> None:
        """Tell of the operation that has been under way for longest, if it is time to."""
        found = min(self._under_way.copy().values(), key=lambda each: each[1], default=None)
        if found is None:
            return
        op, begun = found
        still_seconds = self._clock() - max(begun, self._ended_seconds)
        if op is self._told or still_seconds < max(LIMIT_SECONDS, _TIMES_THE_LONGEST * self._longest_seconds):
            return
        self._told = op
        words = f"{op.lane}: {op.label} has been under way for {format_seconds(self._clock() - begun)}"
        self._sink(Notice(text=f"{words}, and no other operation has ended for {format_seconds(still_seconds)}"))

    def close(self) -> None:
        """End the thread that looks."""
        self._closed.set()
        self._thread.join()

    def _serve(self) -> None:
        while not self._closed.wait(_EVERY_SECONDS):
            self.look()
