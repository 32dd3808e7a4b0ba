"""The simulated interpreter: programs on a virtual clock, at the rates that a machine profile declares.

This is the planner's time model (docs/decisions/0006). It runs the very operations that the engine will run. Each lane runs its
own in program order; an operation starts when its lane is free and everything that it waits for is complete. As in the engine,
a program starts only when the last but one is complete.

Operations that run at once may slow one another. Examples are reads and writes of one drive, both directions of a link, and
lanes that share cores or memory bandwidth. So an operation has an amount of work, in seconds that it takes alone. Its speed is
at most 1, and changes whenever another lane starts or stops. Its duration is found by running events, not fixed beforehand.

Invariant: the result follows from programs and ceilings alone. Where nothing slows anything, faster lanes never make any
operation later (start times are maxima of sums). If lanes do share, earlier work can delay work that matters more, in the model
as on a real machine. The tests state how little that is.

No clock, no files, no torch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from headrace.plan.clock.clock import Clock, LaneUse, settle, uses_of
from headrace.plan.clock.rates import Rates
from headrace.terms.lanes import Lane, sharing_words, words_of_lane
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.program import Op, Program

# A lane that is busy for less than this share of the step does not limit it by itself.
_SATURATED = 0.85


@dataclass(frozen=True, slots=True)
class Timed:
    """When operation `op` of program number `program` ran."""

    program: int
    op: Op
    start_seconds: float
    stop_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What a simulation found.

    `step_seconds` is the time per step in the steady state; `lanes` and `explanation` are about program number `measured`.
    `finish_seconds` has for each program when its last operation stopped. `settled` is false if steps are not (yet) equally
    long. `rates` say how fast each lane is, alone and beside others.
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

    At least three programs are needed, because the first starts cold. If the last two are equal, the last is repeated until
    three take equally long, a dozen rounds at most. The measured step then is one that has a successor beside it; otherwise it
    is the last. `compute_threads` counts on machines without a device only. Cost: some 100 000 operations per second.

    Raises:
        ConfigError: the profile has no matrix rate for `compute_dtype`.
        StepFailed: a program is malformed: an operation waits for one that does not precede it.
        ValueError: fewer than three programs.
    """
    clock = _LaneClock(Rates(ceilings, compute_dtype, compute_threads, update_threads), programs)
    measured, settled, period = settle(clock, programs)
    step_seconds, uses = uses_of(clock, measured, period)
    lanes = {lane: uses[clock.place[lane]] if lane in clock.place else LaneUse() for lane in Lane}
    spans: dict[Lane, list[tuple[float, float]]] = {lane: [] for lane in Lane}
    for op, *span in zip(clock.programs[measured].ops, clock.start[measured], clock.stop[measured], strict=True):
        spans[op.lane].append((span[0], span[1]))
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


def step_seconds_of(programs: Sequence[Program], rates: Rates) -> float:
    """Return the seconds per step that `simulate` finds at these `rates`, without running on after the measured step."""
    clock = _LaneClock(rates, programs)
    measured, _, period = settle(clock, programs, whole=False)
    return uses_of(clock, measured, period)[0]


def seconds_of(programs: Sequence[Program], rates: Rates) -> list[float]:
    """Return when each of `programs`, which follow one another, is complete."""
    clock = _LaneClock(rates, programs)
    for number, program in enumerate(programs):
        clock.admit(program)
        if number:
            clock.run_until_complete()
    clock.run_until_complete()
    return clock.finish


class _LaneClock(Clock):
    """The lanes of one machine that `programs` use."""

    def __init__(self, rates: Rates, programs: Sequence[Program]) -> None:
        used = {op.lane for program in {id(program): program for program in programs}.values() for op in program.ops}
        lanes = tuple(lane for lane in Lane if lane in used)
        self.rates, self.place = rates, {lane: place for place, lane in enumerate(lanes)}

        def speeds_among(places: tuple[int, ...]) -> tuple[tuple[int, float], ...]:
            speeds = rates.speeds(tuple([lanes[place] for place in places]))
            return tuple((place, speeds[lanes[place]]) for place in places)

        super().__init__(len(lanes), speeds_among)

    def place_of(self, op: Op) -> int:
        return self.place[op.lane]

    def alone_seconds(self, op: Op) -> float:
        return self.rates.alone_seconds(op)


def _explain(
    rates: Rates, lanes: dict[Lane, LaneUse], spans: dict[Lane, list[tuple[float, float]]], step_seconds: float
) -> tuple[Lane, str]:
    """Return the lane that limits the step, and why in words."""
    bottleneck = max(Lane, key=lambda lane: lanes[lane].utilisation)
    share, words = lanes[bottleneck].utilisation, words_of_lane(bottleneck, has_device=rates.ceilings.has_device)
    for shared, sharing in rates.shares.items():
        # Two directions that take turns keep busy what they share, though neither is always busy itself. Only their union shows
        # it.
        both = union_seconds(span for lane in sharing for span in spans[lane]) / step_seconds if step_seconds else 0.0
        if rates.shared_factor(sharing) < 1 and both > share + 1e-9:
            bottleneck = max(sharing, key=lambda lane: lanes[lane].utilisation)
            share, words = min(1.0, both), sharing_words(shared, sharing, has_device=rates.ceilings.has_device)
    if share >= _SATURATED:
        return bottleneck, f"limited by {words}: busy {share:.0%} of the step"
    return bottleneck, (
        f"no part is busy all the time: the most is {words} with {share:.0%} of the step, and the rest is waiting for one "
        "another. More memory for buffers or more tokens per step would help"
    )


def union_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """Return the seconds that at least one of the spans (start, stop) covers."""
    total, reached = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return total
