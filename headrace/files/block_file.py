"""The contracts of the lowest layer: files of aligned blocks, and tickets for transfers under way.

Knows bytes only: no tensors, no units, no steps. Invariant: a transfer is complete or it raises; no one ever sees part of one.
"""

from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.terms.errors import StorageError

Bytes = NDArray[np.uint8]

# What O_DIRECT asks of offsets, lengths and addresses on every file system and drive known (512 on some, never more).
BLOCK_BYTES = 4096


class BlockFile(Protocol):
    """A file of fixed size, read and written in aligned blocks. Safe to call from several threads at once.

    `direct` says whether transfers bypass the page cache.
    """

    @property
    def path(self) -> Path:
        """Where the file lies, for messages."""

    @property
    def direct(self) -> bool:
        """Whether transfers bypass the page cache."""

    @property
    def size_bytes(self) -> int:
        """Size of the file."""

    def read_into(self, offset: int, into: Bytes) -> None:
        """Fill `into` from `offset` on.

        Raises:
            ShortTransfer: the file ended before `into` was full.
            StorageError: the drive reported an error.
        """

    def write_from(self, offset: int, data: Bytes) -> None:
        """Write all of `data` at `offset`.

        Raises:
            ShortTransfer: the system took only a part of it.
            DiskFull: there was no space.
            StorageError: the drive reported an error.
        """

    def extend(self, size_bytes: int) -> None:
        """Make the file at least `size_bytes` long, with the space reserved.

        Raises:
            DiskFull: there is not that much space.
        """

    def sync(self) -> None:
        """Return when everything written so far would survive a power cut."""

    def close(self) -> None:
        """Release the descriptor. A second call does nothing."""


class Ticket(Protocol):
    """A transfer under way. Its buffer belongs to the transfer until `done`."""

    @property
    def done(self) -> bool:
        """Whether no part of the transfer is under way any more, be it finished or failed."""

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Block until the transfer is finished; may be called again.

        Raises:
            StorageError: the error of the first part that failed.
            DeviceStalled: not finished after `timeout_seconds`, or (without it) nothing moved for the engine's deadline.
                The buffer still belongs to the transfer then.
        """


class DoneTicket:
    """A transfer that needed no input or output."""

    done = True

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Return at once."""


def check_aligned(what: str, offset: int, buffer: Bytes, size_bytes: int) -> None:
    """Refuse a transfer of `buffer` at `offset` of `what` that O_DIRECT could not do or that leaves `[0, size_bytes)`.

    Raises:
        StorageError: offset, length or address is no multiple of 4096, the buffer is not contiguous bytes, or out of range.
    """
    if buffer.dtype != np.uint8 or buffer.ndim != 1 or not buffer.flags.c_contiguous:
        raise StorageError(f"{what}: expected a contiguous 1-D uint8 buffer, found {buffer.dtype} of shape {buffer.shape}")
    address = buffer.ctypes.data
    if offset % BLOCK_BYTES or buffer.size % BLOCK_BYTES or address % BLOCK_BYTES:
        raise StorageError(
            f"{what}: offset {offset}, length {buffer.size} and address {address:#x} must be multiples of {BLOCK_BYTES}; "
            "take buffers from an arena and round lengths up"
        )
    if offset < 0 or offset + buffer.size > size_bytes:
        raise StorageError(f"{what}: bytes {offset} to {offset + buffer.size} asked, it has {size_bytes}")
