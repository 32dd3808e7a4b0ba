"""Which cases of a promise `make test` tries: one of them. A few more are marked `wide`, for `make test-wide`; all others are
marked `deep`, for `make deep`.

Most mistakes show with one value, or with two together. Of a product `pairwise` has each value in `make test`, and every two
values of two axes in `make test-wide`.
"""

import itertools
from collections.abc import Container, Iterable, Sequence
from typing import Any

import pytest


def sampled(cases: Iterable[Any], few: Container[Any] | None = None) -> list[Any]:
    """Return all cases as parameters, a tuple as several: the first of the `few` is tried at once, their others are wide.

    Where no few are named, all are: none is deep then.
    """
    parameters, found = list[Any](), False
    for case in cases:
        common = few is None or case in few
        marks = [] if common and not found else pytest.mark.wide if common else pytest.mark.deep
        found = found or common
        parameters.append(pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks))
    return parameters


def pairwise(**axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrise a test with a product: rows that bring a value in are tried at once, those that bring a pair in are wide."""
    every = list(itertools.product(*(range(len(values)) for values in axes.values())))
    few = covering_rows(every, 2)
    once = covering_rows(sorted(few), 1)
    rows = []
    for places in every:
        row = [values[place] for values, place in zip(axes.values(), places, strict=True)]
        marks = [] if places in once else pytest.mark.wide if places in few else pytest.mark.deep
        rows.append(pytest.param(*row, marks=marks))
    return pytest.mark.parametrize(tuple(axes), rows)


def covering_rows(rows: Iterable[tuple[int, ...]], together: int) -> set[tuple[int, ...]]:
    """Return few of the rows, in which values of so many axes meet as in all: each time the one with most that is missing."""
    met = {row: set(itertools.combinations(enumerate(row), together)) for row in rows}
    missing, chosen = set().union(*met.values()), set()
    while missing:
        best = max(met, key=lambda row: len(met[row] & missing))
        chosen.add(best)
        missing -= met[best]
    return chosen
