"""Work that can be killed at any time, in a folder beside its result: what was asked for, and what is done of it.

    record.json   the `identity`, which decides the bits of the result; and what was decided as the work began
    done.jsonl    a line for each item that is done, durable before the next one is counted
    lock          held by the process that works

Invariant: work goes on only by what would write the same bytes, and no item is done twice.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from headrace.files.durable import write_whole
from headrace.store.lock import RunLock
from headrace.terms.errors import RunDirectoryError, in_one_line, unwritten
from headrace.terms.json_text import parse_json

RECORD, DONE = "record.json", "done.jsonl"
_ERRORS = (OSError, ValueError, KeyError, TypeError)


@contextmanager
def held(folder: Path, useless: tuple[type[BaseException], ...] = (), *, lock_needed: bool = False) -> Iterator[None]:
    """Make and hold the folder of some work. It is removed at the end, after a `useless` error, and where nothing has begun.
    One that was there without a record may hold something of its owner's: the end alone removes it.

    Raises:
        RunDirectoryError: another process holds it; or, where a lock is needed, its drive has none.
        StorageError: it cannot be made.
    """
    ours = not folder.exists() or (folder / RECORD).exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritten(folder, error, "give the same command again") from error
    lock = RunLock(folder, needed=lock_needed)
    removed = False
    try:
        yield
        removed = True
    except useless:
        removed = ours
        raise
    finally:
        lock.release()
        if removed or (ours and not (folder / RECORD).exists()):
            shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class Work:
    """The work in `folder`: its `record`, and whether it `has_begun`."""

    folder: Path
    record: dict[str, Any]
    has_begun: bool

    @classmethod
    def open(cls, folder: Path, identity: Mapping[str, Any], defaults: Mapping[str, Any] = MappingProxyType({})) -> "Work":
        """Return the work in `folder`. A record without one of the `defaults` stands for that. Nothing is written.

        Raises:
            RunDirectoryError: the work was begun otherwise, or by another version; or its record is damaged or lost.
        """
        path, done = folder / RECORD, folder / DONE
        if not path.exists():
            if done.exists() and done.stat().st_size:
                raise RunDirectoryError(
                    f"{done}: has items of unfinished work, and no {RECORD} says of which; an earlier version left them: go on "
                    f"with that, or remove {folder} to begin anew"
                )
            return cls(folder, {"identity": dict(identity)}, has_begun=False)
        try:
            record = parse_json(path.read_text(encoding="utf-8"))
            begun = {**defaults, **record["identity"]}
        except _ERRORS as error:
            raise _damaged(path, error) from error
        if begun.get("form") != identity.get("form"):
            raise RunDirectoryError(
                f"{folder}: was begun by another version, which writes other bytes: go on with that version, or remove the "
                "directory to begin anew"
            )
        for name, value in identity.items():
            if begun.get(name) != value:
                raise RunDirectoryError(
                    f"{folder}: was begun with {name} {begun.get(name)}, asked for is {value}; give the same again to "
                    "resume, or remove the directory to start again"
                )
        return cls(folder, record, has_begun=True)

    def begin(self) -> None:
        """Write the record, whole or not at all, unless it is there."""
        if not self.has_begun:
            (self.folder / DONE).touch()
            write_whole(self.folder / RECORD, json.dumps(self.record) + "\n")

    def add(self, item: Mapping[str, Any]) -> None:
        """Note that an item is done, durably. Threads take turns."""
        with (self.folder / DONE).open("ab") as file:
            file.write(json.dumps(item, ensure_ascii=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def done(self) -> Iterator[dict[str, Any]]:
        """Yield the items that are done, in their order; a last line that a kill has torn is cut off.

        Raises:
            RunDirectoryError: another line is damaged.
        """
        path, whole = self.folder / DONE, 0
        content = path.read_bytes() if path.exists() else b""
        for line in content.split(b"\n")[:-1]:
            try:
                item = json.loads(line)
            except ValueError as error:
                if whole + len(line) < content.rfind(b"\n"):
                    raise _damaged(path, error) from error
                break
            whole += len(line) + 1
            yield item
        if whole < len(content):
            os.truncate(path, whole)


def _damaged(path: Path, error: Exception) -> RunDirectoryError:
    return RunDirectoryError(f"{path}: is damaged ({in_one_line(error)}); remove {path.parent} and begin again")


def day_begun(folder: Path) -> str | None:
    """Return the day for chat templates on which the work in `folder` was begun; None where it has none, or has not begun."""
    try:
        found = parse_json((folder / RECORD).read_text(encoding="utf-8"))["identity"]["template_date"]
    except _ERRORS:  # not begun; or damaged, which is said where all of it is read
        return None
    return found if isinstance(found, str) else None
