"""Paths to rows: which files are meant, what is in them, and whether every sample can be trained on.

JSON is read here, line by line or array element by element, and never by `datasets`. So each message names the place, and
nothing is copied to disk first. Strings that look like dates stay strings. Absent keys stay absent; Arrow would fill them in,
and chat templates would see them. Tables are read by `tables.py`. The invariant: a row that leaves `read_rows` has the columns
of its kind, and none is null.
"""

import hashlib
import json
import os
import re
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from typing import IO, Any, Protocol

from headrace.data.chat.columns import Columns
from headrace.data.chat.forms import FORMS, RowForm
from headrace.data.read.csv_files import read_csv
from headrace.data.read.json_array import elements
from headrace.data.read.long_lines import cut_strings
from headrace.data.read.packed_files import PACKED, form_of, unpacked
from headrace.data.read.splits import files_of_split
from headrace.data.read.tables import (
    is_saved_dataset,
    open_hub,
    open_streamed,
    read_arrow,
    read_parquet,
    read_saved,
    refuse_no_answer,
)
from headrace.data.values.values import Kind, Row
from headrace.terms.errors import DataError, shortened
from headrace.terms.options.data_source import DEFAULT_SPLIT, OF_PROGRAM, DataSource, source_of
from headrace.terms.options.preferences import PAIR, Preferences

ACCEPTED = (
    "text | messages | prompt + completion | input_ids (+ labels) | conversations (ShareGPT) | instruction + output (Alpaca)"
)
# No vocabulary has tokens that are longer than so many bytes on the average of a whole text.
_LEAST_STRING_BYTES, _BYTES_PER_TOKEN = 4 << 20, 64
_PIECE_BYTES = 1 << 20
_HUB_NAME = re.compile(r"^[\w-][\w.-]*/[\w.-]+$")


class ReadsRows(Protocol):
    """What reads the rows of a source."""

    def __call__(self, skip: int = 0) -> Iterator[Row]:
        """Yield the rows after the first `skip`."""


@dataclass(frozen=True, slots=True)
class Source:
    """A file or data set. `fingerprint` changes when its content does; `read` starts at the first row each time, or after so
    many rows. `entry` is the number of the entry of `data` that it belongs to. Of a part of a source, `first` is the whole's
    first row, which decides what the rows are read as.
    """

    name: str
    fingerprint: str
    read: ReadsRows
    entry: int = 0
    first: Row | None = None

    def opened(self) -> tuple[Row | None, Iterator[Row]]:
        """Return the row that decides what rows are read as, and all rows; None if there are none."""
        rows = self.read()
        first = next(rows, None)
        return (first, rows) if first is None else (self.first or first, chain((first,), rows))


def find_sources(
    paths: Sequence[str | DataSource], cache_dir: Path, most_tokens: int = 0, *, every: bool = False
) -> list[Source]:
    """Return the sources that `paths` name, directories searched recursively in sorted order.

    A path that does not exist and looks like `owner/name` is taken as a Hub data set, kept below `cache_dir`.
    In lines of JSON, only the beginning of a string is read if it is far longer than `most_tokens` tokens. With `every` column
    (see `Columns`) all strings are whole.

    Raises:
        DataError: a path is none of these, or a directory has no readable file.
    """
    most_bytes = sys.maxsize if every else max(_LEAST_STRING_BYTES, _BYTES_PER_TOKEN * most_tokens)
    entries = enumerate(map(source_of, paths))
    return [
        replace(source, entry=number)
        for number, entry in entries
        for source in _sources_of(entry, Columns(entry.columns, every, most_bytes), cache_dir)
    ]


def refuse_unread(entry: str | DataSource) -> None:
    """Refuse a path that no source comes from, without reading it or asking the Hub.

    Raises:
        DataError: there is no such path, it is a file of a kind that is not read, or a file is asked for a split.
    """
    entry = source_of(entry)
    name, path = entry.path, Path(entry.path)
    if name.startswith(OF_PROGRAM):
        raise DataError(
            f"{name}: a program gave these data to HeadraceTrainer; run it again, with train(resume_from_checkpoint=True)"
        )
    if path.is_file():
        _reader_of(path)
        if entry.names_part:
            raise DataError(f"{name}: name and split are for data sets; a file has none: leave them out")
    elif not path.is_dir() and not _names_hub(name):
        raise DataError(
            f"{name}: no such file or directory; give {_suffixes()} files, directories of them, or owner/name of a Hub data set"
        )


def refuse_unreachable(entry: str | DataSource, cache_dir: Path) -> None:
    """Refuse a data set of the Hub that is not below `cache_dir`, if the Hub does not answer.

    Raises:
        DataError: it does not.
    """
    name = source_of(entry).path
    if not Path(name).exists() and _names_hub(name):
        refuse_no_answer(name, cache_dir / "hub")


def read_rows(source: Source) -> tuple[Kind, Iterator[Row]]:
    """Return the kind of `source`, decided by its first row, and all its rows, each checked to have that kind's columns. Rows
    of other forms (`data/chat/forms.py`) are renamed.

    Raises:
        DataError: there are no rows, JSON is malformed, columns are unknown or missing. Rows are checked while they are read.
    """
    first, rows = source.opened()
    if first is None:
        raise DataError(f"{source.name}: holds no samples; expected at least one with the columns {ACCEPTED}")
    kind = next((kind for kind in Kind if _has(first, kind.columns)), None)
    if kind is not None:
        return kind, map(partial(_noting_others, used=kind.columns), _checked(first, rows, kind.columns))
    form = next((form for form in FORMS if _has(first, form.columns)), None)
    if form is None:
        advice = "Rename or add the columns, every sample needs them"
        if _has(first, PAIR):
            advice = "Preferences are trained with --loss, as dpo"
        found = _names(first.values)
        raise DataError(f"{first.place}: nothing to train on in the columns {found}; accepted are {ACCEPTED}. {advice}")
    noted = map(partial(_noting_others, used=form.columns), _checked(first, rows, form.columns))
    return Kind.CHAT, map(partial(_renamed, form=form), noted)


def read_with(source: Source, taken: Preferences) -> Iterator[Row]:
    """Return the rows of `source`, each checked to have the columns that a loss takes.

    Raises:
        DataError: there are no rows, or the first has not the columns.
    """
    columns, expected = taken.columns, taken.value.expected
    first, rows = source.opened()
    if first is None:
        raise DataError(f"{source.name}: holds no samples; {expected}")
    if not _has(first, columns):
        raise DataError(f"{first.place}: found the columns {_names(first.values)}; {expected}. Rename or add them")
    return _checked(first, rows, columns)


def _has(row: Row, columns: Sequence[str]) -> bool:
    return all(row.values.get(column) is not None for column in columns)


def _noting_others(row: Row, *, used: tuple[str, ...]) -> Row:
    others = [each.columns for each in (*Kind, *FORMS) if each.columns != used and _has(row, each.columns)]
    if not others:
        return row
    words = " and ".join(map(" + ".join, others))
    return replace(row, remarks=(*row.remarks, f"{' + '.join(used)} is used, {words} beside it is not"))


def _renamed(row: Row, *, form: RowForm) -> Row:
    renamed = form.renamed(row)
    return replace(renamed, remarks=(*row.remarks, f"{' + '.join(form.columns)} ({form.name}) is read as messages"))


def _checked(first: Row, rows: Iterator[Row], columns: Sequence[str]) -> Iterator[Row]:
    for row in rows:
        missing = [column for column in columns if row.values.get(column) is None]
        if missing:
            raise DataError(
                f"{row.place}: {' and '.join(missing)} missing or null; the first sample ({first.place}) has "
                f"{' + '.join(columns)}, this one has the columns {_names(row.values)}. Add it or remove the sample"
            )
        yield row


def _names(values: Mapping[str, Any]) -> str:
    return shortened(", ".join(repr(name) for name, value in values.items() if value is not None)) or "(none)"


def _sources_of(entry: DataSource, columns: Columns, cache_dir: Path) -> list[Source]:
    refuse_unread(entry)
    path = Path(entry.path)
    if path.is_file():
        found = [_file_source(path, columns)]
    elif path.is_dir():
        found = _directory_sources(path, columns, entry)
    else:
        fingerprint, rows = open_streamed(entry, columns) if entry.streaming else open_hub(entry, columns, cache_dir / "hub")
        found = [Source(entry.path, fingerprint, rows_after(rows))]
    renamed = json.dumps(dict(entry.columns), sort_keys=True) if entry.columns else ""
    return [replace(source, fingerprint=source.fingerprint + renamed) for source in found]


def _names_hub(name: str) -> bool:
    return bool(_HUB_NAME.match(name)) and form_of(Path(name)) not in _READERS


def _directory_sources(path: Path, columns: Columns, entry: DataSource) -> list[Source]:
    if is_saved_dataset(path):
        files = sorted(file for file in path.rglob("*") if file.is_file())
        stamp = hashlib.sha256("".join(_stamp(file) for file in files).encode()).hexdigest()
        split = "" if entry.split == DEFAULT_SPLIT else f"{entry.split}\n"
        return [Source(str(path), stamp + split, rows_after(lambda: read_saved(path, entry, columns)))]
    files = [file for file in sorted(path.rglob("*")) if file.is_file() and not _hidden(file.relative_to(path))]
    found = [file for file in files if _is_read(file)]
    if not found:
        suffixes = ", ".join(sorted({file.suffix or file.name for file in files})) or "nothing"
        raise DataError(f"{path}: no {_suffixes()} file in this directory, found {suffixes}; convert the data to one of these")
    return [_file_source(file, columns) for file in files_of_split(path, found, entry)]


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _file_source(path: Path, columns: Columns) -> Source:
    read = _reader_of(path)
    return Source(str(path), _stamp(path), lambda skip=0: read(path, columns, skip))


def rows_after(read: Callable[[], Iterator[Row]]) -> ReadsRows:
    """Return what reads rows, or those after some of them, by reading past these."""
    return lambda skip=0: islice(read(), skip, None)


def _is_read(path: Path) -> bool:
    return form_of(path) in _READERS and (path.suffix not in PACKED or form_of(path) not in _TABLES)


def _reader_of(path: Path) -> "_Reader":
    if not _is_read(path):
        raise DataError(f"{path}: files ending in {path.suffix or 'nothing'!r} are not read; expected {_suffixes()}")
    read = _READERS[form_of(path)]
    if not os.access(path, os.R_OK):
        raise DataError(f"{path}: this user may not read the file; change its permissions (chmod) or copy it")
    return read


def _stamp(path: Path) -> str:
    # Size and time instead of content: reading a large file once more would cost about as much as not tokenising it saves.
    status = path.stat()
    return f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\n"


def _suffixes() -> str:
    return f"{', '.join(_READERS)}, or the texts among these packed as {' or '.join(PACKED)}"


def _read_json_lines(path: Path, columns: Columns, skip: int) -> Iterator[Row]:
    string_bytes = columns.most_bytes
    with unpacked(path) as file:
        for number in count(1):
            line, unread_bytes = file.readline(string_bytes), 0
            place = f"{path}, line {number}"
            if not line:
                return
            if skip:
                skip -= bool(line.strip())
                deque(_rest_of_line(file, line), maxlen=0)
                continue
            if len(line) == string_bytes and not line.endswith(b"\n"):
                try:
                    line, unread_bytes = cut_strings(_rest_of_line(file, line), string_bytes)
                except ValueError as error:
                    raise DataError(f"{place}: {error}") from error
            if line.strip():
                remarks: list[str] = []
                value = _object(_parse(line, place, "one JSON object a line", remarks), place)
                yield Row(place, value, tuple(remarks), unread_bytes / len(line))


def _rest_of_line(file: IO[bytes], start: bytes) -> Iterator[bytes]:
    piece = start
    while piece:
        yield piece
        piece = b"" if piece.endswith(b"\n") else file.readline(_PIECE_BYTES)


def _read_json(path: Path, columns: Columns, skip: int) -> Iterator[Row]:
    with unpacked(path) as file:
        start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
        if not start:
            return
        if not start.startswith(b"["):
            yield from _read_json_lines(path, columns, skip)
            return
        file.seek(0)
        pieces = iter(partial(file.read, _PIECE_BYTES), b"")
        for index, element in islice(enumerate(elements(str(path), pieces, columns.most_bytes)), skip, None):
            place = f"{path}, element {index}"
            remarks: list[str] = []
            value = _parse(element.text, place, "an array of JSON objects", remarks, element.line - 1)
            yield Row(place, _object(value, place), tuple(remarks), element.left_out / len(element.text))


def _parse(text: bytes, place: str, expected: str, remarks: list[str], lines_before: int = 0) -> Any:
    """Return the value in `text`. Keys that an object has twice go to `remarks`. `lines_before` lines precede it."""

    def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            twice = sorted(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
            remarks.append(f"{', '.join(map(repr, twice))} stands there twice; the last one is used")
        return made

    try:
        return json.loads(text, object_pairs_hook=object_of)
    except json.JSONDecodeError as error:
        line = lines_before + error.lineno
        where = f"line {line}, column {error.colno}" if line > 1 else f"column {error.colno}"
        shown = text[:60].decode(errors="replace").strip()
        raise DataError(
            f"{place}: not JSON at {where}: {error.msg}; expected {expected}, found {shown!r}. Correct or remove it"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: not UTF-8 at byte {error.start} ({error.reason}); convert the file to UTF-8") from error
    except RecursionError as error:
        raise DataError(f"{place}: JSON nested too deeply to be read; expected {expected}") from error
    except ValueError as error:  # Python itself refuses it: a number of thousands of digits
        raise DataError(f"{place}: JSON that cannot be read ({str(error).split(';')[0]}); expected {expected}") from error


def _object(value: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise DataError(
            f'{place}: expected a JSON object such as {{"text": "..."}}, found {type(value).__name__} {str(value)[:60]!r}'
        )
    return value


_Reader = Callable[[Path, Columns, int], Iterator[Row]]


def _renaming(read: _Reader) -> _Reader:
    """Return a reader of texts that gives columns our names."""
    return lambda path, columns, skip: (
        columns.renamed(read(path, columns, skip)) if columns.theirs else read(path, columns, skip)
    )


_TABLES: Mapping[str, _Reader] = {
    ".parquet": read_parquet,
    ".arrow": lambda path, columns, skip: islice(read_arrow(path, columns), skip, None),
}
_READERS: Mapping[str, _Reader] = {
    ".jsonl": _renaming(_read_json_lines),
    ".ndjson": _renaming(_read_json_lines),
    ".json": _renaming(_read_json),
    ".csv": _renaming(read_csv),
    **_TABLES,
}
