"""A stage's part of a training step (AxoNN): its blocks, for one group of micro-batches after the other.

A step is several programs, and what arrives from the neighbours decides which comes next. A unit's gradient is whole only in
the last group's backward. Until then sums wait in host memory, or on the SSD. Invariant: groups go backward in their order, so
sums are grouped as in one process.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.plan.schedules.ledger import Snapshot
from headrace.plan.schedules.train import Training
from headrace.plan.schedules.updates import NORM
from headrace.plan.schedules.weights import RESIDENT, VERDICT
from headrace.plan.value.buffer_sizes import PARKING_SLOTS
from headrace.plan.value.plan import Plan
from headrace.terms.lanes import Lane
from headrace.terms.program import Pool, Program, Verb, Waiting, buffer

_PARKED, _RESIDENT_ACCUMULATOR, _FREE_SLOTS = buffer(Pool.PARKED), buffer(Pool.RESIDENT_ACCUMULATOR), buffer(Pool.FREE_SLOTS)
_PARKING, _SSD_PARKED = buffer(Pool.PARKING), buffer(Pool.SSD_PARKED)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePart:
    """What a stage does of a step: the units of its `blocks`, of a step of `num_micro` micro-batches.

    `durable`: the step before, whose updates are pending, is a checkpoint.
    """

    blocks: range
    num_micro: int
    durable: bool = True
    is_first: bool = False
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class StageGroup:
    """Micro-batches that go through a stage together; whether they are the step's first ones, or its last."""

    micros: range
    is_first: bool
    is_last: bool


def build_opening(plan: Plan, part: StagePart, before: Snapshot) -> tuple[Program, Snapshot]:
    """Return the program that begins a step: units outside the blocks are brought up to date, and the prologue runs."""
    schedule = _Stage(plan, part, before)
    schedule.opening()
    return schedule.ledger.finish()


def build_onward(
    plan: Plan, part: StagePart, before: Snapshot, group: StageGroup, *, commits: bool
) -> tuple[Program, Snapshot]:
    """Return the program of a group's forward; at the last stage, of its loss and backward, too. `commits`: the step before is
    still to be committed.
    """
    schedule = _Stage(plan, part, before, group)
    schedule.onward()
    if commits:
        schedule.commit_late()
    if part.is_last:
        schedule.epilogue()
        schedule.back()
    return schedule.ledger.finish()


def build_back(plan: Plan, part: StagePart, before: Snapshot, group: StageGroup) -> tuple[Program, Snapshot]:
    """Return the program of a group's backward."""
    schedule = _Stage(plan, part, before, group)
    schedule.back()
    return schedule.ledger.finish()


def build_verdict(plan: Plan, part: StagePart, before: Snapshot, last: Program) -> tuple[Program, Snapshot]:
    """Return the program that ends a step, right after that of the `last` group's backward."""
    schedule = _Stage(plan, part, before)
    # Square sums pass between operations of one program; here they were taken in the one before.
    schedule.decide([~op.index for op in last.ops if op.verb is Verb.DRAIN])
    return schedule.ledger.finish()


def build_closing(plan: Plan, part: StagePart, before: Snapshot) -> tuple[Program, Snapshot]:
    """Return the program that finishes what a step left pending; all stages commit, whether they have anything pending."""
    schedule = _Stage(plan, part, before)
    for unit in sorted(schedule.pending):
        schedule.pending_update(unit)
        schedule.forget(unit)
    schedule.commit_late()
    return schedule.ledger.finish()


def build_stage_pass(plan: Plan, part: StagePart, before: Snapshot) -> tuple[Program, Snapshot]:
    """Return the program of a forward pass through a stage without training; the last stage scores."""
    schedule = _Stage(plan, part, before, learns=False)
    schedule.onward()
    if part.is_last:
        schedule.score()
    return schedule.ledger.finish()


def build_alone(plan: Plan, before: Snapshot, *, durable: bool = True) -> tuple[Program, Snapshot]:
    """Return the program of a whole step of a stage whose neighbours are always ready, for the simulator.

    As many groups go ahead as may be in flight, then one returns for each that comes.
    """
    stage, num_micro = plan.stage, plan.batch.num_micro_batches
    assert stage is not None, "the plan of a stage"
    part = StagePart(
        blocks=plan.own_blocks, num_micro=num_micro, durable=durable, is_first=stage.is_first, is_last=stage.is_last
    )
    schedule = _Stage(plan, part, before)
    commits, groups = bool(schedule.pending), stage_groups_of(stage.groups_of(num_micro))
    schedule.opening()
    onward = 0
    for back, group in enumerate(groups):
        for ahead in groups[onward : back + stage.in_flight]:
            schedule.enter(ahead)
            schedule.onward()
            if ahead.is_first and commits:
                schedule.commit_late()
            onward += 1
        if part.is_last:
            schedule.epilogue()
        else:
            schedule.enter(group)
        schedule.back()
    schedule.decide(())
    return schedule.ledger.finish()


def stage_groups_of(micros: Sequence[range]) -> list[StageGroup]:
    """Return the groups of a step that have these micro-batches."""
    last = len(micros) - 1
    return [StageGroup(each, is_first=at == 0, is_last=at == last) for at, each in enumerate(micros)]


class _Stage(Training):
    """Emits operations in order. Without a `group` no block is run."""

    def __init__(
        self, plan: Plan, part: StagePart, before: Snapshot, group: StageGroup | None = None, *, learns: bool = True
    ) -> None:
        super().__init__(plan, part.num_micro, before, durable=part.durable, learns=learns)
        self.part, self.first = part, part.blocks.start
        self.laid_down, self.parking_turn = frozenset(plan.parked_on_ssd), 0
        self.enter(group or StageGroup(range(part.num_micro), is_first=True, is_last=True))

    def enter(self, group: StageGroup) -> None:
        """Let what follows be of `group`."""
        self.group, self.micros, self.position = group, group.micros, 0
        self.uses = [*self.part.blocks, *(reversed(self.part.blocks) if self.learns else ())]  # of blocks, from now on

    def place(self, block: int, micro: int) -> int:
        """See `Training.place`. Those micro-batches have places that may be in flight together."""
        most = self.plan.micros_in_flight
        return block * most + micro % most

    def groups(self, block: int) -> list[range]:
        """See `Training.groups`: each micro-batch alone."""
        return [range(micro, micro + 1) for micro in self.micros]

    def opening(self) -> None:
        """Emit what a step begins with."""
        for unit in self.plan.ends:
            self.pending_update(unit)
        for micro in range(self.num_micro):
            self.ledger.op(Verb.PROLOGUE, Lane.COMPUTE, (RESIDENT,), unit=0, micro=micro, flops=self.flops(0))

    def onward(self) -> None:
        """Emit the blocks' forward."""
        for position, block in enumerate(self.part.blocks):
            self.position = position
            for ahead in self.part.blocks[self.position : self.position + self.plan.prefetch + 1]:
                self.acquire(ahead, pending=self.group.is_first and ahead in self.pending)
            self.forward(block)

    def back(self) -> None:
        """Emit the blocks' backward."""
        downward, begun = self.part.blocks[::-1], len(self.part.blocks) if self.part.is_last else 0
        if not begun:
            self.uses = [*downward, *self.part.blocks]
        if self.part.is_last and self.plan.tied and 0 in self.trained and self.group.is_last:
            self.ledger.op(Verb.GIVE, Lane.NIC_UP, (_RESIDENT_ACCUMULATOR,), unit=0)
        for place, block in enumerate(downward):
            self.position = begun + place
            for ahead in downward[place : place + self.plan.prefetch + 1]:
                # Updates behind backward work on the host's copy, so they need it there although compute may not.
                at_once = self.group.is_last and ahead in self.in_place and ahead not in self.late
                self.acquire(ahead, on_host=at_once)
            if block in self.trained and not self.group.is_first:
                made, what, parked = (self.accumulator(),), self.sum_of(block), self.parking(block)
                if block in self.laid_down:
                    self.ledger.op(Verb.IN, Lane.SSD_READ, (_SSD_PARKED + block,), (parked,), **what)
                self.ledger.op(Verb.IN, Lane.HOST_TO_DEVICE, (parked,), made, **what)
            self.backward(block)

    def decide(self, drained: Sequence[int]) -> None:
        """Emit what ends a step: the gradient of the prologue, the verdict after what was `drained`, and the commit unless
        updates wait.
        """
        if self.part.is_first and 0 in self.trained:
            if self.plan.tied:
                self.ledger.op(Verb.TAKE, Lane.NIC_DOWN, (), (_RESIDENT_ACCUMULATOR,), unit=0)
            self.prologue_backward()
        self.ledger.op(Verb.DECIDE, Lane.COMPUTE, (NORM,), renews=(VERDICT,), after=drained)
        if not self.late:
            self.commit()

    def commit_late(self) -> None:
        """Emit the commit of the step before, which this stage makes even where none of its own updates were pending."""
        self.ledger.op(Verb.COMMIT, Lane.COMMIT, (VERDICT,), (_FREE_SLOTS,), late=True)

    def drain(self, unit: int, gradient: int, host: int = -1) -> None:
        """See `Training.drain`. Before the last group the sum waits: of a block in host memory or on the SSD, else where it
        is.
        """
        if self.group.is_last:
            super().drain(unit, gradient, host)
        elif unit not in self.ends:
            made, what, parked = (self.accumulator(),), self.sum_of(unit), self.parking(unit)
            self.ledger.op(Verb.OUT, Lane.DEVICE_TO_HOST, made, (parked,), **what)
            if unit in self.laid_down:
                self.ledger.op(Verb.OUT, Lane.SSD_WRITE, (parked,), (_SSD_PARKED + unit,), **what)
            self.accumulator_turn = (self.accumulator_turn + 1) % self.plan.gradients.accumulators

    def sum_of(self, unit: int) -> dict[str, Any]:
        """Return what all operations on a sum that waits say."""
        return {"unit": unit, "num_bytes": 4 * self.plan.units[unit].gradient_elements, "waiting": Waiting.SUM}

    def parking(self, unit: int) -> int:
        """Return the buffer in host memory where a unit's sum waits, or the next one of those on its way to or from the SSD."""
        if unit not in self.laid_down:
            return _PARKED + unit
        slot = self.parking_turn
        self.parking_turn = (slot + 1) % PARKING_SLOTS
        return _PARKING + slot

    def uses_until(self, block: int) -> int:
        return _distance(self.uses, self.position, block)


def _distance(uses: Sequence[int], position: int, block: int) -> int:
    """Return after how many further uses it is `block`'s turn; after all of these, if it is not among them."""
    return next((at - position for at in range(position + 1, len(uses)) if uses[at] == block), len(uses) - position)
