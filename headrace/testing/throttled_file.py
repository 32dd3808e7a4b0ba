"""A file with declared slowness, to stand for other drives in tests and trials.

Invariant: bytes of one direction never move faster than declared over any stretch of calls; the directions are independent.
"""

import threading
import time

from headrace.files.block_file import BlockFile, Bytes
from headrace.testing.file_around import FileAround


class ThrottledFile(FileAround):
    """A `BlockFile` around `inner` that reads and writes at declared speeds."""

    def __init__(self, inner: BlockFile, *, read_bytes_per_second: float, write_bytes_per_second: float) -> None:
        super().__init__(inner)
        self._read = _Pace(read_bytes_per_second)
        self._write = _Pace(write_bytes_per_second)

    def read_into(self, offset: int, into: Bytes) -> None:
        """See `BlockFile.read_into`."""
        ready_seconds = self._read.book(into.size)
        self.inner.read_into(offset, into)
        _sleep_until(ready_seconds)

    def write_from(self, offset: int, data: Bytes) -> None:
        """See `BlockFile.write_from`."""
        ready_seconds = self._write.book(data.size)
        self.inner.write_from(offset, data)
        _sleep_until(ready_seconds)


class _Pace:
    """One direction of a drive: one transfer follows the other."""

    def __init__(self, bytes_per_second: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._free_seconds = 0.0
        self._lock = threading.Lock()

    def book(self, num_bytes: int) -> float:
        """Return when a transfer of `num_bytes` that is requested now will be over."""
        with self._lock:
            self._free_seconds = max(self._free_seconds, time.monotonic()) + num_bytes / self._bytes_per_second
            return self._free_seconds


def _sleep_until(ready_seconds: float) -> None:
    time.sleep(max(0.0, ready_seconds - time.monotonic()))
