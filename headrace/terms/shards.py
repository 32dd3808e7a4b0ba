"""Whose piece of a unit is whose, where the ranks of a run share out every unit.

Invariant: ranks hold neighbouring chunks of each family, in the order of ranks; each chunk has one holder. Who has one chunk
more changes from unit to unit, so that ranks hold equally much.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from headrace.terms.families import Family, Unit


@dataclass(frozen=True, slots=True)
class Share:
    """The part of rank `rank` among `size` ranks."""

    rank: int
    size: int

    def chunks(self, num_chunks: int, unit: int) -> tuple[int, int]:
        """Return the first chunk that this rank holds of a family of `unit`, and the first after them."""
        turn = unit % self.size
        first, after = ((rank * num_chunks + turn) // self.size for rank in (self.rank, self.rank + 1))
        return first, after

    def of(self, units: Sequence[Unit]) -> list[Unit]:
        """Return `units` as this rank's store has them: of each family the chunks that it holds."""

        def part(index: int, family: Family) -> Family:
            return replace(family, held=self.chunks(family.num_chunks, index))

        return [Unit(unit.name, tuple(part(index, each) for each in unit.families)) for index, unit in enumerate(units)]


def holder(num_chunks: int, unit: int, chunk: int, size: int) -> int:
    """Return the rank that holds a chunk."""
    return next(rank for rank in range(size) if chunk < Share(rank, size).chunks(num_chunks, unit)[1])


def elements_by_rank(family: Family, unit: int, size: int) -> list[slice]:
    """Return by rank the elements of a family of `unit` that it holds."""
    held = (Share(rank, size).chunks(family.num_chunks, unit) for rank in range(size))
    return [slice(family.borders[first], family.borders[after]) for first, after in held]


def bytes_by_rank(family: Family, unit: int, size: int) -> list[slice]:
    """Return by rank where the bytes lie that it holds, in a buffer of all chunks."""
    starts = list(accumulate(map(family.chunk_bytes, range(family.num_chunks)), initial=0))
    held = (Share(rank, size).chunks(family.num_chunks, unit) for rank in range(size))
    return [slice(starts[first], starts[after]) for first, after in held]
