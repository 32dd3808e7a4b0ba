"""Programs of several machines on one virtual clock: what one sends another receives, at the same time and rate.

Each machine's program comes from its own schedule (`schedules.train` at a worker, `schedules.serve` at a node), with lanes of
its own. A *meeting* is an operation that all of them share. A worker pulls a unit while the node sends it; a worker pushes
while the node receives. It starts when everyone has reached it, and ends for everyone at once; the links (`links.Network`) say
how fast it goes. Meetings have the same order in all programs, so machines cannot wait for one another in a circle. Within a
machine everything is as in `simulate`.

Equal workers meet at every transfer, and so do everything at the same time. One of them stands for all, and the links know
their number. Invariant: that is exact (tests simulate each).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import accumulate
from operator import attrgetter

from headrace.peers.node.links import Network
from headrace.plan.clock.clock import NOTHING, Clock, LaneUse, settle, uses_of
from headrace.plan.clock.rates import Rates
from headrace.plan.clock.simulate import Timed
from headrace.terms.errors import StepFailed
from headrace.terms.lanes import Lane
from headrace.terms.program import Op, Program, Verb

# What workers do, and what the node does at the other end, in one meeting.
_PULLS, _PUSHES = (Verb.PULL, Verb.SEND), (Verb.PUSH, Verb.RECEIVE)
# What a side that has reached a meeting waits for: the others.
_COMING = (bytearray(b"\0"), 0)
_TRANSFERS = (Lane.NIC_DOWN, Lane.NIC_UP)


@dataclass(slots=True)
class RankedOp(Op):
    """An operation of machine number `rank`; `meeting` is the number of its meeting, -1 for none."""

    rank: int = 0
    meeting: int = -1


_FIELDS = tuple(field.name for field in fields(Op))
_values_of = attrgetter(*_FIELDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class JointTimeline:
    """What a simulation of several machines found: seconds of a step in the steady state, and what each lane of each did.

    `ops` are those of the measured step, `uses` their sums by rank and lane. `settled` as in `simulate.Timeline`.
    """

    step_seconds: float
    settled: bool
    ops: tuple[Timed, ...] = field(repr=False)
    uses: dict[tuple[int, Lane], LaneUse] = field(repr=False)

    def of_rank(self, rank: int) -> tuple[Timed, ...]:
        """Return the measured operations of one machine."""
        return tuple(timed for timed in self.ops if isinstance(timed.op, RankedOp) and timed.op.rank == rank)


def simulate_joint(
    steps: Sequence[Sequence[Program]], rates: Sequence[Rates], network: Network, *, transfer_seconds: float = 0.0
) -> JointTimeline:
    """Run consecutive steps of several machines, each step with a program for each machine; return when everything happened.

    `rates` are those of the machines; each transfer takes `transfer_seconds` in addition.

    Raises:
        StepFailed: programs do not meet: their orders differ, or one has a transfer that another lacks.
        ValueError: fewer than three steps.
    """
    joined: dict[tuple[tuple[int, ...], tuple[int, ...]], Program] = {}
    programs: list[Program] = []
    before: tuple[int, ...] = ()  # where each machine's operations begin in the program before
    for step in steps:
        key = tuple(id(program) for program in step), before
        if key not in joined:
            joined[key] = joint_program(step, before)
        programs.append(joined[key])
        before = _firsts(step)
    clock = _JointClock(rates, network, transfer_seconds, programs)
    measured, settled, period = settle(clock, programs)
    step_seconds, uses = uses_of(clock, measured, period)
    spans = zip(clock.programs[measured].ops, clock.start[measured], clock.stop[measured], strict=True)
    return JointTimeline(
        step_seconds=step_seconds,
        settled=settled,
        ops=tuple(Timed(measured, *each) for each in spans),
        uses=dict(zip(clock.seats, uses, strict=True)),
    )


def joint_program(programs: Sequence[Program], before: Sequence[int] = ()) -> Program:
    """Return the programs of several machines as one, whose operations know their machine and their meeting.

    `before` says where each machine's operations begin in the program before this one; (): nothing refers to that.

    Raises:
        StepFailed: they do not meet in the same order.
    """
    orders = [[(op.unit, op.verb in _PUSHES, op.bytes) for op in program.ops if _meets(op)] for program in programs]
    for rank, order in enumerate(orders):
        if order != orders[0]:
            place = next((at for at, (one, other) in enumerate(zip(orders[0], order, strict=False)) if one != other), -1)
            raise StepFailed(
                f"machines 0 and {rank} do not meet: they have {len(orders[0])} and {len(order)} transfers"
                + (f", and number {place} is {orders[0][place]} and {order[place]}" if place >= 0 else "")
            )
    ops: list[Op] = []
    firsts = _firsts(programs)
    for rank, program in enumerate(programs):
        first, earlier, met = firsts[rank], before[rank] if before else 0, 0
        for op in program.ops:
            meeting = -1
            if _meets(op):
                meeting, met = met, met + 1
            values = dict(zip(_FIELDS, _values_of(op), strict=True))
            values["index"] = op.index + first
            values["after"] = tuple([ref + first for ref in op.after])
            values["after_previous"] = tuple([ref + earlier for ref in op.after_previous])
            ops.append(RankedOp(**values, rank=rank, meeting=meeting))
    return Program(tuple(ops))


def _firsts(programs: Sequence[Program]) -> tuple[int, ...]:
    return tuple(accumulate((len(program.ops) for program in programs[:-1]), initial=0))


def _meets(op: Op) -> bool:
    return op.verb in _PULLS or op.verb in _PUSHES


class _JointClock(Clock):
    """The lanes of several machines. A lane's place is that of (machine, lane)."""

    def __init__(self, rates: Sequence[Rates], network: Network, transfer_seconds: float, programs: Sequence[Program]) -> None:
        each = {id(program): program for program in programs}.values()
        used = {(op.rank, op.lane) for program in each for op in program.ops if isinstance(op, RankedOp)}
        self.seats = tuple((rank, lane) for rank in range(len(rates)) for lane in Lane if (rank, lane) in used)
        self.place = {seat: place for place, seat in enumerate(self.seats)}
        self.all_rates, self.network, self.transfer_seconds = rates, network, transfer_seconds
        self.members = len(rates)
        self.come: dict[tuple[int, int], list[int]] = {}  # by meeting not begun: places of lanes that wait
        super().__init__(len(self.seats), partial(_speeds_among, self.seats, rates, network))

    def place_of(self, op: Op) -> int:
        return self.place[_rank(op), op.lane]

    def alone_seconds(self, op: Op) -> float:
        if _meets(op):
            return self.transfer_seconds + op.bytes / self.network.alone_bytes_per_second(op.lane)
        return self.all_rates[_rank(op)].alone_seconds(op)

    def _ready(self, place: int) -> bool:
        return not self.busy >> place & 1 and super()._ready(place)

    def _begin(self, place: int) -> None:
        number, op = self.queue[place][self.head[place]]
        if not isinstance(op, RankedOp) or op.meeting < 0:
            super()._begin(place)
            return
        there = self.come.setdefault((number, op.meeting), [])
        there.append(place)
        self.blocked[place] = _COMING
        if len(there) == self.members:
            for each in self.come.pop((number, op.meeting)):
                self.blocked[each] = NOTHING
                super()._begin(each)


def _speeds_among(
    seats: Sequence[tuple[int, Lane]], rates: Sequence[Rates], network: Network, places: tuple[int, ...]
) -> tuple[tuple[int, float], ...]:
    """Return speeds: what meets goes as fast as links allow, and as the slowest machine of the meeting."""
    speeds: dict[int, float] = {}
    for rank, own in enumerate(rates):
        here = [place for place in places if seats[place][0] == rank]
        found = own.speeds(tuple([seats[place][1] for place in here]))
        speeds |= {place: found[seats[place][1]] for place in here}
    transfers = [lane for lane in _TRANSFERS if any(seats[place][1] is lane for place in places)]
    shares = network.bytes_per_second(transfers) if transfers else {}
    for lane in transfers:
        ends = [place for place in places if seats[place][1] is lane]
        speed = shares[lane] / network.alone_bytes_per_second(lane) * min(speeds[place] for place in ends)
        speeds |= dict.fromkeys(ends, speed)
    return tuple((place, speeds[place]) for place in places)


def _rank(op: Op) -> int:
    return op.rank if isinstance(op, RankedOp) else 0
