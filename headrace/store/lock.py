"""One process per run directory. Invariant: the lock goes with the process that holds it, however it ends."""

import errno
import fcntl
import os
import time
from pathlib import Path

from headrace.spec.errors import RunDirectoryError

LOCK_NAME = "lock"


class RunLock:
    """Holds `run_directory/lock` from construction to `release`.

    Raises:
        RunDirectoryError: another process (or another store of this one) holds it; names its process id.
    """

    def __init__(self, run_directory: Path) -> None:
        path = run_directory / LOCK_NAME
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise RunDirectoryError(f"{path}: cannot be opened: {error.strerror}; a run directory must be writable") from error
        try:
            _lock_exclusively(self._descriptor)
        except OSError as error:
            holder = os.pread(self._descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._descriptor)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise RunDirectoryError(
                    f"{run_directory}: in use by process {holder}; wait for it or stop it, a run has one process"
                ) from error
            raise RunDirectoryError(f"{path}: cannot be locked: {error.strerror}; put the run on a local drive") from error
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let others in. A second call does nothing."""
        if self._descriptor >= 0:
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


def lock_holder(run_directory: Path) -> int | None:
    """Return the process id that holds the lock of `run_directory` now, or None. Takes and changes nothing."""
    try:
        descriptor = os.open(run_directory / LOCK_NAME, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        text = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
        return int(text) if text.isdigit() else 0
    finally:
        os.close(descriptor)
    return None
