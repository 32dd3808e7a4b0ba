"""Whose piece of a unit is whose, where the ranks of a run share out every unit, or are stages and hold whole units.

Invariant: ranks hold neighbouring chunks of each family, in the order of ranks; each chunk has one holder. Who has one chunk
more changes from unit to unit, so that ranks hold equally much.
"""

from bisect import bisect_right
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

    def holder(self, num_chunks: int, unit: int, chunk: int) -> int:
        """Return the rank that holds a chunk."""
        return next(rank for rank in range(self.size) if chunk < replace(self, rank=rank).chunks(num_chunks, unit)[1])


@dataclass(frozen=True, slots=True)
class StageShare(Share):
    """The part of stage `rank`: whole units. Stage s > 0 begins with block `cuts[s - 1]`; what stands before the blocks is the
    first stage's, what stands after them the last one's.
    """

    cuts: tuple[int, ...]

    def stage_of(self, unit: int) -> int:
        """Return the stage that has `unit`."""
        return bisect_right(self.cuts, unit - 1)

    def blocks(self, num_blocks: int) -> range:
        """Return the units of this stage's blocks."""
        ends = (0, *self.cuts, num_blocks)
        return range(ends[self.rank] + 1, ends[self.rank + 1] + 1)

    def chunks(self, num_chunks: int, unit: int) -> tuple[int, int]:
        """See `Share.chunks`."""
        return (0, num_chunks) if self.stage_of(unit) == self.rank else (0, 0)


def elements_by_rank(family: Family, unit: int, size: int) -> list[slice]:
    """Return by rank the elements of a family of `unit` that it holds."""
    held = (Share(rank, size).chunks(family.num_chunks, unit) for rank in range(size))
    return [slice(family.borders[first], family.borders[after]) for first, after in held]


def bytes_by_rank(family: Family, unit: int, size: int) -> list[slice]:
    """Return by rank where the bytes lie that it holds, in a buffer of all chunks."""
    starts = list(accumulate(map(family.chunk_bytes, range(family.num_chunks)), initial=0))
    held = (Share(rank, size).chunks(family.num_chunks, unit) for rank in range(size))
    return [slice(starts[first], starts[after]) for first, after in held]
