"""Which prompts share a micro-batch: rows of about one length together, so that little of a seat is padding.

Invariant: each prompt is in one micro-batch, and the composition is a function of lengths and kinds alone.
"""

import itertools
from collections.abc import Hashable, Sequence


def composed(lengths: Sequence[int], kinds: Sequence[Hashable], rows: int) -> tuple[tuple[int, ...], ...]:
    """Return micro-batches of at most `rows` prompts of one kind, as indices: the longest first, which take longest.

    Where a kind has fewer prompts than several micro-batches hold, these are of sizes that differ by one at most.
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
