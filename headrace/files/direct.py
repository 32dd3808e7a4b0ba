"""A file on a real file system, past the page cache where the file system allows it.

If O_DIRECT is refused (some FUSE and network file systems), the file is read and written through the page cache. Moved bytes
are then dropped from the cache. Invariant: the page cache never holds more than a fixed number of this file's bytes.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import struct
import threading
from pathlib import Path
from typing import Self

import numpy as np

from headrace.files.block_file import BLOCK_BYTES, Bytes, check_aligned
from headrace.terms.errors import DiskFull, ShortTransfer, StorageError, has_no_space
from headrace.terms.sizes import format_bytes

# Without O_DIRECT, written pages can leave the page cache only once they are on the drive; so many may wait for that.
_MAX_DIRTY_BYTES = 64 << 20
# ioctl_iflags(2): a file's flags, and the one for no copy-on-write.
_GET_FLAGS, _SET_FLAGS, _NO_COPY_ON_WRITE = 0x80086601, 0x40086602, 0x00800000


class DirectFile:
    """A `BlockFile` on `path`. Make one with `DirectFile.create` or `DirectFile.open`."""

    def __init__(self, path: Path, descriptor: int, *, direct: bool) -> None:
        self.path = path
        self.direct = direct
        self._descriptor = descriptor
        self._size_bytes = os.fstat(descriptor).st_size
        self._dirty_bytes = 0
        self._lock = threading.Lock()

    @classmethod
    def create(cls, path: Path, size_bytes: int) -> Self:
        """Make a new file of `size_bytes` whose space is reserved.

        Raises:
            DiskFull: not enough space; the file is removed again.
            StorageError: the file exists, or cannot be made.
        """
        try:
            # Reserving first makes the first write 2-3 times as fast as appending (measured: `docs/decisions/0003`).
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644))
        except OSError as error:
            raise StorageError(f"{path}: cannot create the file: {error.strerror}") from error
        try:
            file = cls.open(path)
            _write_in_place(file._descriptor)
            try:
                file.extend(size_bytes)
            except BaseException:
                file.close()
                raise
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return file

    @classmethod
    def nameless(cls, directory: Path, size_bytes: int, what: str = "trial file") -> Self:
        """Make a new file of `size_bytes` in `directory` that has no name: its space is free again when its process ends.

        `what` it is, messages say in the place of its name.

        Raises:
            DiskFull: not enough space.
            StorageError: it cannot be made.
        """
        # Not O_TMPFILE, which some file systems lack. And not in a folder of its own, which network file systems would keep
        # while the file is open. Space is reserved only after the name is gone.
        path = directory / f".headrace-trial-{secrets.token_hex(8)}"
        file = cls.create(path, 0)
        try:
            path.unlink()
            file.path = directory / what
            file.extend(size_bytes)
        except BaseException:
            file.close()
            raise
        return file

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open an existing file for reading and writing.

        Raises:
            StorageError: missing, not permitted, or no regular file.
        """
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_DIRECT)
            direct = True
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise StorageError(f"{path}: cannot open the file: {error.strerror}") from error
            descriptor, direct = os.open(path, os.O_RDWR), False
        if direct and not takes_direct_reads(descriptor):
            os.close(descriptor)
            descriptor, direct = os.open(path, os.O_RDWR), False
        return cls(path, descriptor, direct=direct)

    @property
    def size_bytes(self) -> int:
        """Size of the file when it was opened or last extended."""
        return self._size_bytes

    def read_into(self, offset: int, into: Bytes) -> None:
        """See `BlockFile.read_into`."""
        self._transfer(offset, into, "read")
        if not self.direct:
            os.posix_fadvise(self._descriptor, offset, into.size, os.POSIX_FADV_DONTNEED)

    def write_from(self, offset: int, data: Bytes) -> None:
        """See `BlockFile.write_from`."""
        self._transfer(offset, data, "write")
        if not self.direct:
            self._bound_dirty_bytes(data.size)

    def extend(self, size_bytes: int) -> None:
        """See `BlockFile.extend`."""
        if size_bytes <= self._size_bytes:
            return
        try:
            os.posix_fallocate(self._descriptor, 0, size_bytes)
        except OSError as error:
            # A half-done reservation keeps its space: give back what was not there before.
            os.ftruncate(self._descriptor, self._size_bytes)
            if has_no_space(error):
                raise _disk_full(self.path, size_bytes - self._size_bytes) from error
            raise StorageError(f"{self.path}: cannot reserve {format_bytes(size_bytes)}: {error.strerror}") from error
        self._size_bytes = size_bytes

    def sync(self) -> None:
        """See `BlockFile.sync`."""
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            raise StorageError(f"{self.path}: fdatasync failed: {error.strerror}; the drive may be failing") from error

    def close(self) -> None:
        """See `BlockFile.close`."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self._descriptor = -1

    def _transfer(self, offset: int, buffer: Bytes, verb: str) -> None:
        if self._descriptor < 0:
            raise StorageError(f"{self.path}: {verb} at offset {offset} after close")
        check_aligned(str(self.path), offset, buffer, self._size_bytes)
        move = os.preadv if verb == "read" else os.pwritev
        moved = 0
        while moved < buffer.size:
            try:
                count = move(self._descriptor, [buffer[moved:].data], offset + moved)
            except OSError as error:
                if verb == "write" and has_no_space(error):
                    raise _disk_full(self.path, buffer.size - moved) from error
                raise StorageError(
                    f"{self.path}: {verb} of {buffer.size} bytes at offset {offset} failed: {error.strerror}; "
                    "see the kernel log, the drive may be failing"
                ) from error
            if count < buffer.size - moved:
                # O_DIRECT can go on only at a block border: move the broken block again.
                count -= count % BLOCK_BYTES
            if count == 0:
                raise ShortTransfer(
                    f"{self.path}: {verb} at offset {offset}: wanted {buffer.size} bytes, got {moved}; "
                    "the file may have been cut short"
                )
            moved += count

    def _bound_dirty_bytes(self, written_bytes: int) -> None:
        with self._lock:
            self._dirty_bytes += written_bytes
            full = self._dirty_bytes >= _MAX_DIRTY_BYTES
            if full:
                self._dirty_bytes = 0
        if full:
            self.sync()
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _write_in_place(descriptor: int) -> None:
    """Have a file system that puts changed blocks elsewhere (btrfs) write them in place; a file must be empty for that.

    There, copies and the file system's own checksums made a step take three times as long (docs/log/file-systems), and what is
    overwritten needs space once more. States have checksums of their own, and the committed slot is never written to. Other
    file systems refuse the flag, or know none.
    """
    with contextlib.suppress(OSError):
        flags, _ = struct.unpack("ii", fcntl.ioctl(descriptor, _GET_FLAGS, bytes(8)))
        fcntl.ioctl(descriptor, _SET_FLAGS, struct.pack("ii", flags | _NO_COPY_ON_WRITE, 0))


def takes_direct_reads(descriptor: int) -> bool:
    """Return whether a read works: some file systems take O_DIRECT when opening and refuse the transfer."""
    page = np.frombuffer(mmap.mmap(-1, BLOCK_BYTES), dtype=np.uint8)
    try:
        os.preadv(descriptor, [page.data], 0)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
    return True  # any other error belongs to the transfer that meets it


def _disk_full(path: Path, needed_bytes: int) -> DiskFull:
    status = os.statvfs(path.parent)
    free_bytes = status.f_bavail * status.f_frsize
    return DiskFull(
        f"{path}: {needed_bytes} bytes ({format_bytes(needed_bytes)}) needed, "
        f"{free_bytes} bytes ({format_bytes(free_bytes)}) free in {path.parent}; free some space or add a directory"
    )
