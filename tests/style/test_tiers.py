"""What `make test` leaves to `make test-wide` and `make deep`: never a value or a pair of them, and no case is lost to all."""

import itertools
from collections import Counter
from collections.abc import Collection

import pytest
from tiers import covering_rows, pairwise, sampled


@pytest.mark.parametrize(("together", "least", "most"), [(1, 4, 4), (2, 12, 16)])
def test_all_values_of_some_axes_meet_in_few_rows(together: int, least: int, most: int) -> None:
    """As many as the longest axes have values together is the least; all rows are 144."""
    sizes = (2, 3, 4, 2, 3)
    rows = covering_rows(itertools.product(*map(range, sizes)), together)
    for axes in itertools.combinations(range(len(sizes)), together):
        found = {tuple(row[axis] for axis in axes) for row in rows}
        assert found == set(itertools.product(*(range(sizes[axis]) for axis in axes)))
    assert least <= len(rows) <= most


def test_what_is_not_tried_at_once_is_wide_or_deep() -> None:
    rows = pairwise(colour=("red", "green"), size=(1, 2, 3), shape=("round", "square")).args[1]
    assert {row.values for row in rows} == set(itertools.product(("red", "green"), (1, 2, 3), ("round", "square")))
    assert marked([row.marks for row in rows]) == {"": 3, "wide": 3, "deep": 6}


def test_one_of_a_sample_is_tried_at_once() -> None:
    parameters = sampled(["a", "b", "c"], ["c", "b"])
    assert [row.values for row in parameters] == [("a",), ("b",), ("c",)]
    assert [[mark.name for mark in row.marks] for row in parameters] == [["deep"], [], ["wide"]]
    assert [row.values for row in sampled([(1, 2), (3, 4)], [(1, 2)])] == [(1, 2), (3, 4)]
    assert marked([row.marks for row in sampled(range(5))]) == {"": 1, "wide": 4}


def marked(marks: list[Collection[pytest.Mark]]) -> Counter[str]:
    return Counter("".join(mark.name for mark in each) for each in marks)
