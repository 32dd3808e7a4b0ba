"""What a write does that finds no space: it says so once, waits, and is tried again until there is some.

Invariant: nothing is lost by waiting, because a write that found no space is done again as a whole. A wait ends when there is
space, when `heed` raises, or with the store.
"""

import threading
from collections.abc import Callable
from typing import Self

from headrace.terms.closing import Closing
from headrace.terms.errors import DiskFull
from headrace.terms.events import Notice, Sink

EVERY_SECONDS = 2.0


class Patience(Closing):
    """Waits for space, for all writes of a store; several threads may wait at once. Pauses are told to `sink`.

    `heed` is called while a write waits; what it raises ends the wait with the error that began it.
    """

    @classmethod
    def none(cls) -> Self:
        """Return one that never waits."""
        patience = cls(lambda event: None)
        patience.close()
        return patience

    def __init__(self, sink: Sink) -> None:
        self.heed: Callable[[], None] = lambda: None
        self._sink = sink
        self._lock = threading.Lock()
        self._num_waiting = 0
        self._ended = threading.Event()

    def __call__(self, write: Callable[[], None]) -> None:
        """Call `write` until there is space for what it writes.

        Raises:
            DiskFull: there is none, and the wait was ended.
        """
        try:
            write()
        except DiskFull as error:
            if self._ended.is_set():
                raise
            self._wait(write, error)

    def _wait(self, write: Callable[[], None], error: DiskFull) -> None:
        self._count(1, f"{error}: the run waits until then, and goes on by itself")
        try:
            while True:
                try:
                    self.heed()
                except BaseException as reason:
                    raise error from reason
                if self._ended.wait(EVERY_SECONDS):
                    raise error
                try:
                    write()
                    break
                except DiskFull as still:
                    error = still
        except BaseException:
            self._count(-1, "")
            raise
        self._count(-1, "there is space again, and the run goes on")

    def _count(self, change: int, words: str) -> None:
        """Take note that one more waits, or one less; the first says so, and the last."""
        with self._lock:
            before, self._num_waiting = self._num_waiting, self._num_waiting + change
            told = 0 in (before, self._num_waiting) and words
        if told:
            self._sink(Notice(text=words))

    def close(self) -> None:
        """End all waits, now and later."""
        self._ended.set()
