"""Which prompts share a micro-batch: rows of about one length go together, so that little of a seat is padding.

Invariant: each prompt is in one micro-batch, and the composition follows from lengths and kinds alone.
"""

import itertools
from collections.abc import Hashable, Sequence


def composed(lengths: Sequence[int], kinds: Sequence[Hashable], rows: int) -> tuple[tuple[int, ...], ...]:
    """Return micro-batches of at most `rows` prompts of one kind, as indices. The longest, which take longest, come first.

    Where the prompts of a kind do not fill several micro-batches, these differ in size by at most one.
    """
    by_kind: dict[Hashable, list[int]] = {}
    for index, kind in enumerate(kinds):
        by_kind.setdefault(kind, []).append(index)
    batches = []
    for members in by_kind.values():
        ordered = sorted(members, key=lambda index: (-lengths[index], index))
        count = -(-len(ordered) // rows)
        borders = [round(number * len(ordered) / count) for number in range(count + 1)]
        batches += [tuple(ordered[start:stop]) for start, stop in itertools.pairwise(borders)]
    return tuple(batches)
