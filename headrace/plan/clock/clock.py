"""The virtual clock: lanes that work through operations in order, at speeds that change whenever another starts or stops.

Subclasses say which lanes there are, how long an operation takes alone, and how fast lanes are beside one another. The lanes
are of one machine (`simulate`), or of several that exchange bytes (`joint`). As in the engine, a program starts only when the
last but one is complete. No files, no torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from headrace.terms.errors import StepFailed
from headrace.terms.program import Op, Program

# What the first operation of a lane waits for (nothing), and what a lane waits for at the end of its queue (more operations).
NOTHING, _MORE = (bytearray(b"\1"), 0), (bytearray(b"\0"), 0)
# Two steps count as equally long below this relative difference: far above rounding, far below what anybody plans by.
_SETTLED = 1e-4
# So many steps in a row must be equally long: two may be so by chance while a backlog of the cold start drains.
_ALIKE = 3
# After so many rounds a step time that still swings between several values is averaged instead.
_MOST_ROUNDS = 12

_Value = TypeVar("_Value")


# Where among `count` lanes those of a set are.
_Places = tuple[int, ...]


class _Known(dict[int, _Value]):
    """What was found for a set of lanes, by bit mask. An event asks for a few sets, and a known one costs no call."""

    def __init__(self, count: int, find: Callable[[_Places], _Value]) -> None:
        super().__init__()
        self._count, self._find = count, find

    def __missing__(self, mask: int) -> _Value:
        value = self[mask] = self._find(tuple(place for place in range(self._count) if mask >> place & 1))
        return value


def _themselves(places: _Places) -> _Places:
    return places


class Clock:
    """The event loop. At most one operation per lane is under way, so scanning the few lanes is faster than a heap.

    A set of lanes is a bit mask of their places among the lanes that the programs use; only sets that occur are examined.
    `speeds_among` returns the speed of each of the lanes in some places, at most 1, while all of them are busy. It does not
    know the clock: so a clock goes with its programs as soon as nobody has it any longer, without a collection of cycles.
    """

    def __init__(self, count: int, speeds_among: Callable[[_Places], tuple[tuple[int, float], ...]]) -> None:
        self.programs: list[Program] = []
        self.done: list[bytearray] = []
        self.left: list[int] = []
        self.start: list[list[float]] = []
        self.stop: list[list[float]] = []
        self.finish: list[float] = []
        self.now = 0.0
        self.places_of = _Known(count, _themselves)
        self.speeds_of = _Known(count, speeds_among)
        self.all_lanes = (1 << count) - 1
        self.work: list[list[float]] = []  # by program and operation: the seconds that it takes alone
        self.queue: list[list[tuple[int, Op]]] = [[] for _ in range(count)]
        self.head = [0] * count
        self.waiting = [0] * count  # how many dependencies of the head are known to be done
        self.blocked = [_MORE] * count  # what the head was last seen to wait for
        self.busy = 0
        self.speed = [1.0] * count
        self.due = [0.0] * count  # when the lane's operation stops if no speed changes

    def place_of(self, op: Op) -> int:
        """Return the place of the lane of `op` among those that are in use."""
        raise NotImplementedError

    def alone_seconds(self, op: Op) -> float:
        """Return the seconds that `op` takes if nothing else runs."""
        raise NotImplementedError

    def admit(self, program: Program) -> None:
        """Append a program to the lanes' queues."""
        number = len(self.programs)
        again = bool(number) and program is self.programs[-1]
        if number < 2 or not again or program is not self.programs[-2]:
            _check(program, number, len(self.programs[-1].ops) if number else None)
        self.work.append(self.work[-1] if again else [self.alone_seconds(op) for op in program.ops])
        self.programs.append(program)
        self.done.append(bytearray(len(program.ops)))
        self.left.append(len(program.ops))
        self.start.append([0.0] * len(program.ops))
        self.stop.append([0.0] * len(program.ops))
        for op in program.ops:
            self.queue[self.place_of(op)].append((number, op))
        self.blocked = [NOTHING if blocked is _MORE else blocked for blocked in self.blocked]

    def settled(self, since: int) -> bool:
        """Whether steps have been equally long from program `since` on, often enough not to be chance."""
        if len(self.finish) <= since + _ALIKE:
            return False
        return _agree([self.period(len(self.finish) - 1 - back) for back in range(_ALIKE)])

    def period(self, number: int) -> float:
        """Seconds from the end of program `number - 1` to the end of program `number`."""
        return self.finish[number] - self.finish[number - 1]

    def run_until_complete(self) -> bool:
        """Run events until the oldest unfinished program is complete; False if there is none."""
        number = len(self.finish)
        if number == len(self.programs):
            return False
        while self.left[number]:
            self._start_ready()
            self._advance()
        # Not before its predecessors, because a short program may overtake the one before it.
        self.finish.append(max([*self.stop[number], *self.finish[-1:]], default=0.0))
        return True

    def _start_ready(self) -> None:
        for place in self.places_of[self.all_lanes ^ self.busy]:
            flags, index = self.blocked[place]
            if flags[index] and self._ready(place):
                self._begin(place)
        for place, speed in self.speeds_of[self.busy]:
            # It is left alone where nothing changes, so that undisturbed operations take exactly their own seconds.
            if speed != self.speed[place]:
                self.due[place] = self.now + (self.due[place] - self.now) * self.speed[place] / speed
                self.speed[place] = speed

    def _begin(self, place: int) -> None:
        """Start the head of a lane, which is ready."""
        number, op = self.queue[place][self.head[place]]
        self.start[number][op.index] = self.now
        self.due[place] = self.now + self.work[number][op.index]
        self.speed[place] = 1.0
        self.busy |= 1 << place

    def _ready(self, place: int) -> bool:
        """Whether the head of a lane may start. Each dependency that was seen done is not looked at again."""
        if self.head[place] == len(self.queue[place]):
            self.blocked[place] = _MORE
            return False
        number, op = self.queue[place][self.head[place]]
        seen, here = self.waiting[place], len(op.after)
        done = self.done[number]
        while seen < here and done[op.after[seen]]:
            seen += 1
        if seen < here:
            self.waiting[place], self.blocked[place] = seen, (done, op.after[seen])
            return False
        if number:
            before, end = self.done[number - 1], here + len(op.after_previous)
            while seen < end and before[op.after_previous[seen - here]]:
                seen += 1
            if seen < end:
                self.waiting[place], self.blocked[place] = seen, (before, op.after_previous[seen - here])
                return False
        return True

    def _advance(self) -> None:
        """Move to the next end of an operation, and complete all operations that end then."""
        under_way, due = self.places_of[self.busy], self.due
        self.now = now = max(self.now, min([due[place] for place in under_way]))
        for place in under_way:
            if due[place] <= now:
                number, op = self.queue[place][self.head[place]]
                self.stop[number][op.index] = now
                self.done[number][op.index] = 1
                self.left[number] -= 1
                self.head[place] += 1
                self.waiting[place] = 0
                self.busy ^= 1 << place


def settle(clock: Clock, programs: Sequence[Program], *, whole: bool = True) -> tuple[int, bool, float]:
    """Run all programs there will be, the last one again and again if it repeats, until steps are equally long.

    Return the number of the measured program, whether steps are equally long, and the seconds from one to the next; their mean
    where they are not. If not `whole`, nothing runs on after the measured one.
    """
    if len(programs) < 3:
        raise ValueError(f"simulate: {len(programs)} programs given, at least 3 are needed to find the steady state")
    given, repeats = len(programs), programs[-1] == programs[-2]
    clock.admit(programs[0])
    clock.admit(programs[1])
    while clock.run_until_complete():
        admitted = len(clock.programs)
        if admitted < given:
            clock.admit(programs[admitted])
        # This is not asked later, because the last steps have no successor, and run differently.
        elif repeats and admitted < given + _MOST_ROUNDS and not clock.settled(since=given - 2):
            clock.admit(programs[-1])
        else:
            break
    measured = len(clock.programs) - (2 if repeats else 1)  # the last one has no successor
    while (whole or len(clock.finish) <= measured) and clock.run_until_complete():
        pass
    if not repeats or (measured > _ALIKE and _agree([clock.period(measured - back) for back in range(_ALIKE)])):
        return measured, True, clock.period(measured)
    first = max(1, (given + measured) // 2)
    return measured, False, (clock.finish[measured] - clock.finish[first - 1]) / (measured - first + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneUse:
    """What one lane did in the measured step. `alone_seconds` is what its work takes if no other lane slows it."""

    busy_seconds: float = 0.0
    alone_seconds: float = 0.0
    utilisation: float = 0.0
    bytes: int = 0
    flops: float = 0.0


def uses_of(clock: Clock, measured: int, period: float) -> tuple[float, list[LaneUse]]:
    """Return the seconds of a step, where the measured one takes `period`, and by place what each lane did in it."""
    busy, alone, flops = ([0.0] * len(clock.queue) for _ in range(3))
    num_bytes = [0] * len(clock.queue)
    timed = zip(clock.programs[measured].ops, clock.start[measured], clock.stop[measured], clock.work[measured], strict=True)
    for op, start, stop, work in timed:
        place = clock.place_of(op)
        busy[place] += stop - start
        alone[place] += work
        flops[place] += op.flops
        num_bytes[place] += op.bytes
    # While a backlog of the cold start drains, steps end faster than their work takes; no later step can do that.
    seconds = max([period, *alone, *busy])
    return seconds, [
        LaneUse(
            busy_seconds=busy[place],
            alone_seconds=alone[place],
            utilisation=busy[place] / seconds if seconds else 0.0,
            bytes=num_bytes[place],
            flops=flops[place],
        )
        for place in range(len(clock.queue))
    ]


def _agree(values: list[float]) -> bool:
    return max(values) - min(values) <= _SETTLED * max(values)


def _check(program: Program, number: int, previous: int | None) -> None:
    """Refuse a program that could not run. If all dependencies point backwards, some lane can always go on."""
    for index, op in enumerate(program.ops):
        if op.index != index:
            raise StepFailed(f"program {number}: the operation in place {index} ({op.label}) calls itself number {op.index}")
        wrong = [ref for ref in op.after if not 0 <= ref < index]
        if previous is not None:
            wrong += [ref for ref in op.after_previous if not 0 <= ref < previous]
        if wrong:
            raise StepFailed(
                f"program {number}: operation {index} ({op.label}) waits for {wrong}; "
                f"it can wait for 0..{index - 1} and, in the program before, for 0..{(previous or 0) - 1}"
            )
