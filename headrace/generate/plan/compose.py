"""Which prompts share a micro-batch: rows of similar length, so that little of a seat is padding.

A seat computes, and keeps, as many tokens as its longest row has, times its rows. MoE-Lightning (Cao et al. 2025, Algorithm 2)
adds each prompt, the longest first, to the micro-batch with the smallest sum of tokens. That is for code that pads no rows.
Here prompts are sorted by length and divided so that the largest of those products is as small as possible. The others come
near to their mean (docs/log/composition.md).

Invariant: each prompt is in one micro-batch, and the composition is a function of lengths, kinds and room alone.
"""

import itertools
from collections.abc import Callable, Hashable, Sequence


def composed(
    lengths: Sequence[int], kinds: Sequence[Hashable], rows: int | Callable[[int], int]
) -> tuple[tuple[int, ...], ...]:
    """Return micro-batches of at most `rows` prompts of one kind, as indices: the longest first, which take longest.

    A kind's prompts are in as few micro-batches as hold them. `rows` may be by the length of a micro-batch's longest prompt,
    more for shorter ones; then each micro-batch is as full as it may be.
    """
    by_kind: dict[Hashable, list[int]] = {}
    for index, kind in enumerate(kinds):
        by_kind.setdefault(kind, []).append(index)
    batches = []
    for members in by_kind.values():
        ordered = sorted(members, key=lambda index: (-lengths[index], index))
        falling = [lengths[index] for index in ordered]
        borders = _filled(falling, rows) if callable(rows) else cut(falling, rows, -(-len(falling) // rows))
        batches += [tuple(ordered[start:stop]) for start, stop in itertools.pairwise(borders)]
    return tuple(batches)


def _filled(lengths: Sequence[int], room: Callable[[int], int]) -> list[int]:
    borders = [0]
    while borders[-1] < len(lengths):
        borders.append(min(len(lengths), borders[-1] + room(lengths[borders[-1]])))
    return borders


def cut(lengths: Sequence[int], rows: int, count: int) -> list[int]:
    """Cut falling `lengths` into `count` parts of at most `rows` each: return where they begin, and the end."""
    least, most = 0, rows * lengths[0]  # no part can be had at the one, all at the other
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (least, middle) if _earliest_starts(lengths, rows, middle, count)[0] == 0 else (middle, most)
    starts = _earliest_starts(lengths, rows, most, count)
    borders, left = [0], sum(lengths)
    for part in range(1, count):
        start, longest = borders[-1], lengths[borders[-1]]
        wanted = start + round(left / (count - part + 1) / longest)
        last = min(start + min(rows, most // longest), len(lengths) - count + part)
        borders.append(min(max(wanted, starts[part], start + 1), last))
        left -= sum(lengths[start : borders[-1]])
    return [*borders, len(lengths)]


def _earliest_starts(lengths: Sequence[int], rows: int, most: int, count: int) -> list[int]:
    """Return for each part, the first to the last, how early it may begin for parts of `most` tokens to reach the end."""
    starts = [len(lengths)]
    for _ in range(count):
        start = stop = starts[-1]
        while start and stop - start < rows and (stop - start + 1) * lengths[start - 1] <= most:
            start -= 1
        starts.append(start)
    return starts[:0:-1]
