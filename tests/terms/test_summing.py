"""The tree of micro-batches: whoever adds branches of it adds the same pairs in the same order."""

from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headrace.terms.summing import (
    SEQUENTIAL,
    TREE,
    Order,
    branches_before,
    merges_after,
    order_of,
    partial_sums,
    place_of,
    shares_of,
)


def tree(leaves: list[Any]) -> Any:
    """The definition: the largest power of two below the number of leaves, and the rest."""
    if len(leaves) == 1:
        return leaves[0]
    half = 1
    while half * 2 < len(leaves):
        half *= 2
    return (tree(leaves[:half]), tree(leaves[half:]))


def stacked(leaves: list[Any]) -> tuple[Any, int]:
    """Return the sum of leaves that come one after the other, and how many partial sums there were."""
    stack: dict[int, Any] = {}
    for number, leaf in enumerate(leaves):
        top = place_of(number)
        stack[top] = leaf
        for _ in range(merges_after(number, len(leaves))):
            stack[top - 1] = (stack[top - 1], stack.pop(top))
            top -= 1
    assert stack.keys() == {0}
    return stack[0], partial_sums(len(leaves), TREE)


def added(order: Order, sums: list[Any]) -> Any:
    return sums[order - 1] if isinstance(order, int) else (added(order[0], sums), added(order[1], sums))


@given(st.integers(1, 70), st.integers(1, 9))
def test_any_number_of_workers_adds_the_same_pairs(num_micro: int, workers: int) -> None:
    workers = min(workers, num_micro)
    leaves, shares = list(range(num_micro)), shares_of(num_micro, workers, TREE)
    assert [leaf for share in shares for leaf in share] == leaves
    assert all(shares)
    sums = [stacked([leaves[leaf] for leaf in share])[0] for share in shares]
    assert added(order_of(num_micro, workers, TREE), sums) == tree(leaves)


@given(st.integers(1, 70))
def test_few_partial_sums_wait(num_micro: int) -> None:
    found, partials = stacked(list(range(num_micro)))
    assert found == tree(list(range(num_micro)))
    assert partials <= num_micro.bit_length() + 1


@given(st.integers(0, 300))
def test_branches_before_a_leaf_are_whole_and_as_many_as_its_place(leaf: int) -> None:
    starts = (*branches_before(leaf), leaf)
    assert len(starts) == place_of(leaf) + 1
    assert starts[0] == 0
    sizes = [after - start for start, after in pairwise(starts)]
    assert all(size.bit_count() == 1 for size in sizes)
    assert sizes == sorted(set(sizes), reverse=True)


@given(st.integers(1, 70), st.integers(1, 9))
def test_in_sequence_neighbours_are_shared_out_evenly(num_micro: int, workers: int) -> None:
    workers = min(workers, num_micro)
    shares = shares_of(num_micro, workers, SEQUENTIAL)
    assert [leaf for share in shares for leaf in share] == list(range(num_micro))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    order = order_of(num_micro, workers, SEQUENTIAL)
    for rank in range(workers, 1, -1):
        assert isinstance(order, tuple)
        order, last = order
        assert last == rank
    assert order == 1
