"""In which order the gradients of micro-batches are added: one after the other, or as an aligned binary tree.

A tree's sum does not depend on who computes which leaves, as long as each takes a whole branch: so any number of workers gives
the same bits. The tree of n leaves is that of the largest power of two below n, plus that of the rest.
"""

from itertools import pairwise
from typing import TypeAlias

SEQUENTIAL, TREE = "sequential", "tree"
# How workers' sums are added: the sum of one rank, or two orders whose sums are added.
Order: TypeAlias = "int | tuple[Order, Order]"


def partial_sums(num_leaves: int, way: str) -> int:
    """Return how many partial sums there are at most while leaves come one after the other."""
    if way == SEQUENTIAL:
        return 1
    return 1 + max((leaf.bit_count() for leaf in range(num_leaves)), default=0)


def place_of(leaf: int) -> int:
    """Return where a leaf goes in the stack of partial sums: above those of the branches before it."""
    return leaf.bit_count()


def branches_before(leaf: int) -> tuple[int, ...]:
    """Return the first leaf of each whole branch before a leaf: 0 and 4 before leaf 6."""
    kept, before = 0, list[int]()
    for bit in reversed(range(leaf.bit_length())):
        if leaf >> bit & 1:
            before.append(kept)
            kept += 1 << bit
    return tuple(before)


def merges_after(leaf: int, num_leaves: int) -> int:
    """Return how many times the two topmost partial sums are then added: once for each branch that it ends; after the last
    leaf, until one is left.
    """
    if leaf == num_leaves - 1:
        return leaf.bit_count()
    return (~leaf & (leaf + 1)).bit_length() - 1  # trailing ones


def shares_of(num_micro: int, num_workers: int, way: str) -> tuple[range, ...]:
    """Return the micro-batches of a step that each worker computes: neighbours; of a tree, whole branches."""
    if way == TREE:
        return tuple(_branches(0, num_micro, num_workers))
    few, more = divmod(num_micro, num_workers)
    starts = [rank * few + min(rank, more) for rank in range(num_workers + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(starts))


def order_of(num_micro: int, num_workers: int, way: str) -> Order:
    """Return how the workers' sums are added, by rank (from 1)."""
    if way == TREE:
        return _tree_order(1, num_micro, num_workers)
    order: Order = 1
    for rank in range(2, num_workers + 1):
        order = (order, rank)
    return order


def _split(num_leaves: int, num_workers: int) -> tuple[int, int]:
    """Return the leaves of the first branch of a tree, and how many of the workers take it."""
    left = 1 << ((num_leaves - 1).bit_length() - 1)
    wanted = round(num_workers * left / num_leaves)
    return left, max(1, num_workers - (num_leaves - left), min(wanted, left, num_workers - 1))


def _branches(start: int, num_leaves: int, num_workers: int) -> list[range]:
    if num_workers == 1:
        return [range(start, start + num_leaves)]
    left, workers = _split(num_leaves, num_workers)
    return _branches(start, left, workers) + _branches(start + left, num_leaves - left, num_workers - workers)


def _tree_order(first: int, num_leaves: int, num_workers: int) -> Order:
    if num_workers == 1:
        return first
    left, workers = _split(num_leaves, num_workers)
    return (
        _tree_order(first, left, workers),
        _tree_order(first + workers, num_leaves - left, num_workers - workers),
    )
