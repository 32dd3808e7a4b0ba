"""The requests of a training step, recorded where they meet the file, and the same again with nothing beside them.

Invariant: what is repeated is what was asked: the same files, offsets, sizes and buffers, as many threads in each direction as
the engine has; nothing is computed and nothing is checked. It overwrites the state: only for runs that are thrown away.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

from headrace.files import Bytes, DirectFile, Volume

SLICES = 10


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One `preadv` or `pwritev` of at most the engine's piece, and when it was under way (monotonic seconds)."""

    file: DirectFile
    is_read: bool
    offset: int
    buffer: Bytes
    start_seconds: float
    stop_seconds: float


class Recorder:
    """Keeps the requests of the files of a volume that it was put before."""

    def __init__(self, volume: Volume) -> None:
        self.requests: list[Request] = []
        volume.files = tuple(_Recorded(file, self.requests) for file in volume.files)

    def between(self, begin_seconds: float, end_seconds: float) -> list[Request]:
        """Return the requests that began in the window, in the order in which they did."""
        found = [request for request in self.requests if begin_seconds <= request.start_seconds < end_seconds]
        return sorted(found, key=lambda request: request.start_seconds)


class _Recorded:
    """A file that writes down what is asked of it; all else is the file's own."""

    def __init__(self, file: Any, requests: list[Request]) -> None:
        self._file, self._requests = file, requests

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def read_into(self, offset: int, into: Bytes) -> None:
        start = time.monotonic()
        self._file.read_into(offset, into)
        self._requests.append(Request(self._file, True, offset, into, start, time.monotonic()))

    def write_from(self, offset: int, data: Bytes) -> None:
        start = time.monotonic()
        self._file.write_from(offset, data)
        self._requests.append(Request(self._file, False, offset, data, start, time.monotonic()))


def bare_rates(
    requests: Sequence[Request], repeats: int, threads: int, *, load: Callable[[], AbstractContextManager[None]] = nullcontext
) -> dict[str, float]:
    """Return bytes per second of the requests done again: all at once, and slice after slice as training had them.

    The second keeps the order in time: where a step reads first and writes later, a drive cannot do both at once. The third is
    the second while `load` is entered: what the drive gives to those who have nothing else to do, on cores that have.
    `threads` is what the run had in each direction.
    """
    num_bytes = sum(request.buffer.size for request in requests)
    slices = sliced(requests, SLICES)
    free, in_order, beside_load = [], [], []
    for _ in range(repeats):
        free.append(seconds_of(requests, threads))
        in_order.append(sum(seconds_of(part, threads) for part in slices))
        with load():
            beside_load.append(sum(seconds_of(part, threads) for part in slices))
    for file in {id(request.file): request.file for request in requests}.values():
        file.sync()
    return {
        "bytes": num_bytes,
        "read_share": sum(request.buffer.size for request in requests if request.is_read) / num_bytes,
        "requests": len(requests),
        "bytes_per_second": num_bytes / median(free),
        "in_order_bytes_per_second": num_bytes / median(in_order),
        "beside_load_bytes_per_second": num_bytes / median(beside_load),
    }


def sliced(requests: Sequence[Request], count: int) -> list[list[Request]]:
    """Cut requests, sorted by their start, into at most `count` slices of equal time."""
    first, last = requests[0].start_seconds, requests[-1].start_seconds
    width = max((last - first) / count, 1e-9)
    slices: list[list[Request]] = [[] for _ in range(count)]
    for request in requests:
        slices[min(count - 1, int((request.start_seconds - first) / width))].append(request)
    return [part for part in slices if part]


def seconds_of(requests: Sequence[Request], threads: int) -> float:
    """Do the requests again, reads and writes at once, each from `threads` of their own; return the seconds.

    Raises:
        StorageError: what a request raised; the others are left undone.
    """
    failures: list[BaseException] = []

    def serve(queue: deque[Request]) -> None:
        try:
            while queue and not failures:
                try:
                    request = queue.popleft()
                except IndexError:  # another thread took the last one
                    return
                move = request.file.read_into if request.is_read else request.file.write_from
                move(request.offset, request.buffer)
        except BaseException as failure:
            failures.append(failure)

    queues = [deque(request for request in requests if request.is_read is is_read) for is_read in (True, False)]
    servers = [threading.Thread(target=serve, args=(queue,)) for queue in queues for _ in range(threads)]
    start = time.perf_counter()
    for server in servers:
        server.start()
    for server in servers:
        server.join()
    if failures:
        raise failures[0]
    return max(time.perf_counter() - start, 1e-9)
