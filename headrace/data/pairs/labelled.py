"""Rows of completions that are desirable or not, with TRL's columns. Each becomes two: it, and its prompt with another's.

As in TRL, completions move on by one within a step's share of the data, so each of them occurs in both roles.
Invariant: both rows are in the data, one after the other, or neither is.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice

from headrace.data.pairs.pairs import read_pairs
from headrace.data.read.sources import Source, read_with
from headrace.data.values.values import Encoded, Kind, Row, Unmarked
from headrace.terms.errors import DataError, shortened
from headrace.terms.options.preferences import PAIR, Preferences

_PAIRS_AT_ONCE = 1000


def read_labelled(source: Source) -> tuple[Kind, Iterator[Row]]:
    """Return the rows of `source`. Of pairs, what was chosen is desirable, and what was rejected is not.

    Raises:
        DataError: there are no rows, or a row lacks a column or has no label; rows are checked while they are read.
    """
    if all(next(source.read(), Row("", {})).values.get(column) is not None for column in PAIR):
        kind, rows = read_pairs(source)
        return kind, _one_by_one(rows)
    return Kind.COMPLETION, (replace(row, desirable=_label(row)) for row in read_with(source, Preferences.LABELS))


def _one_by_one(rows: Iterator[Row]) -> Iterator[Row]:
    """Yield some chosen rows, then their rejected ones, so that no neighbours have one prompt."""
    while some := list(islice(rows, 2 * _PAIRS_AT_ONCE)):
        yield from (replace(row, desirable=number == 0) for number in (0, 1) for row in some[number::2])


def _label(row: Row) -> bool:
    found = row.values["label"]
    if found not in (0, 1):
        raise DataError(f"{row.place}: label must be true or false, found {shortened(repr(found), 60)}. Correct the sample")
    return bool(found)


def with_others(samples: Iterable[Encoded | Unmarked], most_tokens: int, count: int) -> Iterator[Encoded | Unmarked]:
    """Yield each sample, then its prompt with the completion before it; the first of `count` gets that of the last one.

    Left out are samples without a prompt, or without a completion that fits into `most_tokens`.
    """
    group: list[Encoded] = []
    for sample in samples:
        if isinstance(sample, Unmarked):
            yield from (sample, sample)
        elif sample.trained[0] or not any(sample.trained[:most_tokens]):
            yield from [replace(sample, trained=[False] * len(sample.ids))] * 2
        else:
            group.append(sample)
        if len(group) == count:
            yield from _mixed(group)
            group = []
    yield from _mixed(group)


def _mixed(group: list[Encoded]) -> Iterator[Encoded]:
    for sample, other in zip(group, [*group[-1:], *group[:-1]], strict=True):
        start, from_there = sample.trained.index(True), other.trained.index(True)
        ids, trained = sample.ids[:start] + other.ids[from_there:], sample.trained[:start] + other.trained[from_there:]
        yield sample
        yield Encoded(ids, trained, other.beyond, desirable=sample.desirable)
