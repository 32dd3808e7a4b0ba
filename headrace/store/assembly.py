"""Puts a store together: makes it in fresh directories, or finds it again. All refusals happen here.

Invariant: whatever fails, nothing new is left on the drives and the locks are free again.
"""

import contextlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.files import BLOCK_BYTES, Beside, BlockFile, Patience, ThreadEngine, Volume
from headrace.files.durable import sync
from headrace.store.leftovers import refuse_copy, remove_unmade
from headrace.store.lock import LOCK_NAME, RunLock
from headrace.store.manifest import (
    MANIFEST_NAME,
    RECORD_NAMES,
    UNMADE_NAME,
    Manifest,
    announce_manifest,
    data_folder,
    read_manifest,
    remove_records,
    withdraw_manifest,
    write_manifest,
)
from headrace.store.places import Places, place_units
from headrace.store.record import CommitRecord, RecordFiles, unpack_record
from headrace.store.replacing import finish_replacing
from headrace.store.run_folders import (
    OpenFile,
    check_directories,
    drop_folder,
    hold_folders,
    make_folders,
    note_owner,
    remove_folders,
)
from headrace.terms.errors import ConfigError, RunDirectoryError
from headrace.terms.events import Sink
from headrace.terms.families import Unit
from headrace.terms.sizes import MIB, format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreParts:
    """What a `StateStore` owns. `engine` is closed with the store only if `owns_engine`."""

    run_directory: Path
    manifest: Manifest
    places: Places
    locks: Sequence[RunLock]
    volume: Volume
    records: RecordFiles
    engine: ThreadEngine
    owns_engine: bool

    def close(self) -> None:
        """Close files and engine, then free the locks. A second call does nothing."""
        self._close_files()
        for lock in self.locks:
            lock.release()

    def remove(self) -> None:
        """Close, and delete all that `create_parts` made; the run directory itself and other files in it stay.

        Raises:
            StorageError: the manifest cannot be withdrawn, and nothing was removed; or something else cannot be removed.
        """
        # Network file systems keep what is unlinked while it is open. The locks are held until the last file is gone, so that
        # nobody opens what is being removed.
        try:
            self._close_files()
            # The manifest goes first: without it nobody takes the rest for a run.
            withdraw_manifest(self.run_directory)
            remove_folders(self.manifest.directories, self.manifest.run_id)
            remove_records(self.run_directory, LOCK_NAME)
        finally:
            self.close()
            for directory in self.manifest.directories:
                drop_folder(data_folder(directory, self.manifest.run_id))

    def _close_files(self) -> None:
        if self.owns_engine:
            self.engine.close()
        self.volume.close()
        self.records.close()


@dataclass(frozen=True, slots=True)
class StoreRequest:
    """What is asked of a new store: the slots of each family of `units`, and scratch, striped over `directories` by `weights`
    (None: evenly). `identity` is kept as given (JSON). There must be space, too, for what will be written `beside` the state.
    """

    directories: Sequence[Path]
    units: Sequence[Unit]
    scratch_bytes: int
    weights: Sequence[int] | None = None
    identity: Mapping[str, Any] = field(default_factory=dict)
    beside: Beside | None = None
    allow_tmpfs: bool = False
    stripe_bytes: int = 8 * MIB


def create_parts(
    run_directory: Path, request: StoreRequest, *, open_file: OpenFile, engine: ThreadEngine | None, sink: Sink
) -> StoreParts:
    """Check everything, then make data files, record files and manifest.

    Raises:
        ConfigError, DiskFull: units or directories will not do; nothing was made.
        RunDirectoryError: the run directory holds a run, or is in use.
        StorageError: a file could not be made; what had been is removed again.
    """
    manifest, places = _manifest_of(request)
    capacity_bytes = places.durable_bytes + manifest.scratch_bytes
    file_bytes = Volume.file_bytes(capacity_bytes, manifest.weights, manifest.stripe_bytes)
    _refuse_existing(run_directory)
    remove_unmade(run_directory)
    check_directories(manifest.directories, file_bytes, beside=request.beside, allow_in_memory=request.allow_tmpfs, sink=sink)
    with contextlib.ExitStack() as undo:
        make_run_directory(run_directory, undo)
        was_there = (run_directory / LOCK_NAME).exists()
        locks = [RunLock(run_directory)]
        undo.callback(locks[0].release)
        if not was_there:
            undo.callback((run_directory / LOCK_NAME).unlink, missing_ok=True)  # a directory that was empty is so again
        _refuse_existing(run_directory)
        # First, so that after a kill it is known that this was being created.
        undo.callback(_unmake, run_directory, manifest)
        announce_manifest(run_directory, manifest)
        locks += make_folders(manifest.directories, run_directory, manifest.run_id)
        for lock in locks[1:]:
            undo.callback(lock.release)
        files: list[BlockFile] = []
        for path, num_bytes in zip(manifest.data_paths(), file_bytes, strict=True):
            files.append(open_file(path, num_bytes))
            undo.callback(files[-1].close)
            sync(path.parent)
        records: list[BlockFile] = []
        for name in RECORD_NAMES:
            path = run_directory / name
            path.unlink(missing_ok=True)  # of a creation that was cut short
            undo.callback(path.unlink, missing_ok=True)
            records.append(open_file(path, BLOCK_BYTES))
            undo.callback(records[-1].close)
        sync(run_directory)
        write_manifest(run_directory)
        undo.pop_all()
    return _put_together(run_directory, manifest, places, locks, (files, records), (engine, sink))


def open_parts(
    run_directory: Path, *, open_file: OpenFile, engine: ThreadEngine | None, sink: Sink, at: int | None = None
) -> tuple[StoreParts, CommitRecord, str]:
    """Find a store again; also return its newest commit record, and what is wrong with the one before or after it, "" for
    nothing.

    Raises:
        RunDirectoryError: no run, another format, in use, never committed, or a data file missing or too short.
    """
    finish_replacing(run_directory)
    manifest = read_manifest(run_directory)
    places = place_units(manifest.units)
    with contextlib.ExitStack() as undo:
        locks = [RunLock(run_directory)]
        undo.callback(locks[0].release)
        _check_data_files(run_directory, manifest, places)
        locks += hold_folders(manifest.directories, manifest.run_id)
        for lock in locks[1:]:
            undo.callback(lock.release)
        refuse_copy(run_directory, manifest.directories, manifest.run_id)
        files: list[BlockFile] = []
        for path in manifest.data_paths():
            files.append(open_file(path, None))
            undo.callback(files[-1].close)
        records: list[BlockFile] = []
        lost = " and ".join(filter(None, map(_loss_of, (run_directory / name for name in RECORD_NAMES))))
        for name in RECORD_NAMES:
            path = run_directory / name
            records.append(open_file(path, None if path.exists() else BLOCK_BYTES))
            undo.callback(records[-1].close)
        # A killed process may have written what no power cut spares yet. From here on it counts: older slots are overwritten.
        for file in (*files, *records):
            file.sync()
        record, is_damaged = RecordFiles(records).read(manifest.run_id, [place.num_chunks for place in places.committed], at)
        if record is None:
            if lost:
                raise RunDirectoryError(
                    f"{run_directory}: {lost}, and no whole commit record is left; restore one of these files. Else "
                    f"remove the run "
                    f"with `headrace clean {run_directory} --unfinished` and start again"
                )
            found = "only damaged commit records" if is_damaged else "no commit record"
            raise RunDirectoryError(
                f"{run_directory}: {found} in {' and '.join(RECORD_NAMES)}: no step was ever finished, or the files were "
                f"changed. Remove the run with `headrace clean {run_directory} --unfinished` and start again"
            )
        note_owner(manifest.directories, run_directory, manifest.run_id)
        undo.pop_all()
    parts = _put_together(run_directory, manifest, places, locks, (files, records), (engine, sink))
    return parts, record, lost or ("one commit record is damaged" if is_damaged else "")


def _loss_of(path: Path) -> str:
    """Return what is wrong with the file of a commit record, which has a block from its beginning on; "" for nothing."""
    if not path.exists():
        return f"{path.name} is missing"
    size = path.stat().st_size
    return f"{path.name} is cut off after {size} bytes" if size < BLOCK_BYTES else ""


def lost_commits(run_directory: Path) -> bool:
    """Return whether the run has commit records of which none is whole, so that it cannot be opened. Changes nothing.

    Raises:
        RunDirectoryError: there is no run, or its manifest is damaged.
    """
    manifest = read_manifest(run_directory)
    places = place_units(manifest.units)
    num_chunks = [place.num_chunks for place in places.committed]
    contents = []
    for name in RECORD_NAMES:
        with contextlib.suppress(FileNotFoundError):
            contents.append((run_directory / name).read_bytes())
    return not contents or (
        any(map(any, contents)) and all(unpack_record(each, manifest.run_id, num_chunks) is None for each in contents)
    )


def _manifest_of(request: StoreRequest) -> tuple[Manifest, Places]:
    places = place_units(request.units)
    weights = tuple(request.weights if request.weights is not None else [1] * len(request.directories))
    if len(weights) != len(request.directories):
        raise ConfigError(
            f"{len(request.directories)} SSD directories and {len(weights)} striping weights: give one weight each"
        )
    if not request.directories:
        raise ConfigError("no SSD directory given; name at least one")
    manifest = Manifest(
        run_id=secrets.token_hex(8),
        units=tuple(request.units),
        scratch_bytes=request.scratch_bytes,
        stripe_bytes=request.stripe_bytes,
        weights=weights,
        directories=tuple(Path(directory).resolve() for directory in request.directories),
        identity=dict(request.identity),
    )
    return manifest, places


def _refuse_existing(run_directory: Path) -> None:
    if (run_directory / MANIFEST_NAME).exists():
        raise RunDirectoryError(f"{run_directory}: holds a run already; resume it, remove it, or name another directory")
    if run_directory.exists() and not run_directory.is_dir():
        raise RunDirectoryError(f"{run_directory}: expected a directory, found a file; name another run directory")


def make_run_directory(run_directory: Path, undo: contextlib.ExitStack) -> None:
    """Make a run directory that is not there; `undo` removes it, and what was made above it, unless something lies in it.

    Raises:
        RunDirectoryError: it cannot be made.
    """
    if run_directory.exists():
        return
    for path in (*reversed(run_directory.parents), run_directory):
        if not path.exists():
            undo.callback(_remove_empty, path)
    try:
        run_directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(f"{run_directory}: cannot be made: {error.strerror}; name another run directory") from error


def _unmake(run_directory: Path, manifest: Manifest) -> None:
    """Undo a creation. The announcement goes last: as long as a folder is left, it tells that this is dead."""
    with contextlib.suppress(OSError):
        (run_directory / MANIFEST_NAME).rename(run_directory / UNMADE_NAME)
    remove_folders(manifest.directories, manifest.run_id)
    (run_directory / UNMADE_NAME).unlink(missing_ok=True)


def _remove_empty(directory: Path) -> None:
    """Remove a directory unless something lies in it, as that of another process that was quicker."""
    with contextlib.suppress(OSError):
        directory.rmdir()


def _check_data_files(run_directory: Path, manifest: Manifest, places: Places) -> None:
    capacity_bytes = places.durable_bytes + manifest.scratch_bytes
    needed = Volume.file_bytes(capacity_bytes, manifest.weights, manifest.stripe_bytes)
    for path, num_bytes in zip(manifest.data_paths(), needed, strict=True):
        if not path.is_file():
            raise RunDirectoryError(f"{run_directory}: its data file {path} is missing; mount that drive or restore the file")
        found_bytes = path.stat().st_size
        if found_bytes < num_bytes:
            raise RunDirectoryError(
                f"{run_directory}: its data file {path} has {found_bytes} bytes ({format_bytes(found_bytes)}), expected "
                f"{num_bytes} ({format_bytes(num_bytes)}); it was cut short, restore it"
            )


def _put_together(
    run_directory: Path,
    manifest: Manifest,
    places: Places,
    locks: Sequence[RunLock],
    files: tuple[list[BlockFile], list[BlockFile]],
    engine: tuple[ThreadEngine | None, Sink],
) -> StoreParts:
    given_engine, sink = engine
    used_engine = given_engine or ThreadEngine(sink=sink, patience=Patience(sink))
    return StoreParts(
        run_directory=run_directory,
        manifest=manifest,
        places=places,
        locks=tuple(locks),
        volume=Volume(files[0], manifest.weights, manifest.stripe_bytes, used_engine),
        records=RecordFiles(files[1], used_engine.patience),
        engine=used_engine,
        owns_engine=given_engine is None,
    )
