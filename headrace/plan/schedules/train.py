"""A training step: from a plan to the program of one step.

Operations stand in an order in which a single thread could run them, so each dependency points backwards. Lanes that work in
this order never wait for one another in a circle. Each operation names the buffers that it reads and writes; the ledger finds
what it must wait for. A step leaves filled slots, pending updates and the commit to the next. The ledger's snapshot holds them,
and the next step's program is built from it. In the steady state it repeats itself.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.plan.schedules.hosted import HostedStates
from headrace.plan.schedules.ledger import Known, Snapshot, What
from headrace.plan.schedules.parted import PARKED, PartedBlocks
from headrace.plan.schedules.updates import FREE_SLOTS, NORM, PIECE, UpdateOps, held_at
from headrace.plan.schedules.weights import FAR, NONE, RESIDENT, TRAINED, VERDICT
from headrace.plan.value.plan import Plan
from headrace.terms.lanes import Lane
from headrace.terms.program import Pool, Program, Verb, Waiting, buffer

# So many block inputs are brought back to the device ahead of their use, if there are buffers for them. As many as there are
# buffers are read from the SSD before that, so that they do not queue behind the states of updates.
RECALLED_AHEAD = 2

_ACCUMULATOR, _RESIDENT_ACCUMULATOR = buffer(Pool.ACCUMULATOR), buffer(Pool.RESIDENT_ACCUMULATOR)
_STASH, _HOST_STASH, _SSD_STASH = buffer(Pool.STASH), buffer(Pool.HOST_STASH), buffer(Pool.SSD_STASH)
_LEFT, _RECALLED = buffer(Pool.LEFT), buffer(Pool.RECALLED)


def build_program(
    plan: Plan, num_micro_batches: int, before: Snapshot, *, durable: bool = True, shared: bool = False
) -> tuple[Program, Snapshot]:
    """Return the program of one step over `num_micro_batches` micro-batches, and what it leaves behind.

    `durable`: the step before, whose updates are pending, is a checkpoint. Otherwise what stays in memory is not written.
    `shared`: ranks share out every unit (`Weights`).
    """
    schedule = Training(plan, num_micro_batches, before, durable=durable, shared=shared)
    schedule.step()
    return schedule.ledger.finish()


def build_tail(plan: Plan, before: Snapshot, *, shared: bool = False) -> tuple[Program, Snapshot]:
    """Return the program that finishes what a step left pending: late updates and their commit, as of a checkpoint."""
    schedule = Training(plan, 0, before, durable=True, shared=shared)
    if schedule.pending:
        for unit in sorted(schedule.pending):
            schedule.pending_update(unit)
            schedule.forget(unit)
        schedule.commit()
    return schedule.ledger.finish()


def redo(plan: Plan) -> Snapshot:
    """Return what is left after a step was taken back, whose gradients are still held: every update is to be done again."""
    held = sorted((where, unit) for unit, where in held_at(plan).items())
    return Snapshot(tuple(Known(where, unit, (), ()) for where, unit in held))


class Training(UpdateOps):
    """Emits operations in order: of a step, or of a pass after which nothing `learns`."""

    def __init__(
        self, plan: Plan, num_micro: int, before: Snapshot, *, durable: bool = True, shared: bool = False, learns: bool = True
    ) -> None:
        super().__init__(plan, before, durable=durable, shared=shared)
        self.learns, self.paged = learns, self.paged and learns
        self.num_micro, self.micros, self.first = num_micro, range(num_micro), 1
        self.ends, self.trained = frozenset(plan.ends), frozenset(plan.trained_units)
        self.learns_prologue = plan.learns_prologue
        self.come_in_parts = plan.parts is not None
        self.gradient_in_place, self.ends_in_place = plan.gradient_in_place, plan.ends_in_place
        self.parted = PartedBlocks(plan, self.ledger, num_micro)
        self.hosted = HostedStates(plan, self.ledger, num_micro, spills=learns)
        self.stash_turn = self.accumulator_turn = 0
        self.stashed: dict[tuple[int, int], int] = {}  # the operation that brought a block's input to where it waits
        self.read_slots: dict[tuple[int, int], int] = {}  # the buffer in host memory into which a block's input is read
        self.recalled: dict[tuple[int, int], int] = {}  # the buffer from which backward reads it, -1 where compute left it
        self.newest_use: Sequence[int] = ()  # the last use of a block, forward or backward

    # -- the step -------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Emit a step."""
        plan, op = self.plan, self.ledger.op
        last_block, epilogue = self.blocks, self.blocks + 1
        self.first_to_last()
        if plan.has_epilogue:
            self.pending_update(epilogue)
        if self.pending:
            self.commit()
        self.epilogue()
        for block in range(last_block, 0, -1):
            self.position = 2 * last_block - block
            for ahead in range(block, max(block - plan.prefetch, 1) - 1, -1):
                # Updates behind backward work on the host's copy, so they need it there although compute may not.
                self.acquire(ahead, on_host=ahead in self.in_place and ahead not in self.late)
            self.fetch_early(block - plan.prefetch - 1)
            self.backward(block)
        if self.learns_prologue:
            self.prologue_backward()
        # A site's updates must not overtake the commit of the step before.
        far = tuple(FAR + unit for unit in sorted(self.far))
        op(Verb.DECIDE, Lane.COMPUTE, (NORM, *far, FREE_SLOTS) if far else (NORM,), renews=(VERDICT,))
        if not self.late:
            self.commit()

    def first_to_last(self) -> None:
        """Emit the prologue, and the forward of all blocks."""
        self.pending_update(0)
        for end in self.plan.ends:
            self.refresh(end)
        for micro in range(self.num_micro):
            made = self.hosted.going()
            self.ledger.op(Verb.PROLOGUE, Lane.COMPUTE, (RESIDENT,), made, unit=0, micro=micro, flops=self.flops(0))
            self.hosted.leave(1, micro, made)
        for block in range(1, self.blocks + 1):
            self.position = block - 1
            for ahead in range(block, min(block + self.plan.prefetch, self.blocks) + 1):
                self.acquire(ahead, pending=ahead in self.pending)
            self.fetch_early(block + self.plan.prefetch + 1)
            self.forward(block)

    def score(self) -> None:
        """Emit what a pass ends with: the loss of each micro-batch, without gradients."""
        self.visit(self.plan, self.newest_use)
        unit, ends, flops = self.plan.ends[-1], [RESIDENT + end for end in self.plan.ends], self.results.epilogue_flops
        for micro in self.micros:
            self.ledger.op(Verb.SCORE, Lane.COMPUTE, (*ends, *self.arrived(micro)), unit=unit, micro=micro, flops=flops)

    def fetch_early(self, block: int) -> None:
        """Begin to read the weights of the block after those that are acquired: pages need not wait behind states then.
        Nothing is read where it has no slot in host memory, or is on the device.
        """
        streams = self.paged and 0 < block <= self.blocks and block not in self.residents
        if streams and len(self.host_slots) > self.plan.prefetch + 2 and self.find(self.computed_slots, block) < 0:
            self.fetch(block)

    def prologue_backward(self) -> None:
        """Emit the backward of the embedding."""
        common: dict[str, Any] = {"unit": 0, "flops": self.flops(0)}
        for micro in range(self.num_micro):
            reads, made = (RESIDENT, *self.arrived(micro)), self.summed(0)
            self.ledger.op(Verb.PROLOGUE_BACKWARD, Lane.COMPUTE, reads, made, micro=micro, **common)
        if 0 in self.trained:
            self.drain(0, self.gradient_slot(0))

    def groups(self, block: int) -> list[range]:
        """Return the groups of micro-batches that are in a block together."""
        return self.parted.groups(block)

    def forward(self, block: int) -> None:
        """Emit the forward of a block, all micro-batches."""
        self.have_come(block)
        host, computed = self.acquired.pop(block)
        weights, waits = (
            (*self.reads_of(block, host, computed), *self.read_beside(block)),
            self.learns and self.plan.stash.tiers[block - 1] != "device",
        )
        for group in self.groups(block):
            inputs = self.hosted.arrive(group)
            self.parted.forward(block, group, weights, host, inputs)
            for micro in group:
                self.forward_one(block, micro, (*weights, *inputs[micro]), waits=waits)

    def forward_one(self, block: int, micro: int, reads: Sequence[int], *, waits: bool) -> None:
        """Emit the forward of a block for a micro-batch, with the weights that it `reads`."""
        made = self.hosted.going()
        flops = 0.0 if self.parted.has(block) else self.flops(block)
        what: dict[str, Any] = {"unit": block, "micro": micro, "flops": flops, **self.moved(Verb.FORWARD, block)}
        ref = self.ledger.op(
            Verb.FORWARD,
            Lane.COMPUTE,
            reads,
            (*made, _LEFT + self.place(block, micro)) if waits else made,
            # The inputs that wait to go out are bounded: compute may be one block ahead of the stash.
            after=(self.stashed[block - 1, micro],) if (block - 1, micro) in self.stashed else (),
            **what,
        )
        self.hosted.leave(block + 1, micro, made)
        if waits:
            self.stash(block, micro, made)
        self.newest_use = (ref,)
        self.between()

    def epilogue(self) -> None:
        """Emit the head: loss and its gradients."""
        self.visit(self.plan, self.newest_use)
        unit = self.blocks + 1 if self.plan.has_epilogue else 0
        weights = (RESIDENT, RESIDENT + unit, *self.read_beside(unit)) if unit else (RESIDENT,)
        made = self.summed(unit) if self.ends_in_place and not self.plan.tied else self.summed(0, unit)
        if self.plan.batch.head_passes > 1:
            for micro in self.micros:
                reads, flops = (*weights, *self.arrived(micro)), self.results.epilogue_flops
                self.ledger.op(Verb.LOG_PROBS, Lane.COMPUTE, reads, unit=unit, micro=micro, flops=flops)
                self.hosted.keep(self.blocks + 1, micro)
        for micro in self.micros:
            reads, gradient = (*weights, *self.arrived(micro)), self.hosted.going()
            flops = 3 * self.results.epilogue_flops
            self.ledger.op(Verb.EPILOGUE, Lane.COMPUTE, reads, (*made, *gradient), unit=unit, micro=micro, flops=flops)
            self.hosted.leave_gradient(self.blocks, micro, gradient)
        if unit in self.trained and unit:
            self.drain(unit, self.gradient_slot(unit))

    def backward(self, block: int) -> None:
        """Emit the backward of a block, all micro-batches."""
        self.have_come(block)
        host, weights = self.acquired.pop(block)
        is_trained, beside = block in self.trained, (*self.reads_of(block, host, weights)[1:], *self.read_beside(block))
        gradient = self.gradient_slot(block) if is_trained else NONE
        made = () if not is_trained else (gradient,) if self.gradient_in_place else (self.accumulator(),)
        for group in self.groups(block):
            if self.parted.has(block):
                gradients = self.hosted.arrive(group)
                self.recompute(block, group, (weights, *beside), gradients)
                self.parted.backward(block, group, host, made, gradient)
                self.backward_around_experts(block, group, (weights, *beside), gradients, made)
                continue
            for micro in group:
                reads = (weights, *beside, *self.inputs_of(block, micro), *self.arrived(micro))
                self.backward_one(block, micro, reads, made, self.backward_flops(block))
        if is_trained:
            self.drain(block, gradient, host)

    def recompute(self, block: int, group: range, weights: Sequence[int], gradients: Mapping[int, Sequence[int]]) -> None:
        """Recompute a group's micro-batches as far as their experts. Their `gradients` lie there by micro-batch."""
        for micro in group:
            reads, flops = (*weights, *self.inputs_of(block, micro), *gradients[micro]), self.parted.common_flops(block)
            self.newest_use = (self.ledger.op(Verb.RECOMPUTE, Lane.COMPUTE, reads, unit=block, micro=micro, flops=flops),)

    def backward_one(self, block: int, micro: int, reads: Sequence[int], made: Sequence[int], flops: float) -> None:
        """Emit the backward of a block for a micro-batch, which makes a gradient for what comes before, if that is trained."""
        before = block > 1 or self.learns_prologue
        gradient = self.hosted.going() if before else ()
        what: dict[str, Any] = {"unit": block, "micro": micro, "flops": flops, **self.moved(Verb.BACKWARD, block)}
        ref = self.ledger.op(Verb.BACKWARD, Lane.COMPUTE, reads, (*made, *gradient), **what)
        if before:
            self.hosted.leave_gradient(block - 1, micro, gradient)
        self.newest_use = (ref,)
        self.between()

    def moved(self, verb: Verb, block: int) -> What:
        """Return the bytes of parts of a block that compute brings itself for a micro-batch, and of gradients that it takes."""
        parts, width = self.plan.parts, self.plan.planes.weight.bytes_per_element
        if parts is None:
            return {}
        if verb is Verb.FORWARD:
            return {"linked": parts.forward_bytes(block, width)}
        leaving = parts.gradient_bytes(block, width) if block in self.in_place else 0
        return {"linked": parts.backward_bytes(block, width), "leaving": leaving}

    def arrived(self, micro: int) -> tuple[int, ...]:
        """Return the slot of hidden states, or of their gradient, that the next use of a micro-batch reads; () for none."""
        return self.hosted.arrive(range(micro, micro + 1))[micro]

    def backward_around_experts(
        self, block: int, group: range, weights: Sequence[int], gradients: Mapping[int, Sequence[int]], made: Sequence[int]
    ) -> None:
        """Take a group, which was back at the experts, through the rest of the block."""
        times = (2 if self.parted.trains else 1) + self.parted.remakes
        flops = times * self.parted.common_flops(block)
        for micro in group:
            self.backward_one(block, micro, (*weights, *gradients[micro]), made, flops)

    def inputs_of(self, block: int, micro: int) -> tuple[int, ...]:
        """Return the buffer from which backward reads a block's input, () for none; begin to bring it and the next ones."""
        self.recall_ahead(block, micro)
        inputs = self.recalled.pop((block, micro))
        return (inputs,) if inputs >= 0 else ()

    def read_beside(self, unit: int) -> tuple[int, ...]:
        """Return the buffers that compute reads beside a unit's weights."""
        return (TRAINED + unit,) if unit in self.beside else ()

    # -- weights --------------------------------------------------------------------------------------------------------

    def bring_up_to_date(self, block: int, host: int) -> None:
        """Emit the update of a block that waits for it."""
        self.pending_update(block, host)

    def uses_until(self, block: int) -> int:
        """Return how many uses of blocks come before the next one of `block`."""
        blocks = self.blocks
        uses = (block - 1, 2 * blocks - block, 2 * blocks + block - 1) if self.learns else (block - 1, blocks + block - 1)
        return next(use - self.position for use in uses if use > self.position)

    # -- block inputs ---------------------------------------------------------------------------------------------------

    def place(self, block: int, micro: int) -> int:
        """Return the slot of a block's input in the pools that have one for each micro-batch."""
        return block * self.num_micro + micro

    def stash(self, block: int, micro: int, made: Sequence[int]) -> None:
        """Emit what keeps a block's input until backward, and what is kept beside it. A hosted input is there already, and what
        compute `made` last has its slot until all of it has left.
        """
        place, common, hosted = self.place(block, micro), self.input_of(block, micro), self.plan.hosted
        if hosted:
            common["num_bytes"] = self.plan.stash.kept_bytes[block - 1]
            if not common["num_bytes"]:
                return
        on_ssd = self.plan.stash.tiers[block - 1] == "ssd"
        stash = self.stash_slot() if on_ssd else _HOST_STASH + place
        ref = self.ledger.op(Verb.OUT, Lane.DEVICE_TO_HOST, (_LEFT + place, *made), (stash,), **common)
        if on_ssd:
            ref = self.ledger.op(Verb.OUT, Lane.SSD_WRITE, (stash,), (_SSD_STASH + place,), **common)
        if not hosted:  # slots bound what is under way
            self.stashed[block, micro] = ref

    def stash_slot(self) -> int:
        """Return the next buffer for an input on its way to or from the SSD."""
        slot = self.stash_turn
        self.stash_turn = (slot + 1) % self.plan.stash.slots
        return _STASH + slot

    def input_of(self, block: int, micro: int) -> dict[str, Any]:
        """Return what all operations on an input of a block say."""
        return {"unit": block, "micro": micro, "num_bytes": self.plan.stash_bytes(block), "waiting": Waiting.INPUT}

    def recall_ahead(self, block: int, micro: int) -> None:
        """Begin to bring back the inputs of this use and of the next ones, as many as there are buffers for."""
        ahead = max(1, min(self.plan.stash.slots - 1, RECALLED_AHEAD))
        for use in range(max(ahead, self.plan.stash.slots - 2) + 1):
            if block < self.first:
                return
            if (block, micro) not in self.recalled:
                self.read_input(block, micro)
                if use <= ahead:
                    self.recalled[block, micro] = self.recall(block, micro)
            block, micro = (block, micro + 1) if micro + 1 < self.micros.stop else (block - 1, self.micros.start)

    def read_input(self, block: int, micro: int) -> None:
        """Begin to read a block's input from the SSD, if it waits there and is not read yet."""
        if self.plan.stash.tiers[block - 1] == "ssd" and (block, micro) not in self.read_slots:
            place, slot = self.place(block, micro), self.stash_slot()
            self.read_slots[block, micro] = slot
            self.ledger.op(Verb.IN, Lane.SSD_READ, (_SSD_STASH + place,), (slot,), **self.input_of(block, micro))

    def recall(self, block: int, micro: int) -> int:
        """Return the buffer that backward reads, -1 for none."""
        tier = self.plan.stash.tiers[block - 1]
        if tier == "device":
            return -1
        place, common = self.place(block, micro), self.input_of(block, micro)
        stash = self.read_slots.pop((block, micro)) if tier == "ssd" else _HOST_STASH + place
        if not self.separate:
            return stash
        back = _RECALLED + place
        # No slot limits what is recalled to the device, so a recall waits until compute has reached the use before.
        self.ledger.op(Verb.IN, Lane.HOST_TO_DEVICE, (stash,), (back,), after=self.newest_use, **common)
        return back

    # -- gradients ------------------------------------------------------------------------------------------------------

    def accumulator(self) -> int:
        """Return where the gradient of a block is summed, until it is drained."""
        return _ACCUMULATOR + self.accumulator_turn

    def summed(self, *ends: int) -> tuple[int, ...]:
        """Return where gradients of these ends are summed, as far as they are trained."""
        trained = sorted(self.trained.intersection(ends))
        if self.ends_in_place:
            return tuple(self.gradient_slot(unit) for unit in trained)
        return (_RESIDENT_ACCUMULATOR,) if trained else ()

    def drain(self, unit: int, gradient: int, host: int = -1) -> None:
        """Bring a unit's gradient to the host; then update the unit, or hold the gradient for later, or both."""
        op, num_bytes = self.ledger.op, self.gradient_bytes[unit]
        if unit in self.ends:
            made: tuple[int, ...] = () if self.ends_in_place else (_RESIDENT_ACCUMULATOR,)
        else:
            made = () if self.gradient_in_place else (self.accumulator(),)
        writes = (gradient, NORM + (unit + 1) * PIECE)
        if unit in self.in_parts:  # the rest is there already, or waits on the host
            num_bytes = self.plan.summed_elements(unit) * self.plan.gradient_bytes_per_element
            made += (PARKED,) if self.parted.parks(unit) else ()
        op(Verb.DRAIN, Lane.DEVICE_TO_HOST, made, writes, unit=unit, num_bytes=num_bytes)
        if self.shared:
            op(Verb.SCATTER, Lane.NIC_UP, (), writes, unit=unit, num_bytes=num_bytes)
        self.accumulator_turn = (self.accumulator_turn + (unit not in self.ends)) % self.plan.gradients.accumulators
        if unit in self.far:
            op(Verb.PUSH, Lane.NIC_UP, (gradient,), (FAR + unit,), unit=unit, num_bytes=num_bytes)
            self.forget_everywhere(unit)
            return
        self.settle(unit, gradient, host)

    def backward_flops(self, block: int) -> float:
        """Return the operations of a backward: gradients cost twice the forward, and the recompute costs what is neither kept
        nor skipped. Beside frozen weights only gradients of inputs are made, which cost the forward once.
        """
        spared = self.results.spared_flops[block - 1] if self.results.spared_flops else 0.0
        return (2 if block in self.beside else 3) * self.flops(block) - spared
