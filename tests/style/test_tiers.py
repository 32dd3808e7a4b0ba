"""What `make test` leaves to `make deep`: never a pair of values, and no case is lost to both."""

import itertools

from tiers import covering_rows, pairwise, sampled


def test_every_two_values_of_two_axes_meet_in_few_rows() -> None:
    sizes = (2, 3, 4, 2, 3)
    rows = covering_rows(sizes)
    for (first, one), (second, other) in itertools.combinations(enumerate(sizes), 2):
        assert {(row[first], row[second]) for row in rows} == set(itertools.product(range(one), range(other)))
    assert 12 <= len(rows) <= 16  # of 144; as many as the two longest axes have pairs is the least


def test_what_is_not_tried_at_once_is_deep() -> None:
    rows = pairwise(colour=("red", "green"), size=(1, 2, 3), shape=("round", "square")).args[1]
    assert {row.values for row in rows} == set(itertools.product(("red", "green"), (1, 2, 3), ("round", "square")))
    assert sum(not row.marks for row in rows) == 6
    assert {mark.name for row in rows for mark in row.marks} == {"deep"}
    first, second = sampled(["a", "b"], ["a"])
    assert (first.values, first.marks, second.values, [mark.name for mark in second.marks]) == (("a",), [], ("b",), ["deep"])
    assert [row.values for row in sampled([(1, 2), (3, 4)], [(1, 2)])] == [(1, 2), (3, 4)]
