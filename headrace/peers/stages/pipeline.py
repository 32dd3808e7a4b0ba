"""The virtual clock of stages (AxoNN): groups of micro-batches go through machines in a row, over links, and back.

Each stage does one thing at a time, and takes what has come first, backward before forward. A link carries one group at a time
each way. Invariant: what is known of a group's arrival is known before anything that starts later is chosen.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


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


def run(
    stations: Sequence[Station],
    transfers: Sequence[float],
    groups: int,
    *,
    times: Times | None = None,
    in_order: bool = False,
) -> StepOfStages:
    """Run a step of so many groups through `stations`; `transfers` are the seconds of a group on each link, one way.

    `in_order`: each stage follows a table made beforehand (1F1B): it waits for what comes next there, whatever has arrived.
    """
    clock = _Row(stations, transfers, groups, times, in_order=in_order)
    while clock.advance():
        pass
    step_seconds = max(clock.free)
    return StepOfStages(step_seconds=step_seconds, busy_shares=tuple(busy / step_seconds for busy in clock.busy))


class _Row:
    """Stages in a row. `came[kind][stage]` are the times at which its groups can be taken, as far as they are known."""

    def __init__(
        self, stations: Sequence[Station], transfers: Sequence[float], groups: int, times: Times | None, *, in_order: bool
    ) -> None:
        self._stations, self._transfers, self._groups = stations, transfers, groups
        self._times, self._in_order = times, in_order
        count = len(stations)
        self.free, self.busy = [0.0] * count, [0.0] * count
        self._came = {"onward": [[0.0] * groups, *([] for _ in range(count - 1))], "back": [list[float]() for _ in stations]}
        self._gone = {"onward": [0] * count, "back": [0] * count}
        self._link_free = {"onward": [0.0] * count, "back": [0.0] * count}

    def advance(self) -> bool:
        """Do what can start next; return whether there was anything."""
        starts = [(start, stage, kind) for stage in range(len(self._stations)) for start, kind in self._next_of(stage)]
        if not starts:
            return False
        # At the same time backward comes first, which frees what waits for it.
        start, stage, kind = min(starts, key=lambda each: (each[0], each[2] != "back", each[1]))
        self._do(start, stage, kind)
        return True

    def _next_of(self, stage: int) -> list[tuple[float, str]]:
        """Return what a stage may do next, and when."""
        onward, back, last = self._gone["onward"][stage], self._gone["back"][stage], stage == len(self._stations) - 1
        in_flight = len(self._stations) - stage if self._in_order else self._stations[stage].in_flight
        kinds = {"onward": onward - back < in_flight and onward < self._groups, "back": not last and back < onward}
        if self._in_order and kinds["onward"]:  # first as many as there are stages behind, then backward and forward in turn
            kinds["back"] = False
        found = []
        for kind, may in kinds.items():
            came, gone = self._came[kind][stage], self._gone[kind][stage]
            if may and gone < len(came):
                found.append((max(self.free[stage], came[gone]), kind))
        return found

    def _do(self, start: float, stage: int, kind: str) -> None:
        group, last = self._gone[kind][stage], stage == len(self._stations) - 1
        taken = self._seconds(stage, group, back=kind == "back")
        self._gone[kind][stage] += 1
        if last:
            taken += self._seconds(stage, group, back=True)
            self._gone["back"][stage] += 1
            kind = "back"
        self.free[stage] = stop = start + taken
        self.busy[stage] += taken
        to, link = (stage + 1, stage) if kind == "onward" else (stage - 1, stage - 1)
        if to >= 0:
            arrives = max(stop, self._link_free[kind][link]) + self._transfers[link]
            self._link_free[kind][link] = arrives
            self._came[kind][to].append(arrives)

    def _seconds(self, stage: int, group: int, *, back: bool) -> float:
        if self._times is not None:
            return self._times(stage, group, back=back)
        return self._stations[stage].back if back else self._stations[stage].onward
