"""Files and directories that are complete or absent, even after a power cut: written beside their place, synced, renamed.

Invariant: a file under its name is complete and on the drive. A file beside it belongs to a living process, or is removed by
the next one that writes there.
"""

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from headrace.files.scratch import claim, remove_dead


def sync(path: Path) -> None:
    """Make the content of a file, or the names in a directory, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, text: str) -> None:
    """Write `text` to the file `path`, which is the old one or the new one at any moment; after an error nothing is beside it.

    Links are followed. What is there and is no regular file, such as a pipe or a device, is written to and stays what it is.

    Raises:
        OSError: it cannot be written.
    """
    if _is_special(path):
        with path.open("w", encoding="utf-8") as file:
            file.write(text)
        return
    path = Path(os.path.realpath(path))
    beside = path.with_name(path.name + ".new")
    try:
        _write_synced(beside, "w", text)
        beside.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
    sync(path.parent)


def no_link(path: Path) -> Path:
    """Return `path`, which is a program's own file: a link that somebody put there is removed, and not written through.

    Raises:
        OSError: it cannot be removed.
    """
    if path.is_symlink():
        path.unlink()
    return path


def write_new(path: Path, text: str) -> None:
    """As `write_whole`, but only for a new file: of several processes one succeeds. On a file system without links
    a kill, or a power cut, may leave it cut short.

    Raises:
        FileExistsError: it is there.
        OSError: it cannot be written.
    """
    beside = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        _write_synced(beside, "w", text)
        try:
            os.link(beside, path)
        except FileExistsError:
            raise
        except OSError:  # a file system without links
            _write_first(path, text)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()
    sync(path.parent)


def _write_first(path: Path, text: str) -> None:
    try:
        _write_synced(path, "x", text)
    except FileExistsError:
        raise
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise


def _write_synced(path: Path, mode: str, text: str) -> None:
    with path.open(mode, encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _is_special(path: Path) -> bool:
    """Return whether something is there that is no regular file. Looked at as it is opened: to where a link such as
    /dev/stdout leads, there may be no path.
    """
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def appearing(out: Path) -> Iterator[Path]:
    """Give a directory to fill, that takes the name `out` at the end; after an error it is removed. Links are followed.

    What processes that were killed meanwhile left beside `out` is removed first.

    Raises:
        OSError: a directory cannot be made or synced, or `out` is there and not empty.
    """
    with _beside(out) as (partial, target):
        yield partial
        partial.chmod(0o755)  # mkdtemp makes it private
        _sync_tree(partial)
        os.replace(partial, target)
        sync(target.parent)


@contextlib.contextmanager
def appearing_file(out: Path) -> Iterator[Path]:
    """As `appearing`, for one file: give a place for it in a directory of its own, where what it is made of may lie too."""
    with _beside(out) as (partial, target):
        place = partial / target.name
        yield place
        sync(place)
        os.replace(place, target)
        sync(target.parent)


@contextlib.contextmanager
def _beside(out: Path) -> Iterator[tuple[Path, Path]]:
    """Give a directory beside `out`, which is removed at the end if it is there, and the place to which `out` leads."""
    target = Path(os.path.realpath(out))
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_dead(target.parent, _prefix(target))
    partial, descriptor = claim(target.parent, _prefix(target))
    try:
        yield partial, target
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # after a rename it is no more
        os.close(descriptor)


def is_mount_point(path: Path) -> bool:
    """Return whether something is mounted at `path`, also where it is of the same file system."""
    if os.path.ismount(path):
        return True
    try:
        lines = os.fsdecode(Path("/proc/self/mountinfo").read_bytes()).splitlines()
    except OSError:
        return False
    written = "".join(f"\\{ord(letter):03o}" if letter in " \t\n\\" else letter for letter in str(path))
    return any(line.split(" ")[4] == written for line in lines)


def _prefix(target: Path) -> str:
    return f".{target.name}.partial-"


def _sync_tree(directory: Path) -> None:
    for folder, _, names in os.walk(directory, topdown=False):
        for name in names:
            sync(Path(folder, name))
        sync(Path(folder))
