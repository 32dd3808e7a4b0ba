"""A step at a site that computes nothing: weights go to workers, gradients come from them, units are updated (LuWu's node).

Workers say in which order they pull and push, which their own programs fix. The same order is followed here, so that neither
side can wait for the other in a circle. Each operation only needs earlier ones in that order. Threads belong to lanes, and
units rotate through these: read weights, send, receive, read states, update, write (LuWu, section on step-centric pipelining).
Sending goes ahead of demand as far as there are host slots.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from headrace.plan.schedules.ledger import Snapshot
from headrace.plan.schedules.updates import NORM, PIECE, UpdateOps
from headrace.plan.schedules.weights import VERDICT
from headrace.plan.value.plan import Plan
from headrace.terms.lanes import Lane
from headrace.terms.program import Program, Verb

# So many units' weights are read before it is their turn to be sent: reading states for updates must not delay them.
READ_AHEAD = 4


class Turn(NamedTuple):
    """A worker's pull of a unit's weights, or its push of the unit's gradient."""

    unit: int
    is_push: bool


def turns_of(program: Program) -> tuple[Turn, ...]:
    """Return the pulls and pushes of a worker's program, in its order."""
    return tuple(Turn(op.unit, op.verb is Verb.PUSH) for op in program.ops if op.verb in (Verb.PULL, Verb.PUSH))


def build_serving(plan: Plan, turns: Sequence[Turn], before: Snapshot, *, durable: bool = True) -> tuple[Program, Snapshot]:
    """Return the program of one step that serves workers who take these `turns`, and what it leaves behind."""
    schedule = _Serving(plan, turns, before, durable=durable)
    schedule.step()
    return schedule.ledger.finish()


def build_scoring(plan: Plan, turns: Sequence[Turn], before: Snapshot) -> tuple[Program, Snapshot]:
    """Return the program of one pass forward that serves workers who take these `turns`, all of them pulls; nothing changes."""
    schedule = _Serving(plan, turns, before, durable=True)
    schedule.score()
    return schedule.ledger.finish()


def build_serving_tail(plan: Plan, before: Snapshot) -> tuple[Program, Snapshot]:
    """Return the program that finishes what a step left pending: late updates and their commit, as of a checkpoint."""
    schedule = _Serving(plan, (), before, durable=True)
    if schedule.pending:
        for unit in sorted(schedule.pending):
            schedule.pending_update(unit)
        schedule.commit()
    return schedule.ledger.finish()


class _Serving(UpdateOps):
    """Emits operations in order."""

    def __init__(self, plan: Plan, turns: Sequence[Turn], before: Snapshot, *, durable: bool) -> None:
        super().__init__(plan, before, durable=durable)
        self.turns = turns
        self.uses: dict[int, list[int]] = {unit: [] for unit in range(len(plan.units))}
        for position, turn in enumerate(turns):
            self.uses[turn.unit].append(position)

    def step(self) -> None:
        op, due = self.ledger.op, set(self.pending)
        op(Verb.ANNOUNCE, Lane.NIC_DOWN)
        for unit, is_push in self.in_turn():
            if is_push:
                self.receive(unit)
                continue
            if unit in due:
                self.pending_update(unit)
                due.discard(unit)
            self.send(unit)
            if self.pending and not due:  # every update of the step before is emitted
                self.commit()
                self.pending = frozenset()
        assert not due, "workers pull every unit before they push any"
        op(Verb.REPORT, Lane.NIC_UP, (), (NORM + (len(self.plan.units) + 1) * PIECE,))
        op(Verb.DECIDE, Lane.COMPUTE, (NORM,), renews=(VERDICT,))
        if not self.late:
            self.commit()

    def score(self) -> None:
        self.ledger.op(Verb.ANNOUNCE, Lane.NIC_DOWN)
        for unit, is_push in self.in_turn():
            assert not is_push, "a pass forward has no gradients"
            self.send(unit)
        self.ledger.op(Verb.REPORT, Lane.NIC_UP)

    def in_turn(self) -> Iterator[Turn]:
        """Yield the turns, each after what comes next was read ahead."""
        for position, turn in enumerate(self.turns):
            self.position = position - 1  # what is read ahead must leave the unit whose turn it is
            self.read_ahead(position)
            self.position = position
            yield turn

    def send(self, unit: int) -> None:
        host, num_bytes = self.fetch(unit), self.stored_bytes[unit]
        self.ledger.op(Verb.SEND, Lane.NIC_DOWN, (host,), (), unit=unit, num_bytes=num_bytes)

    def read_ahead(self, position: int) -> None:
        """Read what will be sent next, before what updates need meanwhile, as far as there are slots for it."""
        ahead = min(READ_AHEAD, self.plan.host_slots - 2)
        pulls = (turn.unit for turn in self.turns[position : position + 3 * READ_AHEAD] if not turn.is_push)
        for unit in islice(pulls, max(0, ahead)):
            self.fetch(unit)

    def receive(self, unit: int) -> None:
        """Take a unit's gradient; then update the unit, or hold the gradient for later."""
        gradient, num_bytes = self.gradient_slot(unit), self.gradient_bytes[unit]
        writes = (gradient, NORM + (unit + 1) * PIECE)
        self.ledger.op(Verb.RECEIVE, Lane.NIC_UP, (), writes, unit=unit, num_bytes=num_bytes)
        self.settle(unit, gradient, self.fetch(unit) if unit not in self.late else -1)

    def uses_until(self, block: int) -> int:
        later = next((use for use in self.uses[block] if use > self.position), None)
        if later is not None:
            return later - self.position
        first = self.uses[block][0] if self.uses[block] else 0
        return len(self.turns) + first - self.position
