"""Which cases of a promise `make test` tries; the others are marked `deep` and left to `make deep`.

Most mistakes show with one value, or with two together: `pairwise` keeps enough of a product for every two values of two axes
to meet.
"""

import itertools
from collections.abc import Container, Iterable, Sequence
from typing import Any

import pytest


def sampled(cases: Iterable[Any], quick: Container[Any]) -> list[Any]:
    """Return all cases as parameters, a tuple as several; those that are not among `quick` are deep."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=[] if case in quick else pytest.mark.deep)
        for case in cases
    ]


def pairwise(**axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrise a test with the product of the axes; what a covering array of pairs does not need is deep."""
    quick = covering_rows([len(values) for values in axes.values()])
    rows = []
    for places in itertools.product(*(range(len(values)) for values in axes.values())):
        row = [values[place] for values, place in zip(axes.values(), places, strict=True)]
        rows.append(pytest.param(*row, marks=[] if places in quick else pytest.mark.deep))
    return pytest.mark.parametrize(tuple(axes), rows)


def covering_rows(sizes: Sequence[int]) -> set[tuple[int, ...]]:
    """Return few rows of a product, in which every two places of two axes meet: each time the one with most that is missing."""
    pairs = {row: set(itertools.combinations(enumerate(row), 2)) for row in itertools.product(*(range(size) for size in sizes))}
    missing, chosen = set().union(*pairs.values()), set()
    while missing:
        best = max(pairs, key=lambda row: len(pairs[row] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return chosen
