"""Paths to rows: which files are meant, what is in them, and whether every sample can be trained on.

JSON is read here line by line and never by `datasets`: each message names the line, nothing is copied to disk first, strings
that look like dates stay strings, and absent keys stay absent (Arrow would fill them in, and chat templates would see them).
Tables are read by `tables.py`. The invariant: a row that leaves `read_rows` has the columns of its kind, and none is null.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.data.tables import is_saved_dataset, open_hub, read_arrow, read_parquet, read_saved
from headrace.data.values import Kind, Row
from headrace.terms.errors import DataError

ACCEPTED = "text | messages | prompt + completion | input_ids (+ labels)"
_HUB_NAME = re.compile(r"^[\w-][\w.-]*/[\w.-]+$")


@dataclass(frozen=True, slots=True)
class Source:
    """A file or data set. `fingerprint` changes when its content does; `read` starts at the first row each time."""

    name: str
    fingerprint: str
    read: Callable[[], Iterator[Row]]


def find_sources(paths: Sequence[str], cache_dir: Path) -> list[Source]:
    """Return the sources that `paths` name, directories searched recursively in sorted order.

    A path that does not exist and looks like `owner/name` is taken as a Hub data set (split `train`), kept below `cache_dir`.

    Raises:
        DataError: a path that is nothing of that kind, or a directory without a readable file.
    """
    return [source for path in paths for source in _sources_of(path, cache_dir)]


def read_rows(source: Source) -> tuple[Kind, Iterator[Row]]:
    """Return the kind of `source`, decided by its first row, and all its rows, each checked to have that kind's columns.

    Raises:
        DataError: no rows, malformed JSON, unknown or missing columns. The checks run while the rows are read.
    """
    rows = source.read()
    first = next(rows, None)
    if first is None:
        raise DataError(f"{source.name}: holds no samples; expected at least one with the columns {ACCEPTED}")
    kind = next((kind for kind in Kind if all(first.values.get(column) is not None for column in kind.columns)), None)
    if kind is None:
        raise DataError(
            f"{first.place}: nothing to train on in the columns {_names(first.values)}; accepted are {ACCEPTED}. "
            "Rename or add the columns, every sample needs them"
        )
    return kind, _checked(first, rows, kind)


def _checked(first: Row, rows: Iterator[Row], kind: Kind) -> Iterator[Row]:
    yield first
    for row in rows:
        missing = [column for column in kind.columns if row.values.get(column) is None]
        if missing:
            raise DataError(
                f"{row.place}: {' and '.join(missing)} missing or null; the first sample ({first.place}) has "
                f"{' + '.join(kind.columns)}, this one has the columns {_names(row.values)}. Add it or remove the sample"
            )
        yield row


def _names(values: Mapping[str, Any]) -> str:
    return ", ".join(repr(name) for name, value in values.items() if value is not None) or "(none)"


def _sources_of(name: str, cache_dir: Path) -> list[Source]:
    path = Path(name)
    if path.is_file():
        return [_file_source(path)]
    if path.is_dir():
        return _directory_sources(path)
    if _HUB_NAME.match(name) and path.suffix not in _READERS:
        fingerprint, read = open_hub(name, cache_dir / "hub")
        return [Source(name, fingerprint, read)]
    raise DataError(
        f"{name}: no such file or directory; give {_suffixes()} files, directories of them, or owner/name of a Hub data set"
    )


def _directory_sources(path: Path) -> list[Source]:
    if is_saved_dataset(path):
        files = sorted(file for file in path.rglob("*") if file.is_file())
        stamp = hashlib.sha256("".join(_stamp(file) for file in files).encode()).hexdigest()
        return [Source(str(path), stamp, lambda: read_saved(path))]
    files = [file for file in sorted(path.rglob("*")) if file.is_file() and not _hidden(file.relative_to(path))]
    found = [_file_source(file) for file in files if file.suffix in _READERS]
    if not found:
        suffixes = ", ".join(sorted({file.suffix or file.name for file in files})) or "nothing"
        raise DataError(f"{path}: no {_suffixes()} file in this directory, found {suffixes}; convert the data to one of these")
    return found


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _file_source(path: Path) -> Source:
    read = _READERS.get(path.suffix)
    if read is None:
        raise DataError(f"{path}: files ending in {path.suffix or 'nothing'!r} are not read; expected {_suffixes()}")
    if not os.access(path, os.R_OK):
        raise DataError(f"{path}: this user may not read the file; change its permissions (chmod) or copy it")
    return Source(str(path), _stamp(path), lambda: read(path))


def _stamp(path: Path) -> str:
    # Size and time instead of content: reading a large file twice to save tokenising it would cost about as much as it saves.
    status = path.stat()
    return f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\n"


def _suffixes() -> str:
    return ", ".join(_READERS)


def _read_json_lines(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                place = f"{path}, line {number}"
                yield Row(place, _object(_parse(line, place, "one JSON object a line"), place))


def _read_json(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    if start and not start.startswith(b"["):
        yield from _read_json_lines(path)
        return
    values = _parse(path.read_bytes(), str(path), "an array of JSON objects") if start else []
    for index, value in enumerate(values):
        place = f"{path}, element {index}"
        yield Row(place, _object(value, place))


def _parse(text: bytes, place: str, expected: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        shown = text[:60].decode(errors="replace").strip()
        raise DataError(
            f"{place}: not JSON at {where}: {error.msg}; expected {expected}, found {shown!r}. Correct or remove it"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: not UTF-8 at byte {error.start} ({error.reason}); convert the file to UTF-8") from error
    except RecursionError as error:
        raise DataError(f"{place}: JSON nested too deeply to be read; expected {expected}") from error
    except ValueError as error:  # what Python itself will not read: a number of thousands of digits
        raise DataError(f"{place}: JSON that cannot be read ({str(error).split(';')[0]}); expected {expected}") from error


def _object(value: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise DataError(
            f'{place}: expected a JSON object such as {{"text": "..."}}, found {type(value).__name__} {str(value)[:60]!r}'
        )
    return value


_READERS: Mapping[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".json": _read_json,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
}
