"""Directories of one process: locked for as long as it lives, and removed by the next one if it was killed.

Invariant: what a living process holds is never taken for dead, also not between its making and its lock.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path


def remove_tree(folder: Path) -> None:
    """Remove a directory and what is in it, as far as that is possible."""
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def scratch(parent: Path, prefix: str, discard: Callable[[Path], None] = remove_tree) -> Iterator[Path]:
    """Give a directory in `parent` whose name begins with `prefix`; at the end it is removed. What killed processes left under
    that prefix goes first, by `discard`.

    Raises:
        OSError: a directory cannot be made.
    """
    remove_dead(parent, prefix, discard)
    folder, descriptor = claim(parent, prefix)
    try:
        yield folder
    finally:
        remove_tree(folder)
        os.close(descriptor)


def claim(parent: Path, prefix: str) -> tuple[Path, int]:
    """Make a directory in `parent` and lock it. Return it and the open descriptor that holds the lock. The lock ends with the
    process, however that ends.

    Raises:
        OSError: it cannot be made.
    """
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue  # somebody took it for dead before it had its lock
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lost = not folder.exists()
        except BlockingIOError:
            lost = True  # somebody is about to remove it
        except OSError:
            lost = False  # a file system without such locks: there nothing is taken for dead
        if not lost:
            return folder, descriptor
        os.close(descriptor)


def remove_dead(parent: Path, prefix: str, discard: Callable[[Path], None] = remove_tree) -> None:
    """Remove, by `discard`, the directories in `parent` under that prefix that no living process holds."""
    try:
        found = list(parent.iterdir())
    except OSError:
        return  # it is not there, or we may write there and not look
    for path in found:
        if not path.name.startswith(prefix) or path.is_symlink() or not path.is_dir():
            continue
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            continue  # gone meanwhile, or somebody else's
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            discard(path)
        except OSError:
            pass  # it lives, or it cannot be told
        finally:
            os.close(descriptor)
