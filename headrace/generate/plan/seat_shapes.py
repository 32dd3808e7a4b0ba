"""Which micro-batches prompts of many lengths come in: more rows of short prompts have the memory of few long ones.

A seat has room for so many tokens, not for so many rows of the longest prompt. So prompts of mixed lengths take hardly more
passes than prompts of one length with as many tokens.

Invariants: a micro-batch that `room` allows is within one that was planned, in rows and in length. What is planned for memory
is, in each figure, the most of any planned one.
"""

import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from headrace.generate.plan.compose import cut
from headrace.terms.costs import CodedCaches, GenerationCosts, PassCosts, RecomputeCosts

# Short prompts have so many times the rows of the longest ones at most: head and sampling take memory by rows.
_MOST_TIMES_ROWS = 4
# So many times the micro-batches that rows of the longest prompt would need are tried.
_TIMES = (0.5, 0.75, 1.0, 1.25, 1.5)

Shape = tuple[int, int]


@dataclass(frozen=True, slots=True)
class PromptLengths:
    """Tokens of each prompt, and its kind: those of one kind alone share a micro-batch."""

    tokens: tuple[int, ...]
    kinds: tuple[Hashable, ...] = ()

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The lengths of each kind's prompts, the longest first."""
        found = dict[Hashable, list[int]]()
        for tokens, kind in zip(self.tokens, self.kinds or (0,) * len(self.tokens), strict=True):
            found.setdefault(kind, []).append(tokens)
        return tuple(tuple(sorted(each, reverse=True)) for each in found.values())


@dataclass(frozen=True, slots=True)
class SeatShapes:
    """Rows, and tokens of the longest prompt, of each micro-batch that is planned; the longest prompts come first."""

    each: tuple[Shape, ...]

    @property
    def rows(self) -> int:
        """Rows of a micro-batch, on average."""
        return -(-sum(rows for rows, _ in self.each) // len(self.each))

    @property
    def prompt_length(self) -> int:
        """Tokens of a row, padding included, on average."""
        return -(-sum(rows * length for rows, length in self.each) // sum(rows for rows, _ in self.each))

    def room(self, length: int) -> int:
        """Return how many rows a micro-batch may have whose longest prompt has `length` tokens; 0 if that is too long."""
        return max((rows for rows, longest in self.each if longest >= length), default=0)

    def ends(self, new_tokens: int) -> tuple[Shape, Shape]:
        """Return the two shapes whose costs bound all others': the longest prompts and the most rows, with the most tokens.

        Costs are sums of powers of rows and length, so between two shapes of as many tokens none is above both.
        """
        most = max(rows * (length + new_tokens) for rows, length in self.each)
        longest, most_rows = max(length for _, length in self.each), max(rows for rows, _ in self.each)
        fewest = -(-most // (longest + new_tokens))
        return (fewest, longest), (most_rows, max(1, min(longest, -(-most // most_rows) - new_tokens)))


def shapes_to_try(lengths: PromptLengths, rows: int, most_rows: int, new_tokens: int) -> list[SeatShapes]:
    """Return ways to cut prompts into micro-batches, near to those that `rows` rows of the longest prompt would give."""
    room = rows * (max(lengths.tokens) + new_tokens)
    most_rows = min(most_rows, _MOST_TIMES_ROWS * rows)
    groups = [tuple(length + new_tokens for length in each) for each in lengths.groups]
    counts = [_fewest(each, most_rows, room) for each in groups]
    found = dict[SeatShapes, None]()
    for times in _TIMES:
        shapes = list[Shape]()
        for each, count in zip(groups, counts, strict=True):
            least = -(-len(each) // most_rows)
            borders = cut(each, most_rows, min(len(each), max(least, math.ceil(times * count))))
            shapes += [(stop - start, each[start] - new_tokens) for start, stop in itertools.pairwise(borders)]
        found[SeatShapes(tuple(sorted(shapes, key=lambda shape: (-shape[1], shape[0]))))] = None
    return list(found)


def _fewest(lengths: Sequence[int], rows: int, room: int) -> int:
    """Return how many parts of at most `rows` rows and `room` tokens falling `lengths` need."""
    count = start = 0
    while start < len(lengths):
        start += max(1, min(rows, room // lengths[start]))
        count += 1
    return count


def most_of(found: Sequence[GenerationCosts], new_tokens: int) -> GenerationCosts:
    """Return costs of which each figure is the most of any of `found`. So is a cache's size with all new tokens."""
    most: GenerationCosts = _most(found)
    caches = [zip(each.cache_bytes, each.cache_token_bytes, strict=True) for each in found]
    whole = zip(*([size + new_tokens * token for size, token in each] for each in caches), strict=True)
    new = [new_tokens * each for each in most.cache_token_bytes]
    return replace(most, cache_bytes=tuple(max(sizes) - more for sizes, more in zip(whole, new, strict=True)))


def _most(values: Sequence[Any]) -> Any:
    """Return the most of numbers, item by item where they are sequences or costs; None if one of them is."""
    first = values[0]
    if any(value is None for value in values):
        return None
    if isinstance(first, tuple):
        return tuple(map(_most, zip(*values, strict=True)))
    if isinstance(first, GenerationCosts | PassCosts | RecomputeCosts | CodedCaches):
        own = {each.name: _most([getattr(value, each.name) for value in values]) for each in fields(first)}
        return replace(first, **own)
    return max(values)
