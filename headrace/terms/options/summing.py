"""In which order the gradients of micro-batches are added: one after the other, or as an aligned binary tree.

A tree's sum does not depend on who computes which leaves, if each takes a whole branch. So any number of workers gives the same
bits. The tree of n leaves is that of the largest power of two below n, plus that of the rest.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

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
    """Return how many times the two topmost partial sums are then added: once for each branch that it ends. After the last
    leaf, until one is left.
    """
    if leaf == num_leaves - 1:
        return leaf.bit_count()
    return (~leaf & (leaf + 1)).bit_length() - 1  # trailing ones


def order_of(num_micro: int, num_workers: int, way: str, dealing: "Dealing | None" = None) -> Order:
    """Return how the sums of workers, which are numbered from 1, are added. A tree is cut as `dealing` says (None: evenly)."""
    if way == TREE:
        return (dealing or Dealing((1.0,) * num_workers)).order(num_micro)
    order: Order = 1
    for rank in range(2, num_workers + 1):
        order = (order, rank)
    return order


def order_from(value: Any) -> Order:
    """Return the order that became this JSON value."""
    return value if isinstance(value, int) else (order_from(value[0]), order_from(value[1]))


def shares_of(num_micro: int, order: Order, way: str) -> dict[int, range]:
    """Return the micro-batches of a step that each worker computes, by rank: neighbours; of a tree, whole branches."""
    if way == TREE:
        return dict(_branches(0, num_micro, order))
    ranks = sorted(ranks_of(order))
    few, more = divmod(num_micro, len(ranks))
    starts = [place * few + min(place, more) for place in range(len(ranks) + 1)]
    return {rank: range(start, stop) for rank, (start, stop) in zip(ranks, pairwise(starts), strict=True)}


def ranks_of(order: Order) -> tuple[int, ...]:
    """Return the workers whose sums are added."""
    return (order,) if isinstance(order, int) else ranks_of(order[0]) + ranks_of(order[1])


@dataclass(frozen=True, slots=True)
class Dealing:
    """Cuts a tree of micro-batches into a branch for each worker, so that the last one to end ends as soon as may be.

    `seconds` are those that each worker takes for a micro-batch, by rank; `most` is how many each has memory for (None: any).
    A branch is a power of two of leaves, or the rest of them. Of 8 leaves two workers get 4 and 4, however fast they are. Three
    get 4, 2 and 2, and the fastest gets 4.
    """

    seconds: tuple[float, ...]
    most: tuple[int, ...] | None = None

    def order(self, num_micro: int) -> Order:
        """Return the cut tree, by ranks (from 1)."""
        by_speed = sorted(range(len(self.seconds)), key=lambda place: self.seconds[place])
        return self._best(num_micro, tuple(by_speed), {})[2]

    def step_seconds(self, num_micro: int, order: Order) -> float:
        """Return when the last worker ends under an order."""
        return max(self._seconds(len(share), rank - 1) for rank, share in shares_of(num_micro, order, TREE).items())

    def _seconds(self, num_leaves: int, place: int) -> float:
        if self.most is not None and num_leaves > self.most[place]:
            return math.inf
        return num_leaves * self.seconds[place]

    def _best(self, num_leaves: int, places: tuple[int, ...], known: dict[Any, Any]) -> tuple[float, float, Order]:
        """Return when the last one ends, how uneven it is (the sum of squares), and the order. `places` go by speed: in a
        whole tree larger branches are the faster ones', so each branch takes some that follow one another.
        """
        if len(places) == 1:
            return self._seconds(num_leaves, places[0]), num_leaves**2, places[0] + 1
        if num_leaves < len(places):
            return math.inf, math.inf, 0
        key = num_leaves, places
        if key not in known:
            left = 1 << ((num_leaves - 1).bit_length() - 1)
            found = []
            for cut in range(1, len(places)):
                for mine, others in ((places[:cut], places[cut:]), (places[cut:], places[:cut])):
                    one, other = self._best(left, mine, known), self._best(num_leaves - left, others, known)
                    found.append((max(one[0], other[0]), one[1] + other[1], (one[2], other[2])))
            known[key] = min(found, key=lambda each: each[:2])
        best: tuple[float, float, Order] = known[key]
        return best


def _branches(start: int, num_leaves: int, order: Order) -> Iterator[tuple[int, range]]:
    if isinstance(order, int):
        yield order, range(start, start + num_leaves)
        return
    left = 1 << ((num_leaves - 1).bit_length() - 1)
    yield from _branches(start, left, order[0])
    yield from _branches(start + left, num_leaves - left, order[1])
