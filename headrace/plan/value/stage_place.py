"""Which stage a plan is for, and how a step goes through it (AxoNN): in groups of micro-batches, a few of them under way."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from headrace.terms.forms import UnitFigures

# So many groups for each stage keep most of them busy: with S stages and G groups, G / (G + S - 1) of the time.
GROUPS_PER_STAGE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StageChoices:
    """How a step goes through stage `number` of `count`: in `groups`, of which `in_flight` may have passed and not returned.
    `sums`: the tier where sums of gradients wait for the next group, `host` or `ssd`.
    """

    number: int
    count: int
    groups: int
    in_flight: int
    sums: str = "host"

    @property
    def is_first(self) -> bool:
        """Whether it has what stands before the blocks."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether it has what stands after them, and the loss."""
        return self.number == self.count - 1

    @property
    def filling(self) -> float:
        """How many times as long a step takes as this stage works in it, among stages alike whose links take no time."""
        return (self.groups + self.count - 1) / self.groups

    def groups_of(self, num_micro: int) -> list[range]:
        """Return the groups of so many micro-batches: even ones, of which the first have one more."""
        count = min(num_micro, self.groups)
        starts = [-(-at * num_micro // count) for at in range(count + 1)]
        return [range(start, stop) for start, stop in pairwise(starts)]

    def micros_in_flight(self, num_micro: int) -> int:
        """Return the most micro-batches that `in_flight` groups have together."""
        groups = min(num_micro, self.groups)
        return min(num_micro, -(-min(self.in_flight, groups) * num_micro // groups))


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlace:
    """Stage `number` of `count` in a model of `num_blocks`: it has the units `blocks`. A step has at most `most_groups`.

    In a model whose ends are `tied`, the last stage reads the matrix that the first one has. `sums` as in `StageChoices`.
    """

    number: int
    count: int
    blocks: range
    num_blocks: int
    most_groups: int
    tied: bool = False
    sums: str = "host"

    @classmethod
    def of(
        cls, number: int, cuts: Sequence[int], num_blocks: int, *, tied: bool, most_groups: int | None = None
    ) -> "StagePlace":
        """Return the place of a stage, where those after the first begin with the blocks `cuts`, counted from 0."""
        ends, count = (0, *cuts, num_blocks), len(cuts) + 1
        blocks = range(ends[number] + 1, ends[number + 1] + 1)
        most = most_groups or GROUPS_PER_STAGE * count
        return cls(number=number, count=count, blocks=blocks, num_blocks=num_blocks, most_groups=most, tied=tied)

    @property
    def is_last(self) -> bool:
        """Whether it has what stands after the blocks."""
        return self.number == self.count - 1

    def units_of(self, units: Sequence[UnitFigures]) -> tuple[UnitFigures, ...]:
        """Return the `units` around and in its blocks as this stage has them."""
        first, *rest = units
        if self.number:
            first = replace(first, is_far=True) if self.tied and self.is_last else first.away()
        if len(rest) > len(self.blocks) and not self.is_last:
            rest[-1] = rest[-1].away()
        return (first, *rest)

    def choices(self, num_micro: int) -> StageChoices:
        """Return how a step of so many micro-batches goes through this stage.

        In flight are as many groups as hide the stages behind it, and links to them that take half of a stage's time.
        """
        groups = min(num_micro, self.most_groups)
        in_flight = min(groups, 2 * (self.count - self.number) - 1)
        return StageChoices(
            number=self.number, count=self.count, groups=groups, in_flight=in_flight, sums=self.sums if groups > 1 else "host"
        )
