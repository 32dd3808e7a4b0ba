"""One process per run directory, and per folder of a run on an SSD.

Invariant: the lock goes with the process that holds it, however it ends.
"""

import contextlib
import errno
import fcntl
import os
import time
from pathlib import Path

from headrace.terms.errors import RunDirectoryError

LOCK_NAME = "lock"
_HELD = (errno.EWOULDBLOCK, errno.EACCES)


class RunLock:
    """Holds `folder/lock` from construction to `release`. Of a forked child it is not: only the process that took it frees it.

    Where it is not `needed`, a drive that has no locks, or cannot make the file, is passed over: nothing is held then.

    Raises:
        RunDirectoryError: another process (or another store of this one) holds it; names its process id.
    """

    def __init__(self, folder: Path, *, needed: bool = True) -> None:
        self._descriptor, self._process_id = -1, os.getpid()
        path = folder / LOCK_NAME
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            if not needed:
                return
            raise RunDirectoryError(f"{path}: cannot be opened: {error.strerror}; a run directory must be writable") from error
        try:
            _lock_exclusively(self._descriptor)
        except OSError as error:
            holder = os.pread(self._descriptor, 32, 0).decode(errors="replace").strip()
            os.close(self._descriptor)
            self._descriptor = -1
            if error.errno in _HELD:
                raise RunDirectoryError(
                    f"{folder}: in use by process {holder or 'unknown'}; wait for it or stop it; a run has one process"
                ) from error
            if not needed:
                return
            if not holder:  # it was never held: it was made just now
                with contextlib.suppress(OSError):
                    path.unlink()
            raise RunDirectoryError(f"{path}: cannot be locked: {error.strerror}; put the run on a local drive") from error
        # The lock is what counts; the number is for messages, and a full disk may have no room for it.
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{self._process_id}\n".encode(), 0)

    def release(self) -> None:
        """Let others in. A second call does nothing."""
        if self._descriptor >= 0:
            # A child that was forked meanwhile shares the lock. Closing alone would leave it to the child, as long as that
            # lives. Unlocking in the child would take it from us.
            if self._process_id == os.getpid():
                with contextlib.suppress(OSError):
                    fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
        self._descriptor = -1


def _lock_exclusively(descriptor: int) -> None:
    # `lock_holder` of another process holds a shared lock for a moment; that is no reason to refuse a run.
    for _ in range(4):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno != errno.EWOULDBLOCK:
                raise
            time.sleep(0.02)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def lock_holder(folder: Path) -> int | None:
    """Return the process id that holds the lock of `folder` now (0 if unknown), or None. Takes and changes nothing."""
    try:
        descriptor = os.open(folder / LOCK_NAME, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _HELD:
            return None  # a file system without locks: none is held
        text = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
        return int(text) if text.isdigit() else 0
    finally:
        os.close(descriptor)
    return None
