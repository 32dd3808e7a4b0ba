"""What a reporter is, and how several of them share one stream of events.

Lanes report from their own threads, so the invariants are: no reporter is ever entered by two threads at once, and a full disk
breaks no step. A reporter that cannot write is dropped, `Reporters.failure` says why, and the loop ends the run in order.
"""

import contextlib
import threading
from typing import Protocol, TypeVar

from headrace.spec.events import Event


class Reporter(Protocol):
    """A sink that holds something open: a file, a live line of a terminal."""

    def __call__(self, event: Event) -> None:
        """Take one event. Called by one thread at a time."""

    def close(self) -> None:
        """Finish and give back what is held. A second call does nothing."""


_AnyReporter = TypeVar("_AnyReporter", bound=Reporter)


class Reporters:
    """A sink that passes each event to all reporters added so far, one event after the other whatever thread it comes from."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reporters: list[Reporter] = []
        self.failure: OSError | None = None

    def add(self, reporter: _AnyReporter) -> _AnyReporter:
        """Add `reporter` and return it. It sees the events from now on."""
        with self._lock:
            self._reporters.append(reporter)
        return reporter

    def __call__(self, event: Event) -> None:
        """Pass `event` on."""
        with self._lock:
            for reporter in tuple(self._reporters):
                try:
                    reporter(event)
                except OSError as error:
                    self.failure = self.failure or error
                    self._reporters.remove(reporter)
                    with contextlib.suppress(OSError):
                        reporter.close()

    def close(self) -> None:
        """Close all reporters, the last added first; what one of them could not write any more is in `failure`."""
        with self._lock:
            for reporter in reversed(self._reporters):
                try:
                    reporter.close()
                except OSError as error:
                    self.failure = self.failure or error
            self._reporters.clear()
