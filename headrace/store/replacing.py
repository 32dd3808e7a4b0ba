"""A store takes the place of another one in a run directory: the same state, laid out otherwise.

The new store is made and committed in a directory of its own below the run's. Then a note in the run directory says that it
counts. From that note on, whoever opens the run finishes the change.

Invariant: killed at any moment, the run opens as the old store or as the new one, at the same commit. What is left of the other
is removed.
"""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

from headrace.files.durable import sync, write_whole
from headrace.files.scratch import remove_tree
from headrace.store.lock import RunLock
from headrace.store.manifest import (
    MANIFEST_NAME,
    RECORD_NAMES,
    UNMADE_NAME,
    Manifest,
    announce_manifest,
    read_manifest,
    write_manifest,
)
from headrace.store.run_folders import remove_folders
from headrace.terms.errors import RunDirectoryError, unwritten
from headrace.terms.json_text import parse_json

_NOTE_NAME = "replaced.json"
_NEW_NAME = "replacing"


def place_of_new(run_directory: Path) -> Path:
    """Return the directory in which the new store is made."""
    return run_directory / _NEW_NAME


def discard_store(directory: Path) -> str | None:
    """Remove the store in `directory`, and the directory, in whatever state a kill left it; return its id if it is known.

    Raises:
        StorageError: its data cannot be removed.
    """
    found = None
    for name in (MANIFEST_NAME, UNMADE_NAME):
        with contextlib.suppress(RunDirectoryError):
            manifest = read_manifest(directory, name)
            remove_folders(manifest.directories, manifest.run_id)
            found = manifest.run_id
    remove_tree(directory)
    return found


def replace_store(run_directory: Path, old: Manifest, old_others: Sequence[Path]) -> None:
    """Let the store in `place_of_new` take the place of the `old` one, which must be closed before `finish_replacing`.
    `old_others` are directories of stores of other ranks, which go with the old one.

    Raises:
        StorageError: it cannot be noted; the old store counts.
    """
    note = {"run_id": old.run_id, "directories": list(map(str, old.directories)), "others": list(map(str, old_others))}
    path = run_directory / _NOTE_NAME
    try:
        write_whole(path, json.dumps(note))
        sync(run_directory)
    except OSError as error:
        raise unwritten(path, error, "repeat the command: the run is as it was") from error


def finish_replacing(run_directory: Path) -> None:
    """Finish a change of stores that was noted, if there is one.

    Raises:
        RunDirectoryError: another process uses the run. StorageError: something cannot be written or removed.
    """
    path, new = run_directory / _NOTE_NAME, place_of_new(run_directory)
    if not path.exists():
        return
    with contextlib.ExitStack() as held:
        held.callback(RunLock(run_directory).release)
        note = parse_json(path.read_text(encoding="utf-8"))
        if (new / MANIFEST_NAME).exists():
            for name in RECORD_NAMES:
                with contextlib.suppress(FileNotFoundError):  # it was moved before a kill
                    (new / name).replace(run_directory / name)
            announce_manifest(run_directory, read_manifest(new))
            write_manifest(run_directory)
        remove_tree(new)
        for other in map(Path, note["others"]):
            discard_store(other / "run")
            remove_tree(other)
        remove_folders([Path(each) for each in note["directories"]], note["run_id"])
        path.unlink()
        sync(run_directory)
