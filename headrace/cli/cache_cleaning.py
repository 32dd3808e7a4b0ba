"""`headrace clean --cache`: what Headrace keeps outside runs and models, so that later commands are faster.

Invariant: only what Headrace made is removed. What a run that is not finished may need goes on request alone. What a process
works on stays.
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.files.scratch import remove_dead
from headrace.machine.jit import machine_code_files
from headrace.store.prefix_files import FOLDER, remove_prefixes
from headrace.store.weight_copy import PREFIX, remove_copy
from headrace.terms.errors import RunDirectoryError, StorageError
from headrace.terms.sizes import format_bytes


@dataclass(frozen=True)
class Places:
    """Where Headrace keeps what: its cache, the profile of the machine, itself, and directories with copies of weights."""

    cache: Path
    profile: Path
    package: Path
    directories: Sequence[Path] = ()


@dataclass(frozen=True)
class _Kind:
    """What is kept, where, who may need it (""), and how one of it is removed."""

    what: str
    where: Path
    found: tuple[Path, ...]
    needed_by: str = ""
    remove: Callable[[Path], None] = lambda path: _remove(path)


def clean_cache(places: Places, *, unfinished: bool, dry_run: bool) -> Iterator[str]:
    """Remove what is kept in `places`, and yield a line for each kind of it, then the total.

    Raises:
        StorageError: some could not be removed; it is raised after the last line.
    """
    refused: list[str] = []
    freed_bytes = 0
    verb = "would remove" if dry_run else "removed "
    for kind in _kinds(places):
        if not kind.found:
            continue
        if kind.needed_by and not unfinished:
            size = format_bytes(sum(map(_num_bytes, kind.found)))
            yield f"kept     {kind.what} in {kind.where} ({size}): {kind.needed_by} (--unfinished removes them)"
            continue
        removed_bytes = removed = 0
        for path in kind.found:
            num_bytes = _num_bytes(path)
            try:
                if not dry_run:
                    kind.remove(path)
            except RunDirectoryError as error:  # in use
                yield f"kept     {error}"
                continue
            except OSError as error:
                refused.append(f"{error.filename or path}: cannot be removed: {error.strerror}")
                yield f"kept     {path} ({format_bytes(num_bytes)}): cannot be removed"
                continue
            removed, removed_bytes = removed + 1, removed_bytes + num_bytes
        if removed:
            yield f"{verb} {kind.what} in {kind.where} ({removed}, {format_bytes(removed_bytes)})"
        freed_bytes += removed_bytes
    if not dry_run:
        remove_dead(places.cache, ".tokens-")
        for folder in (*(places.cache / name for name in ("machines", "plans", "references", "gguf")), places.cache):
            with contextlib.suppress(OSError):  # something else is in it, or it is not there
                folder.rmdir()
    yield f"{format_bytes(freed_bytes)} {'would be ' if dry_run else ''}freed of what is kept outside runs and models"
    if refused:
        raise StorageError(f"{'; '.join(refused)}; remove the cause, or clean as their owner")


def _kinds(places: Places) -> Iterator[_Kind]:
    cache = places.cache
    sets = {path.with_suffix("") for pattern in ("tokens-*", "tokenizer.*") for path in _in(cache, pattern)}
    yield _Kind("tokenised data", cache, tuple(sorted(sets)), remove=_remove_tokens)
    yield _Kind("data sets of the Hub", cache / "hub", _in(cache, "hub"))
    yield _Kind("brief measurements of this machine", cache / "machines", _in(cache / "machines", "*.json"))
    yield _Kind("answers of plan", cache / "plans", _in(cache / "plans", "*.json"))
    yield _Kind("the measured profile of this machine", places.profile.parent, _there((places.profile,)))
    yield _Kind("compiled loops", places.package, _there(machine_code_files(places.package)))
    for directory in places.directories:
        yield _Kind("beginnings of prompts", directory, _in(directory, FOLDER), remove=remove_prefixes)
        yield _Kind("copies of weights", directory, _in(directory, f"{PREFIX}*"), remove=remove_copy)
    needed = "runs of preferences that are not finished need them"
    yield _Kind("log-probabilities of references", cache / "references", _in(cache / "references", "*"), needed)
    needed = "adapters that were trained upon a GGUF file name them as their model"
    yield _Kind("configurations of GGUF files", cache / "gguf", _in(cache / "gguf", "*"), needed)


def _in(folder: Path, pattern: str) -> tuple[Path, ...]:
    return tuple(sorted(path for path in folder.glob(pattern) if not path.name.startswith(".")))


def _there(paths: Iterable[Path]) -> tuple[Path, ...]:
    return tuple(sorted(path for path in paths if path.exists()))


def _num_bytes(path: Path) -> int:
    """Return the bytes of a file, or of all files in a directory; links count as nothing."""
    if path.is_symlink():
        return 0
    if not path.is_dir():
        return path.stat().st_size if path.exists() else 0
    return sum(each.lstat().st_size for each in path.rglob("*") if each.is_file() and not each.is_symlink())


def _remove(path: Path) -> None:
    """Remove a file, a directory, or a link and not what it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _remove_tokens(directory: Path) -> None:
    """Remove a set of tokens with its lock, and what a killed process left beside it.

    Raises:
        RunDirectoryError: a process makes it just now. Who reads one has it open, and goes on.
    """
    lock = directory.with_suffix(".lock")
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise RunDirectoryError(f"{directory}: a process works on it; clean when it is done") from error
    else:
        _remove(directory)
        _remove(directory.with_suffix(".partial"))
        lock.unlink()
    finally:
        os.close(descriptor)
