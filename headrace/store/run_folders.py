"""SSD directories: are they usable, and which folders does a run have in them?

Invariant: nothing is created before every directory is known to be fit and to have space for all that goes there.
"""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from headrace.files import Beside, BlockFile, DirectFile, DirectoryFacts, describe_directory
from headrace.files.durable import sync, write_whole
from headrace.store.lock import LOCK_NAME, RunLock
from headrace.store.manifest import data_folder
from headrace.terms.errors import ConfigError, DiskFull, StorageError
from headrace.terms.events import Notice, Sink
from headrace.terms.json_text import parse_json
from headrace.terms.options.budget import default_bytes
from headrace.terms.sizes import format_bytes

# Opens the file at a path; makes it, with so many bytes reserved, where the second argument is not None.
OpenFile = Callable[[Path, int | None], BlockFile]

OWNER_NAME = "owner.json"
# How the names of files with rows of tables begin; what follows is the number of a unit.
ROWS_NAME = "rows."
_OWNER_NEW = OWNER_NAME + ".new"


def open_direct(path: Path, create_bytes: int | None) -> BlockFile:
    """Open or create a `DirectFile`: what a store uses unless it is told otherwise."""
    return DirectFile.open(path) if create_bytes is None else DirectFile.create(path, create_bytes)


def check_directories(
    directories: Sequence[Path],
    needed_bytes: Sequence[int],
    *,
    allow_in_memory: bool,
    sink: Sink,
    beside: Beside | None = None,
    what: str = "the state",
) -> None:
    """Refuse directories that are missing, no directories, read-only, named twice or in memory. Refuse those that are too full:
    `what` takes `needed_bytes` of each, and others will lie `beside` it.

    Raises:
        ConfigError: a directory cannot be used.
        DiskFull: not enough space; names what each file system needs and has.
    """
    if not directories:
        raise ConfigError("no SSD directory given; name at least one")
    facts = [_check_one(directory, allow_in_memory) for directory in directories]
    seen: dict[tuple[int, int], Path] = {}
    needed_of_device: dict[int, int] = {}
    for fact, num_bytes in zip(facts, needed_bytes, strict=True):
        status = os.stat(fact.path)
        twin = seen.setdefault((status.st_dev, status.st_ino), fact.path)
        if twin is not fact.path:
            raise ConfigError(f"{fact.path} and {twin} are the same directory; name each SSD directory once")
        needed_of_device[status.st_dev] = needed_of_device.get(status.st_dev, 0) + num_bytes
    _check_space(what, facts, needed_bytes, needed_of_device)
    if beside is not None:
        _check_beside(beside, needed_of_device)
    if len(needed_of_device) < len(facts):
        sink(Notice(text="some SSD directories are on the same file system; striping over them brings no speed"))
    for fact in facts:
        if fact.in_memory:
            sink(Notice(text=f"{fact.path}: {fact.file_system} lies in memory: the state is lost with a power cut"))
        elif not fact.takes_direct:
            sink(Notice(text=f"{fact.path}: {fact.file_system} refuses O_DIRECT; buffered input and output is slower"))


def _check_one(directory: Path, allow_in_memory: bool) -> DirectoryFacts:
    fact = describe_directory(directory)
    if fact.refusal and not fact.exists:
        raise ConfigError(f"{directory}: SSD directory cannot be looked at ({fact.refusal}); name another")
    if not fact.exists:
        raise ConfigError(f"{directory}: SSD directory does not exist; create it or name another")
    if not fact.is_directory:
        raise ConfigError(f"{directory}: expected a directory, found a file; name a directory")
    if fact.refusal:
        raise ConfigError(
            f"{directory}: SSD directory cannot be written to ({fact.refusal}); change its permissions or name another"
        )
    if fact.in_memory and not allow_in_memory:
        raise ConfigError(f"{directory}: {fact.file_system} lies in memory, not on an SSD; name a directory on a drive")
    return fact


def _check_space(
    what: str, facts: Sequence[DirectoryFacts], needed_bytes: Sequence[int], needed_of_device: dict[int, int]
) -> None:
    short = False
    rows = []
    for fact, num_bytes in zip(facts, needed_bytes, strict=True):
        short |= needed_of_device[os.stat(fact.path).st_dev] > default_bytes("ssd", fact.free_bytes)
        rows.append(f"{fact.path}: {format_bytes(num_bytes)} needed, {format_bytes(fact.free_bytes)} free")
    if short:
        total = format_bytes(sum(needed_bytes))
        raise DiskFull(
            f"{what} needs {total} on SSD, where a tenth of the free space stays free; "
            + "; ".join(rows)
            + "; free some space or add a directory"
        )


def _check_beside(beside: Beside, needed_of_device: Mapping[int, int]) -> None:
    """Refuse a file system that has no space for `beside` and what the state takes there, if it is the same."""
    free_bytes = shutil.disk_usage(beside.there).free
    state_bytes = needed_of_device.get(beside.device, 0)
    if state_bytes + beside.num_bytes > free_bytes:
        and_state = f", and the state {format_bytes(state_bytes)} on the same file system" if state_bytes else ""
        raise DiskFull(
            f"{beside.path}: {beside.what} needs {format_bytes(beside.num_bytes)} there{and_state}; free are "
            f"{format_bytes(free_bytes)}; free some space, or name another output{' or ssd' if state_bytes else ''}"
        )


def make_folders(directories: Sequence[Path], run_directory: Path, run_id: str) -> list[RunLock]:
    """Make the folder of run `run_id` in each directory, with a note of the run it belongs to; return their locks, held.

    Raises:
        StorageError: a folder cannot be made.
    """
    with contextlib.ExitStack() as undo:
        locks = []
        for directory in directories:
            folder = data_folder(directory, run_id)
            try:
                folder.mkdir()
                locks.append(RunLock(folder, needed=False))
                undo.callback(locks[-1].release)
                _write_owner(folder, run_directory, run_id)
                sync(directory)
            except OSError as error:
                raise StorageError(f"{folder}: cannot be made: {error.strerror}; name another SSD directory") from error
        undo.pop_all()
    return locks


def hold_folders(directories: Sequence[Path], run_id: str) -> list[RunLock]:
    """Take the locks of the folders of a run that is opened again: they tell that it lives wherever its directory went.

    Raises:
        RunDirectoryError: another process works on them, for a copy of the run directory.
    """
    with contextlib.ExitStack() as undo:
        locks = []
        for directory in directories:
            locks.append(RunLock(data_folder(directory, run_id), needed=False))
            undo.callback(locks[-1].release)
        undo.pop_all()
    return locks


def note_owner(directories: Sequence[Path], run_directory: Path, run_id: str) -> None:
    """Let the folders of a run know where its directory is now. What cannot be noted is only found harder."""
    for directory in directories:
        folder = data_folder(directory, run_id)
        if owner_of(folder) != (run_id, run_directory.resolve()):
            with contextlib.suppress(OSError):
                _write_owner(folder, run_directory, run_id)


def owner_of(folder: Path) -> tuple[str, Path] | None:
    """Return id and directory of the run of `folder`, as of when it was opened last; None if it is none of ours."""
    try:
        owner = parse_json((folder / OWNER_NAME).read_text(encoding="utf-8"))
        return str(owner["run_id"]), Path(owner["run_directory"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remove_folders(directories: Sequence[Path], run_id: str) -> None:
    """Remove what `make_folders` and the store put into `directories`; nothing else. What cannot be removed keeps nothing else.

    Raises:
        StorageError: names what could not be removed, and why; raised after the last folder.
    """
    refused = []
    for directory in directories:
        try:
            remove_folder(data_folder(directory, run_id))
        except StorageError as error:
            refused.append(str(error))
    if refused:
        names = " ".join(str(directory) for directory in directories)
        raise StorageError(f"{'; '.join(refused)}; remove the cause, then remove the rest with `headrace clean {names}`")


def remove_folder(folder: Path) -> None:
    """Remove the folder of a run in one directory. The data go first: without the note they would not be found.

    Where its lock is held, network file systems keep the folder until that is released: call `drop_folder` then.

    Raises:
        StorageError: something in it, or the folder itself, cannot be removed.
    """
    try:
        rows = sorted(path.name for path in folder.glob(f"{ROWS_NAME}*"))
        for name in ("data", *rows, _OWNER_NEW, OWNER_NAME, LOCK_NAME):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()
    except FileNotFoundError:
        return
    except OSError as error:
        if not (error.errno in (errno.ENOTEMPTY, errno.EBUSY) and _only_unlinked(folder)):
            raise StorageError(f"{error.filename or folder}: cannot be removed: {error.strerror}") from error


def drop_folder(folder: Path) -> None:
    """Remove the folder if it is empty by now."""
    with contextlib.suppress(OSError):
        folder.rmdir()


def _only_unlinked(folder: Path) -> bool:
    """Return whether in `folder` is nothing but what NFS and FUSE make of a file that is unlinked while it is open."""
    try:
        return all(path.name.startswith((".nfs", ".fuse_hidden")) for path in folder.iterdir())
    except OSError:
        return False


def _write_owner(folder: Path, run_directory: Path, run_id: str) -> None:
    write_whole(folder / OWNER_NAME, json.dumps({"run_id": run_id, "run_directory": str(run_directory.resolve())}))
