"""What dead runs left on SSDs.

Invariant: what a living process holds is never listed nor removed; what may still be resumed is told from what is surely dead.
"""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path

from headrace.store.lock import RunLock, lock_holder
from headrace.store.manifest import (
    MANIFEST_NAME,
    UNMADE_NAME,
    data_folder,
    read_manifest,
    remove_records,
    withdraw_manifest,
)
from headrace.store.run_folders import drop_folder, owner_of, remove_folder
from headrace.terms.errors import ConfigError, RunDirectoryError, StorageError
from headrace.terms.json_text import parse_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """A data folder that no process works on.

    `resumable` says that its run directory still knows it. `in_doubt` says that the run is not where it was: it may have been
    removed, or moved, or its drive is not mounted just now. What is neither is dead.
    """

    folder: Path
    run_id: str
    run_directory: Path
    num_bytes: int
    resumable: bool
    in_doubt: bool


def find_leftovers(directories: Sequence[Path]) -> list[Leftover]:
    """List the data folders in `directories` whose run no living process holds. Changes nothing."""
    found = [_look_at(folder) for directory in directories for folder in sorted(directory.glob("headrace-*"))]
    return [leftover for leftover in found if leftover is not None]


def leftovers_of(run_directory: Path) -> list[Leftover]:
    """List the data folders of the run in `run_directory`, also where they know it by an earlier place. Changes nothing.

    Folders that belong to a run of which this one is a copy are not listed. The rest of an interrupted creation or removal is
    dead. But it is in doubt if the directory was moved: it may be a copy from before its run was whole.

    Raises:
        RunDirectoryError: there is no run, or its manifest is damaged.
    """
    withdrawn = not (run_directory / MANIFEST_NAME).exists() and (run_directory / UNMADE_NAME).exists()
    manifest, here = read_manifest(run_directory, UNMADE_NAME if withdrawn else MANIFEST_NAME), run_directory.resolve()
    found = [_look_at(data_folder(directory, manifest.run_id)) for directory in manifest.directories]
    if lock_holder(here) is not None:
        return []
    mine = [each for each in found if each is not None and (each.in_doubt or _same(each.run_directory, here))]
    return mine if withdrawn else [replace(each, run_directory=here, resumable=True, in_doubt=False) for each in mine]


def remove_leftover(leftover: Leftover) -> None:
    """Remove a data folder that was listed, and with the last one of its run that run's records.

    Raises:
        ConfigError: a process has taken up its run since.
        StorageError: something in it cannot be removed, or the manifest of its run cannot be withdrawn.
    """
    holder = lock_holder(leftover.run_directory)
    try:
        # Held until the last file is gone, so that nobody takes up what is being removed.
        lock = RunLock(leftover.folder, needed=False)
    except RunDirectoryError:
        holder, lock = lock_holder(leftover.folder) or 0, None
    try:
        if holder is not None or lock is None:
            raise ConfigError(f"{leftover.folder}: its run is in use by process {holder} again; nothing was removed")
        # A run that lacks a part cannot go on: if this is interrupted, its other folders are known to be dead.
        if _run_in(leftover.run_directory, leftover.run_id, leftover.folder) is _LeftoverRun.KNOWS_IT:
            withdraw_manifest(leftover.run_directory)
        remove_folder(leftover.folder)
    finally:
        if lock is not None:
            lock.release()
    drop_folder(leftover.folder)
    _forget(leftover.run_directory, leftover.run_id)


def _forget(run_directory: Path, run_id: str) -> None:
    """Remove the records of a run that is withdrawn, once its last folder is gone: until then they tell that the rest is dead.

    While an SSD directory is not there, as where its drive is not mounted, its folder is unknown.
    """
    if not (run_directory / UNMADE_NAME).exists():
        return
    with contextlib.suppress(RunDirectoryError, StorageError):  # in use again, damaged, or not ours to remove: they may stay
        lock = RunLock(run_directory, needed=False)
        try:
            manifest = read_manifest(run_directory, UNMADE_NAME)
            gone = (each.is_dir() and not data_folder(each, run_id).exists() for each in manifest.directories)
            if manifest.run_id == run_id and all(gone):
                remove_records(run_directory)
        finally:
            lock.release()


def remove_uncommitted(run_directory: Path) -> None:
    """Remove a state that was never committed, and its records, for a run that begins anew. The caller holds the run's lock,
    and has seen that there is no commit. Folders of a run of which this one is a copy stay.

    Raises: RunDirectoryError: the manifest is damaged, or another process works on a folder. Or this run is a copy of another,
        which may have committed the state in a folder since, from where it is now. Nothing was removed.
        StorageError: something cannot be removed.
    """
    manifest = read_manifest(run_directory)
    folders = [data_folder(directory, manifest.run_id) for directory in manifest.directories]
    ours = [folder for folder in folders if _is_own(folder, run_directory)]
    withdraw_manifest(run_directory)  # first, so that what a kill in between leaves is known to be dead
    for folder in ours:
        lock = RunLock(folder, needed=False)
        try:
            remove_folder(folder)
        finally:
            lock.release()
        drop_folder(folder)
    remove_records(run_directory)


def _is_own(folder: Path, run_directory: Path) -> bool:
    """Return whether the uncommitted state in `folder` is that of `run_directory`, not of a run that it is a copy of."""
    owner = owner_of(folder)
    if owner is None:
        return False
    if _same(owner[1], run_directory) or folder.resolve().is_relative_to(run_directory.resolve()):
        return True
    run = _run_in(owner[1], owner[0], folder)
    if run is _LeftoverRun.IN_DOUBT:
        raise RunDirectoryError(
            f"{run_directory}: never committed a step, and its state in {folder} was made by the run in {owner[1]}, which is "
            f"not there. If that run was moved here, remove the state with `headrace clean {run_directory} --unfinished` and "
            "resume again. If this is a copy, start another run"
        )
    return run is _LeftoverRun.DEAD


def remove_unmade(run_directory: Path) -> None:
    """Remove what a creation, or a removal, that was killed in `run_directory` left on SSDs: a new one needs the space, and its
    place here.

    Raises:
        ConfigError: a process has taken up its run just now.
        StorageError: something cannot be removed.
    """
    try:
        directories = read_manifest(run_directory, UNMADE_NAME).directories
    except RunDirectoryError:
        return  # none, or one that was cut short: folders are made after it
    for leftover in find_leftovers(directories):
        if _same(leftover.run_directory, run_directory) and not (leftover.resumable or leftover.in_doubt):
            remove_leftover(leftover)


class _LeftoverRun(Enum):
    KNOWS_IT = auto()
    IN_DOUBT = auto()
    DEAD = auto()


def _look_at(folder: Path) -> Leftover | None:
    """Return what is known of a data folder. None if it is in use, is not ours, or is too little known to call it dead."""
    owner = owner_of(folder)
    if owner is None:
        return None
    run_id, run_directory = owner
    # The folder's own lock tells of a run that was moved; the run directory's of a folder on a drive that has no locks.
    if lock_holder(folder) is not None or lock_holder(run_directory) is not None:
        return None
    data, run = folder / "data", _run_in(run_directory, run_id, folder)
    return Leftover(
        folder=folder,
        run_id=run_id,
        run_directory=run_directory,
        num_bytes=data.stat().st_size if data.exists() else 0,
        resumable=run is _LeftoverRun.KNOWS_IT,
        in_doubt=run is _LeftoverRun.IN_DOUBT,
    )


def _run_in(run_directory: Path, run_id: str, folder: Path) -> _LeftoverRun:
    """Return whether the run in `run_directory` has its state in `folder`, or surely none has. What lies in the copy of a run
    directory names the run that it was copied from, but that one knows nothing of it.
    """
    try:
        return _LeftoverRun.KNOWS_IT if _has(run_directory, MANIFEST_NAME, run_id, folder) else _LeftoverRun.IN_DOUBT
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError):
        return _LeftoverRun.IN_DOUBT
    try:
        return _LeftoverRun.DEAD if _has(run_directory, UNMADE_NAME, run_id, folder) else _LeftoverRun.IN_DOUBT
    except (OSError, ValueError, KeyError, TypeError):
        return _LeftoverRun.IN_DOUBT


def _has(run_directory: Path, name: str, run_id: str, folder: Path) -> bool:
    fields = parse_json((run_directory / name).read_text(encoding="utf-8"))
    folders = (data_folder(run_directory / text, run_id) for text in fields["directories"])
    return bool(fields["run_id"] == run_id and any(_same(folder, each) for each in folders))


def _same(one: Path, other: Path) -> bool:
    """Return whether two paths lead to one directory: through links, or because it is mounted twice."""
    try:
        return os.path.samefile(one, other)
    except OSError:
        return os.path.realpath(one) == os.path.realpath(other)


def refuse_copy(run_directory: Path, directories: Sequence[Path], run_id: str) -> None:
    """Refuse a copy of a run directory whose state was not copied along: to go on with it would take it from the original.

    Raises:
        RunDirectoryError: the folders on the SSDs are those of another run directory that is still there.
    """
    for directory in directories:
        folder = data_folder(directory, run_id)
        owner = owner_of(folder)
        if owner is None or _same(owner[1], run_directory):
            continue
        if _run_in(owner[1], run_id, folder) is _LeftoverRun.KNOWS_IT:
            raise RunDirectoryError(
                f"{run_directory}: is a copy of the run in {owner[1]}, and would change its state in {folder}. Use `headrace "
                f"resume {owner[1]}`, or rename that directory if this one is to take its place"
            )
