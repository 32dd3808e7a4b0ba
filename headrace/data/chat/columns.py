"""Columns under other names: what the data calls `conversation` is read as `messages`, if an entry of `data` says so.

Invariant: only names change. A column of ours that another one stands for is not read under its own name.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from headrace.data.values.values import Row
from headrace.terms.errors import DataError, shortened


def our_names(names: Iterable[str], columns: Mapping[str, str]) -> dict[str, str]:
    """Return our name for each of the data's `names`, without those that others stand for. `columns` has theirs by ours."""
    of_theirs = {theirs: ours for ours, theirs in columns.items()}
    return {name: of_theirs.get(name, name) for name in names if name in of_theirs or name not in columns}


def refuse_missing(place: str, names: Iterable[str], columns: Mapping[str, str]) -> None:
    """Refuse `columns` of which one is not among the data's `names`.

    Raises:
        DataError: one is missing.
    """
    found = list(names)
    missing = next((theirs for theirs in columns.values() if theirs not in found), None)
    if missing is not None:
        has = shortened(", ".join(map(repr, found))) or "(none)"
        raise DataError(f"{place}: columns names {missing!r}, the data has {has}; correct columns")


def with_our_names(rows: Iterable[Row], columns: Mapping[str, str]) -> Iterator[Row]:
    """Yield `rows` of JSON under our names. The first one must have all `columns`.

    Raises:
        DataError: it has not.
    """
    for index, row in enumerate(rows):
        if index == 0:
            refuse_missing(row.place, row.values, columns)
        ours = our_names(row.values, columns)
        yield replace(row, values={ours[name]: value for name, value in row.values.items() if name in ours})
