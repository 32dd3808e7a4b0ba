"""CSV files: a header, then rows of texts. Where a function of the user's gets all columns, numbers and truths are values.

Invariant: the texts that are trained or tokenised stay as they stand in the file; only columns beside them get types.
"""

import csv
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from headrace.data.chat.columns import Columns
from headrace.data.read.packed_files import unpacked
from headrace.data.values.values import Row
from headrace.terms.errors import DataError
from headrace.terms.options.preferences import Preferences

_TRUTHS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
# How people and programs write labels; pandas writes 1.0 where another row has none.
_LABELS = {"1": True, "1.0": True, "true": True, "yes": True, "0": False, "0.0": False, "false": False, "no": False}
# What a whole column may be, as `datasets` reads it, the first that fits; an empty field is None.
_KINDS: tuple[tuple[Callable[[str], Any], Callable[[str], object]], ...] = (
    (int, re.compile(r"[+-]?[0-9]+").fullmatch),
    (float, re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?").fullmatch),
    (_TRUTHS.__getitem__, _TRUTHS.__contains__),
    (str, lambda _: True),
)


def read_csv(path: Path, columns: Columns, skip: int) -> Iterator[Row]:
    """Yield the rows of a file after the first `skip`. With every column, the file is read twice: first for their types.

    Raises:
        DataError: it is not CSV, or a row has another number of fields than the header.
    """
    if not columns.every:
        yield from map(partial(_with_truths, columns=columns), _rows(path, columns, skip))
        return
    texts, kinds = set[str](), dict[str, int]()
    for row in _rows(path, columns, 0):
        texts = texts or {theirs for theirs, ours in columns.ours(row.values).items() if ours in Preferences.PROMPTS.columns}
        for name, text in row.values.items():
            kind = kinds.get(name, 0)
            while text and not _KINDS[kind][1](text):
                kind += 1
            kinds[name] = kind
    for row in _rows(path, columns, skip):
        typed = {name: _KINDS[kinds[name]][0](text) if text else None for name, text in row.values.items() if name not in texts}
        yield Row(row.place, {**row.values, **typed})


def _with_truths(row: Row, columns: Columns) -> Row:
    """Return `row` with labels as true or false; what is neither stays a text."""
    names = [theirs for theirs, ours in columns.ours(row.values).items() if ours in Preferences.LABELS.value.truths]
    found = {name: _LABELS.get(text.strip().lower(), text) for name in names if (text := row.values[name])}
    return replace(row, values={**row.values, **found}) if found else row


def _rows(path: Path, columns: Columns, skip: int) -> Iterator[Row]:
    with unpacked(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        csv.field_size_limit(max(csv.field_size_limit(), columns.most_bytes))
        rows = csv.DictReader(text, strict=True)
        try:
            for row in islice(rows, skip, None):
                place = f"{path}, line {rows.line_num}"
                if None in row or None in row.values():
                    raise DataError(f"{place}: has another number of fields than the header; quote fields that have commas")
                yield Row(place, row)
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"{path}, line {rows.line_num + 1}: not CSV in UTF-8 ({error}); correct or convert it") from error
