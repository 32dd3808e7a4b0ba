"""The tree of micro-batches: whoever adds branches of it adds the same pairs in the same order."""

from collections.abc import Iterator
from itertools import pairwise, permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.terms.options.summing import (
    SEQUENTIAL,
    TREE,
    Dealing,
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


@given(st.integers(1, 70), st.lists(st.floats(0.1, 10.0), min_size=1, max_size=9))
def test_any_number_of_workers_of_any_speed_adds_the_same_pairs(num_micro: int, seconds: list[float]) -> None:
    seconds = seconds[:num_micro]
    order = order_of(num_micro, len(seconds), TREE, Dealing(tuple(seconds)))
    leaves, shares = list(range(num_micro)), shares_of(num_micro, order, TREE)
    assert sorted(leaf for share in shares.values() for leaf in share) == leaves
    assert all(shares.values())
    assert sorted(shares) == list(range(1, len(seconds) + 1))
    sums = [stacked([leaves[leaf] for leaf in shares[rank]])[0] for rank in sorted(shares)]
    assert added(order, sums) == tree(leaves)


def cuts(num_leaves: int, num_workers: int) -> Iterator[list[int]]:
    """Yield the leaves of the branches of each way to cut a tree."""
    if num_workers == 1:
        yield [num_leaves]
        return
    left = 1 << ((num_leaves - 1).bit_length() - 1)
    for mine in range(1, num_workers):
        if mine <= left and num_workers - mine <= num_leaves - left:
            for one in cuts(left, mine):
                yield from (one + other for other in cuts(num_leaves - left, num_workers - mine))


@pytest.mark.parametrize("num_micro", [2, 4, 8, 16])
@given(seconds=st.lists(st.sampled_from([1.0, 1.5, 3.0, 7.0]), min_size=2, max_size=4))
def test_no_dealing_of_a_whole_tree_ends_sooner(num_micro: int, seconds: list[float]) -> None:
    seconds = seconds[:num_micro]
    dealing, workers = Dealing(tuple(seconds)), len(seconds)
    found = dealing.step_seconds(num_micro, dealing.order(num_micro))
    ways = [sizes for cut in cuts(num_micro, workers) for sizes in permutations(cut)]
    assert found == min(max(map(lambda size, each: size * each, sizes, seconds)) for sizes in ways)


def test_a_slow_worker_gets_less_and_nobody_more_than_there_is_memory_for() -> None:
    def sizes(*seconds: float, most: tuple[int, ...] | None = None, num_micro: int = 8) -> dict[int, int]:
        order = Dealing(seconds, most).order(num_micro)
        return {rank: len(share) for rank, share in sorted(shares_of(num_micro, order, TREE).items())}

    assert sizes(1, 1, 1, 1) == {1: 2, 2: 2, 3: 2, 4: 2}
    assert sizes(1, 4, 4, 1.9) == {1: 4, 2: 1, 3: 1, 4: 2}
    assert sizes(1, 4, 4, 1.9, most=(2, 2, 2, 2)) == {1: 2, 2: 2, 3: 2, 4: 2}
    assert sizes(3, 1, num_micro=5) == {1: 1, 2: 4}


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
    shares = shares_of(num_micro, order_of(num_micro, workers, SEQUENTIAL), SEQUENTIAL)
    assert [leaf for rank in sorted(shares) for leaf in shares[rank]] == list(range(num_micro))
    assert max(map(len, shares.values())) - min(map(len, shares.values())) <= 1
    order = order_of(num_micro, workers, SEQUENTIAL)
    for rank in range(workers, 1, -1):
        assert isinstance(order, tuple)
        order, last = order
        assert last == rank
    assert order == 1
