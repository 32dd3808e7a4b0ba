"""A file that fails by script, as drives do, but on demand.

Invariant: a fault strikes exactly the call that the script names; every other call passes through unchanged.
"""

import errno
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from headrace.files.block_file import BLOCK_BYTES, BlockFile, Bytes
from headrace.terms.errors import DiskFull, ShortTransfer, StorageError
from headrace.testing.file_around import FileAround


class FaultKind(StrEnum):
    """What goes wrong."""

    SHORT = "short"  # the first `amount` bytes move (whole blocks), then ShortTransfer
    EIO = "eio"  # nothing moves
    NO_SPACE = "no-space"  # nothing moves
    FLIP = "flip"  # bit 0 of byte `amount` is inverted, without any error
    STALL = "stall"  # the call takes `seconds` longer


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`kind` strikes call number `call` (counted from 0, per verb) of `verb`: `read`, `write` or `sync`."""

    verb: str
    call: int
    kind: FaultKind
    amount: int = 0
    seconds: float = 0.0


class FaultyFile(FileAround):
    """A `BlockFile` around `inner` that has the faults of `script`."""

    def __init__(self, inner: BlockFile, script: Sequence[Fault]) -> None:
        super().__init__(inner)
        self._faults = {(fault.verb, fault.call): fault for fault in script}
        self._calls = {"read": 0, "write": 0, "sync": 0}
        self._lock = threading.Lock()

    def read_into(self, offset: int, into: Bytes) -> None:
        """See `BlockFile.read_into`."""
        fault = self._next("read", offset, into.size)
        if fault is not None and fault.kind is FaultKind.SHORT:
            self.inner.read_into(offset, into[: _whole_blocks(fault.amount)])
            raise self._short("read", offset, into.size, fault.amount)
        self.inner.read_into(offset, into)
        if fault is not None and fault.kind is FaultKind.FLIP:
            into[fault.amount] ^= 1

    def write_from(self, offset: int, data: Bytes) -> None:
        """See `BlockFile.write_from`."""
        fault = self._next("write", offset, data.size)
        if fault is not None and fault.kind is FaultKind.SHORT:
            self.inner.write_from(offset, data[: _whole_blocks(fault.amount)])
            raise self._short("write", offset, data.size, fault.amount)
        if fault is not None and fault.kind is FaultKind.FLIP:
            room = np.empty(data.size + BLOCK_BYTES, dtype=np.uint8)  # the caller's bytes must stay as they are
            start = -room.ctypes.data % BLOCK_BYTES
            flipped = room[start : start + data.size]
            flipped[:] = data
            flipped[fault.amount] ^= 1
            data = flipped
        self.inner.write_from(offset, data)

    def sync(self) -> None:
        """See `BlockFile.sync`."""
        self._next("sync", 0, 0)
        self.inner.sync()

    def _next(self, verb: str, offset: int, num_bytes: int) -> Fault | None:
        """Count the call; return its fault. Stalls and errors happen here."""
        with self._lock:
            fault = self._faults.get((verb, self._calls[verb]))
            self._calls[verb] += 1
        if fault is None:
            return None
        where = f"{self.path}: {verb} of {num_bytes} bytes at offset {offset} failed"
        if fault.kind is FaultKind.STALL:
            time.sleep(fault.seconds)
        if fault.kind is FaultKind.EIO:
            raise StorageError(f"{where}: {os.strerror(errno.EIO)}")
        if fault.kind is FaultKind.NO_SPACE:
            raise DiskFull(f"{where}: {num_bytes} bytes needed, 0 bytes free")
        return fault

    def _short(self, verb: str, offset: int, wanted: int, got: int) -> ShortTransfer:
        return ShortTransfer(f"{self.path}: {verb} at offset {offset}: wanted {wanted} bytes, got {_whole_blocks(got)}")


def _whole_blocks(num_bytes: int) -> int:
    return num_bytes - num_bytes % BLOCK_BYTES
