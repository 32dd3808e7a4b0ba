"""What a reporter is, and how several of them share one stream of events.

Lanes report from their own threads, so there are three invariants. Two threads never enter a reporter at once. All reporters
see events in the order in which they came. A lane that reports an operation does not wait while a reporter handles another
lane. A full disk breaks no step: a reporter that cannot write is dropped, `Reporters.failure` says why, and the loop ends the
run in order.
"""

import contextlib
import threading
from collections import deque
from typing import Protocol, TypeVar

from headrace.terms.events import Event, OpDone


class Reporter(Protocol):
    """A sink that holds something open: a file, a live line of a terminal."""

    def __call__(self, event: Event) -> None:
        """Take one event. Called by one thread at a time."""

    def close(self) -> None:
        """Finish and release what is held. A second call does nothing."""


_AnyReporter = TypeVar("_AnyReporter", bound=Reporter)


class Reporters:
    """A sink that passes each event to all reporters added so far, one event after the other, whatever thread it comes from.

    If the reporters are busy with an event, a lane leaves its operation to the thread at work. With any other event the caller
    waits: when a step's result returns, its line is written.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: deque[Event] = deque()
        self._reporters: list[Reporter] = []
        self.failure: OSError | None = None

    def add(self, reporter: _AnyReporter) -> _AnyReporter:
        """Add `reporter` and return it. It sees the events from now on."""
        with self._lock:
            self._reporters.append(reporter)
        return reporter

    def __call__(self, event: Event) -> None:
        """Pass `event` on, and what other threads have left meanwhile."""
        self._events.append(event)
        mine = self._lock.acquire(blocking=not isinstance(event, OpDone))
        while mine:
            try:
                self._pass_on()
            finally:
                self._lock.release()
            # An event that came after the last look was left to this thread, so it looks again.
            mine = bool(self._events) and self._lock.acquire(blocking=False)

    def close(self) -> None:
        """Close all reporters, the last added first; if one of them can no longer write, `failure` says so."""
        with self._lock:
            self._pass_on()
            for reporter in reversed(self._reporters):
                try:
                    reporter.close()
                except OSError as error:
                    self.failure = self.failure or error
            self._reporters.clear()

    def _pass_on(self) -> None:
        while self._events:
            event = self._events.popleft()
            for reporter in tuple(self._reporters):
                try:
                    reporter(event)
                except OSError as error:
                    self.failure = self.failure or error
                    self._reporters.remove(reporter)
                    with contextlib.suppress(OSError):
                        reporter.close()
