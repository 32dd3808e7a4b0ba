"""Bytes read from other people's files, such as the shards of a model: past the page cache, from several drives at once.

Invariant: nothing is ever written there; the file's last block may be cut short, all others are read whole.
"""

import errno
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headrace.files.block_file import BLOCK_BYTES, Bytes, Ticket, check_aligned
from headrace.files.direct import takes_direct_reads
from headrace.files.threads import ThreadEngine, Transfer
from headrace.terms.closing import Closing
from headrace.terms.errors import ShortTransfer, StorageError
from headrace.terms.events import Sink
from headrace.terms.machine.drives import InFlight
from headrace.terms.sizes import round_up


@dataclass(frozen=True, slots=True)
class Extent:
    """`num_bytes` bytes from `offset` of the file `path`, which go to `at` in a buffer: whole blocks, all four numbers."""

    path: Path
    offset: int
    num_bytes: int
    at: int


def part_of(extent: Extent, start: int, stop: int) -> Extent | None:
    """Return what of an extent goes to bytes `start` to `stop` of its buffer, for one that has these alone. None: nothing."""
    first, last = max(start, extent.at), min(stop, extent.at + extent.num_bytes)
    if first >= last:
        return None
    return Extent(extent.path, extent.offset + first - extent.at, last - first, first - start)


class Reader(Protocol):
    """What reads extents of a model's files: where they lie, or from a copy."""

    @property
    def bytes_read(self) -> int:
        """Bytes read so far."""

    def read(self, extents: Sequence[Extent], into: Bytes) -> Ticket:
        """Start reading `extents` to their places in `into`."""

    def close(self) -> None:
        """Let go of the files."""


class SourceFile:
    """A `BlockFile` that is only read. Its size is rounded up to whole blocks; what lies behind its end is left as it was."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
            self.direct = takes_direct_reads(self._descriptor)
            if not self.direct:
                os.close(self._descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise StorageError(f"{path}: cannot open the file: {error.strerror}") from error
            self.direct = False
        if not self.direct:
            self._descriptor = os.open(path, os.O_RDONLY)
        self._end = os.fstat(self._descriptor).st_size
        self.size_bytes = round_up(self._end, BLOCK_BYTES)

    def read_into(self, offset: int, into: Bytes) -> None:
        """See `BlockFile.read_into`."""
        check_aligned(str(self.path), offset, into, self.size_bytes)
        wanted = min(into.size, self._end - offset)
        moved = 0
        while moved < wanted:
            try:
                count = os.preadv(self._descriptor, [into[moved:].data], offset + moved)
            except OSError as error:
                raise StorageError(
                    f"{self.path}: read of {into.size} bytes at offset {offset} failed: {error.strerror}; see the kernel log, "
                    "the drive may be failing"
                ) from error
            if moved + count < wanted:
                count -= count % BLOCK_BYTES  # O_DIRECT can go on only at a block border
            if count == 0:
                raise ShortTransfer(
                    f"{self.path}: read at offset {offset}: wanted {wanted} bytes, got {moved}; the file shrank: fetch it again"
                )
            moved += count
        if not self.direct:
            os.posix_fadvise(self._descriptor, offset, into.size, os.POSIX_FADV_DONTNEED)

    def write_from(self, offset: int, data: Bytes) -> None:
        """Refuse: what others keep is not written to."""
        raise StorageError(f"{self.path}: is only read here")

    def extend(self, size_bytes: int) -> None:
        """Refuse likewise."""
        raise StorageError(f"{self.path}: is only read here")

    def sync(self) -> None:
        """Nothing was written."""

    def close(self) -> None:
        """See `BlockFile.close`."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


class ExtentReader(Closing):
    """Reads extents, those of each drive by threads of its own, so that all drives work at once. Close it after the last."""

    def __init__(self, paths: Iterable[Path], *, sink: Sink, in_flight: InFlight | None = None) -> None:
        setting = in_flight or InFlight()
        self._files: dict[Path, SourceFile] = {}
        self._engines: dict[int, ThreadEngine] = {}
        self._drives: dict[Path, int] = {}
        try:
            for path in paths:
                if path not in self._files:
                    # The Hub's cache has links to where its files lie, perhaps on another drive.
                    self._files[path] = SourceFile(path.resolve())
                    drive = self._drives[path] = path.stat().st_dev
                    if drive not in self._engines:
                        engine = ThreadEngine(setting.threads, 0, piece_bytes=setting.piece_bytes, sink=sink)
                        self._engines[drive] = engine
        except BaseException:
            self.close()
            raise

    @property
    def bytes_read(self) -> int:
        """Bytes read so far."""
        return sum(engine.bytes_read for engine in self._engines.values())

    def read(self, extents: Sequence[Extent], into: Bytes) -> Ticket:
        """Start reading `extents` to their places in `into`."""
        by_drive: dict[int, list[Transfer]] = {}
        for extent in extents:
            part = into[extent.at : extent.at + extent.num_bytes]
            by_drive.setdefault(self._drives[extent.path], []).append((self._files[extent.path], extent.offset, part))
        return _Together([self._engines[drive].read(transfers) for drive, transfers in by_drive.items()])

    def close(self) -> None:
        """End the threads and close the files."""
        for engine in self._engines.values():
            engine.close()
        for file in self._files.values():
            file.close()


class _Together:
    """Several tickets as one."""

    def __init__(self, tickets: Sequence[Ticket]) -> None:
        self._tickets = tickets

    @property
    def done(self) -> bool:
        return all(ticket.done for ticket in self._tickets)

    def wait(self, timeout_seconds: float | None = None) -> None:
        for ticket in self._tickets:
            ticket.wait(timeout_seconds)
