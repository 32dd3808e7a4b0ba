"""The simulated interpreter: programs on a virtual clock, at the rates that a machine profile declares.

This is the planner's time model (docs/decisions/0006). It runs the very operations that the engine will run: each lane works
through its own in program order, and an operation starts when its lane is free and all that it comes after is complete. As in
the engine, a program starts only when the last but one is complete.

Operations that run at once may slow one another: reads and writes of one drive, both directions of a link, lanes that share
cores or memory bandwidth. So an operation has an amount of work, in seconds that it takes alone, and a speed of at most 1 that
changes whenever another lane starts or stops; its duration is found by running events, not fixed beforehand.

Invariant: the result is a function of programs and ceilings alone. Where nothing slows anything, faster lanes never make
any operation later (start times are maxima of sums). Where lanes do share, work that is done earlier can get in the way of
work that matters more, in the model as on a real machine; the tests state how little that is.

No clock, no files, no torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from headrace.plan.rates import Rates
from headrace.terms.ceilings import Ceilings
from headrace.terms.errors import StepFailed
from headrace.terms.program import Lane, Op, Program, sharing_words

# What the first operation of a lane waits for, and what a lane waits for that has come to the end of its queue.
_NOTHING, _MORE = (bytearray(b"\1"), 0), (bytearray(b"\0"), 0)
# Two steps count as equally long below this relative difference: far above rounding, far below what anybody plans by.
_SETTLED = 1e-4
# So many steps in a row must be alike: two may be by chance while a backlog of the cold start drains.
_ALIKE = 3
# Rounds after which a step time that still swings between several values is averaged instead.
_MOST_ROUNDS = 12
# A lane that is busy for less than this share of the step does not limit it by itself.
_SATURATED = 0.85


_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Timed:
    """When operation `op` of program number `program` ran."""

    program: int
    op: Op
    start_seconds: float
    stop_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneUse:
    """What one lane did in the measured step. `alone_seconds` is what its work takes if no other lane slows it."""

    busy_seconds: float
    alone_seconds: float
    utilisation: float
    bytes: int
    flops: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What a simulation found.

    `step_seconds` is the time per step in the steady state; `lanes` and `explain` speak of program number `measured`.
    `finish_seconds` has, per program, when its last operation stopped. `settled` is false if steps do not (yet) repeat in time.
    `rates` say how fast each lane was, alone and beside others.
    """

    step_seconds: float
    finish_seconds: tuple[float, ...]
    measured: int
    settled: bool
    lanes: dict[Lane, LaneUse]
    bottleneck: Lane
    explanation: str
    rates: Rates = field(repr=False, compare=False)
    programs: tuple[Program, ...] = field(repr=False)
    spans: tuple[tuple[Sequence[float], Sequence[float]], ...] = field(repr=False)  # starts and stops, by program

    @property
    def ops(self) -> tuple[Timed, ...]:
        """All operations, program by program."""
        return tuple(timed for number in range(len(self.programs)) for timed in self._ops_of(number))

    def step_ops(self) -> tuple[Timed, ...]:
        """Return the operations of the measured program, in program order."""
        return self._ops_of(self.measured)

    def _ops_of(self, number: int) -> tuple[Timed, ...]:
        return tuple(Timed(number, *timed) for timed in zip(self.programs[number].ops, *self.spans[number], strict=True))


def simulate(
    programs: Sequence[Program],
    ceilings: Ceilings,
    *,
    compute_dtype: str = "bfloat16",
    compute_threads: int | None = None,
    update_threads: int | None = None,
) -> Timeline:
    """Run consecutive steps on the virtual clock and return when everything happened.

    At least three programs are needed: the first starts cold. If the last two are equal the last is repeated until three
    take equally long (a dozen rounds at most), and the step measured is one that has a successor beside it; otherwise
    it is the last. `compute_threads` counts on machines without a device only. Cost: some 100 000 operations per second.

    Raises:
        ConfigError: the profile has no matrix rate for `compute_dtype`.
        StepFailed: a program is malformed: an operation waits for one that does not precede it.
        ValueError: fewer than three programs.
    """
    clock, repeats = _run(programs, Rates(ceilings, compute_dtype, compute_threads, update_threads))
    while clock.run_until_complete():
        pass
    return _timeline(clock, _measured(clock, repeats), repeats=repeats, given=len(programs))


def step_seconds_of(programs: Sequence[Program], rates: Rates) -> float:
    """Return the seconds per step that `simulate` finds at these `rates`, without what comes after the measured step."""
    clock, repeats = _run(programs, rates)
    measured = _measured(clock, repeats)
    while len(clock.finish) <= measured:
        clock.run_until_complete()
    alone, busy = (dict.fromkeys(Lane, 0.0) for _ in range(2))
    ops, works = clock.programs[measured].ops, clock.work[measured]
    for op, start, stop, work in zip(ops, clock.start[measured], clock.stop[measured], works, strict=True):
        busy[op.lane] += stop - start
        alone[op.lane] += work
    _, period = _settled_period(clock, measured, repeats=repeats, given=len(programs))
    return max(period, *alone.values(), *busy.values())


def _run(programs: Sequence[Program], rates: Rates) -> tuple["_Clock", bool]:
    """Return the clock when all programs are admitted that there will be, and whether the last one repeats."""
    if len(programs) < 3:
        raise ValueError(f"simulate: {len(programs)} programs given, at least 3 are needed to find the steady state")
    used = {op.lane for program in {id(program): program for program in programs}.values() for op in program.ops}
    clock = _Clock(rates, tuple(lane for lane in Lane if lane in used))
    given, repeats = len(programs), programs[-1] == programs[-2]
    clock.admit(programs[0])
    clock.admit(programs[1])
    while clock.run_until_complete():
        admitted = len(clock.programs)
        if admitted < given:
            clock.admit(programs[admitted])
        # Not asked again later: the last steps have no successor, and run differently.
        elif repeats and admitted < given + _MOST_ROUNDS and not clock.settled(since=given - 2):
            clock.admit(programs[-1])
        else:
            break
    return clock, repeats


def _measured(clock: "_Clock", repeats: bool) -> int:
    """Return the number of the program to measure: the very last has no successor that competes with it, if it repeats."""
    return len(clock.programs) - (2 if repeats else 1)


class _Known(dict[int, _Value]):
    """What was found for a set of lanes; an event asks for a few, so no call is made where it is known."""

    def __init__(self, find: Callable[[int], _Value]) -> None:
        super().__init__()
        self._find = find

    def __missing__(self, mask: int) -> _Value:
        value = self[mask] = self._find(mask)
        return value


class _Clock:
    """The event loop. At most one operation per lane is under way, so a scan over the few lanes beats a heap.

    A set of lanes is a bit mask of their places among those that the programs use; only sets that occur are looked into.
    """

    def __init__(self, rates: Rates, lanes: tuple[Lane, ...]) -> None:
        self.rates, self.lanes = rates, lanes
        self.programs: list[Program] = []
        self.done: list[bytearray] = []
        self.left: list[int] = []
        self.start: list[list[float]] = []
        self.stop: list[list[float]] = []
        self.finish: list[float] = []
        self.now = 0.0
        count = len(lanes)
        self.place = {lane: place for place, lane in enumerate(lanes)}
        self.places_of, self.speeds_of = _Known(self._places), _Known(self._speeds)
        self.all_lanes = (1 << count) - 1
        self.work: list[list[float]] = []  # by program and operation: the seconds that it takes alone
        self.queue: list[list[tuple[int, Op]]] = [[] for _ in range(count)]
        self.head = [0] * count
        self.waiting = [0] * count  # dependencies of the head that are known to be done
        self.blocked = [_MORE] * count  # what the head was seen to wait for
        self.busy = 0
        self.speed = [1.0] * count
        self.due = [0.0] * count  # when the lane's operation stops if no speed changes

    def _places(self, mask: int) -> tuple[int, ...]:
        return tuple(place for place in range(len(self.lanes)) if mask >> place & 1)

    def _speeds(self, busy: int) -> tuple[tuple[int, float], ...]:
        places = self.places_of[busy]
        speeds = self.rates.speeds(tuple([self.lanes[place] for place in places]))
        return tuple((place, speeds[self.lanes[place]]) for place in places)

    def admit(self, program: Program) -> None:
        """Append a program to the lanes' queues."""
        number = len(self.programs)
        again = bool(number) and program is self.programs[-1]
        if number < 2 or not again or program is not self.programs[-2]:
            _check(program, number, len(self.programs[-1].ops) if number else None)
        self.work.append(self.work[-1] if again else [self.rates.alone_seconds(op) for op in program.ops])
        self.programs.append(program)
        self.done.append(bytearray(len(program.ops)))
        self.left.append(len(program.ops))
        self.start.append([0.0] * len(program.ops))
        self.stop.append([0.0] * len(program.ops))
        for op in program.ops:
            self.queue[self.place[op.lane]].append((number, op))
        self.blocked = [_NOTHING if blocked is _MORE else blocked for blocked in self.blocked]

    def settled(self, since: int) -> bool:
        """Whether steps have repeated in time from program `since` on, for long enough not to be chance."""
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
        # Not before its predecessors: a short program may overtake the one before it.
        self.finish.append(max([*self.stop[number], *self.finish[-1:]], default=0.0))
        return True

    def _start_ready(self) -> None:
        for place in self.places_of[self.all_lanes ^ self.busy]:
            flags, index = self.blocked[place]
            if flags[index] and self._ready(place):
                number, op = self.queue[place][self.head[place]]
                self.start[number][op.index] = self.now
                self.due[place] = self.now + self.work[number][op.index]
                self.speed[place] = 1.0
                self.busy |= 1 << place
        for place, speed in self.speeds_of[self.busy]:
            # Left alone where nothing changes, so that undisturbed operations take exactly their own seconds.
            if speed != self.speed[place]:
                self.due[place] = self.now + (self.due[place] - self.now) * self.speed[place] / speed
                self.speed[place] = speed

    def _ready(self, place: int) -> bool:
        """Whether the head of a lane may start. What was seen done is not looked at again: one look per dependency."""
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
        """Move to the next end of an operation and complete all that end then."""
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


def _check(program: Program, number: int, previous: int | None) -> None:
    """Refuse a program that could not run: with dependencies that point backwards some lane can always go on."""
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


def _timeline(clock: _Clock, measured: int, *, repeats: bool, given: int) -> Timeline:
    settled, period = _settled_period(clock, measured, repeats=repeats, given=given)
    spans: dict[Lane, list[tuple[float, float]]] = {lane: [] for lane in Lane}
    alone, busy, flops = (dict.fromkeys(Lane, 0.0) for _ in range(3))
    num_bytes = dict.fromkeys(Lane, 0)
    timed = zip(clock.programs[measured].ops, clock.start[measured], clock.stop[measured], clock.work[measured], strict=True)
    for op, start, stop, work in timed:
        lane = op.lane
        spans[lane].append((start, stop))
        busy[lane] += stop - start
        alone[lane] += work
        flops[lane] += op.flops
        num_bytes[lane] += op.bytes
    # While a backlog of the cold start drains, steps end faster than their work takes; no later step can.
    step_seconds = max(period, *alone.values(), *busy.values())
    lanes = {
        lane: LaneUse(
            busy_seconds=busy[lane],
            alone_seconds=alone[lane],
            utilisation=busy[lane] / step_seconds if step_seconds else 0.0,
            bytes=num_bytes[lane],
            flops=flops[lane],
        )
        for lane in Lane
    }
    bottleneck, explanation = _explain(clock.rates, lanes, spans, step_seconds)
    return Timeline(
        step_seconds=step_seconds,
        finish_seconds=tuple(clock.finish),
        measured=measured,
        settled=settled,
        lanes=lanes,
        bottleneck=bottleneck,
        explanation=explanation,
        rates=clock.rates,
        programs=tuple(clock.programs),
        spans=tuple(zip(clock.start, clock.stop, strict=True)),
    )


def _settled_period(clock: _Clock, measured: int, *, repeats: bool, given: int) -> tuple[bool, float]:
    """Return whether steps repeat in time, and the time from one to the next; their mean where they do not."""
    settled = not repeats or (measured > _ALIKE and _agree([clock.period(measured - back) for back in range(_ALIKE)]))
    if settled:
        return True, clock.period(measured)
    first = max(1, (given + measured) // 2)
    return False, (clock.finish[measured] - clock.finish[first - 1]) / (measured - first + 1)


def _agree(values: list[float]) -> bool:
    return max(values) - min(values) <= _SETTLED * max(values)


def _explain(
    rates: Rates, lanes: dict[Lane, LaneUse], spans: dict[Lane, list[tuple[float, float]]], step_seconds: float
) -> tuple[Lane, str]:
    """Return the lane that limits the step, and why in words."""
    bottleneck = max(Lane, key=lambda lane: lanes[lane].utilisation)
    share, words = lanes[bottleneck].utilisation, bottleneck.row.words
    for shared, sharing in rates.shares.items():
        # Two directions that take turns keep busy what they share, though neither is busy itself. Only their union shows it.
        together = sorted(span for lane in sharing for span in spans[lane])
        both = _union_seconds(together) / step_seconds if step_seconds else 0.0
        if rates.shared_factor(sharing) < 1 and both > share + 1e-9:
            bottleneck = max(sharing, key=lambda lane: lanes[lane].utilisation)
            share, words = min(1.0, both), sharing_words(shared, sharing)
    if share >= _SATURATED:
        return bottleneck, f"limited by {words}: busy {share:.0%} of the step"
    return bottleneck, (
        f"no part is busy all the time: the most is {words} with {share:.0%} of the step, "
        "and the rest is waiting for one another; more memory for buffers or more tokens per step would help"
    )


def _union_seconds(spans: list[tuple[float, float]]) -> float:
    total, reached = 0.0, 0.0
    for start, stop in spans:
        total += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return total
