"""Stages on the virtual clock (AxoNN): groups of micro-batches go through machines in a row, over links, and back.

Each stage does one thing at a time, and takes what has come first, backward before forward. A link carries one group at a time
each way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.plan.clock.clock import Clock
from headrace.terms.lanes import Lane
from headrace.terms.program import Op, Program, Verb


@dataclass(frozen=True, slots=True)
class Station:
    """A stage as the clock sees it: seconds of a group's forward and backward, and how many groups may be in flight.

    The last one's backward follows its forward at once.
    """

    onward: float
    back: float
    in_flight: int


class Times(Protocol):
    """Seconds of a group at a stage, where they differ."""

    def __call__(self, stage: int, group: int, *, back: bool) -> float:
        """Return those of its forward, or of its backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOfStages:
    """What a step takes, and the share of it for which each stage is busy."""

    step_seconds: float
    busy_shares: tuple[float, ...]


def most_busy_share(group_seconds: Sequence[float], transfer_seconds: float, groups: int) -> float:
    """Return the largest share of a step for which the slowest stage can be busy, from the seconds that each takes for a group.

    A stage's first group comes through all stages before it, and its last one goes back through them. So no step is shorter
    than G t_k + sum of (t_i + 2c) over the stages i before k, for any k. Where all are alike the share is
    G t / (G t + (S - 1)(t + 2c)).
    """
    before = [sum(group_seconds[:at]) + 2 * transfer_seconds * at for at in range(len(group_seconds))]
    shortest = max(groups * own + way for own, way in zip(group_seconds, before, strict=True))
    return groups * max(group_seconds) / shortest


def run(stations: Sequence[Station], transfers: Sequence[float], groups: int) -> StepOfStages:
    """Run a step of so many groups through `stations`; `transfers` are the seconds of a group on each link, one way."""

    def seconds(stage: int, group: int, *, back: bool) -> float:
        return stations[stage].back if back else stations[stage].onward

    return Row([each.in_flight for each in stations], transfers, groups, seconds).step()


class Row(Clock):
    """S stages in a row; stage k may have `most[k]` groups in flight, and takes so many `seconds` for each.

    Lane k and lane S + k are its backward and its forward, of which it does one at a time. The other lanes are links. The last
    stage has a forward alone, with its backward in it.
    """

    def __init__(self, most: Sequence[int], transfers: Sequence[float], groups: int, seconds: Times) -> None:
        count = self.count = len(most)
        super().__init__(4 * count, lambda places: tuple([(place, 1.0) for place in places]))
        self.groups, self.most, self._alone, self._busy = groups, most, list[float](), [0.0] * count
        ops, backs, last = list[Op](), [list[int]() for _ in most], count - 1

        def add(place: int, alone: float, after: Sequence[int]) -> list[int]:
            """Append what waits for `after`, and return it; a link that takes no time is none."""
            if place >= 2 * count and not alone:
                return list(after)
            ops.append(Op(len(ops), Verb.FORWARD, Lane.COMPUTE, place, after=tuple(after)))
            self._alone.append(alone)
            return [len(ops) - 1]

        for group in range(groups):
            came = list[int]()
            ways = [[seconds(stage, group, back=back) for back in (False, True)] for stage in range(count)]
            for stage in range(last):
                one_less = backs[stage][group - most[stage] :][:1] if group >= most[stage] else []  # is in flight then
                came = add(count + stage, ways[stage][0], came + one_less)
                came = add(2 * count + stage, transfers[stage], came)
            came = add(count + last, sum(ways[last]), came)
            for stage in reversed(range(last)):
                came = add(stage, ways[stage][1], add(3 * count + stage, transfers[stage], came))
                backs[stage] += came
            self._busy = [busy + sum(each) for busy, each in zip(self._busy, ways, strict=True)]
        self.admit(Program(tuple(ops)))

    def step(self) -> StepOfStages:
        """Return what the step takes."""
        self.run_until_complete()
        (seconds,) = self.finish
        return StepOfStages(step_seconds=seconds, busy_shares=tuple(busy / seconds for busy in self._busy))

    def place_of(self, op: Op) -> int:
        """See `Clock`."""
        return op.unit

    def alone_seconds(self, op: Op) -> float:
        """See `Clock`."""
        return self._alone[op.index]

    def _ready(self, place: int) -> bool:
        other = (place + self.count) % (2 * self.count)
        return (place >= 2 * self.count or not self.busy >> other & 1) and super()._ready(place)
