"""The builder of programs before the ledger: it kept six slots on each operation and wrote out each hazard where it arises.

It is the reference for `headrace.plan.schedules.train`: the same operations in the same order, at the same simulated times.
A reference to an operation is its index, or `~index` (negative) for one of the previous program.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any, NamedTuple

from headrace.plan.plan import Plan
from headrace.terms.program import Lane, Program, Verb

RECALLED_AHEAD = 2


@dataclass(slots=True, kw_only=True)
class SlottedOp:
    """An operation with the slot of each pool that it uses, -1 where it uses none."""

    index: int
    verb: Verb
    lane: Lane
    unit: int = -1
    micro: int = -1
    chunk: int = -1
    host_slot: int = -1
    device_slot: int = -1
    state_slot: int = -1
    device_state_slot: int = -1
    gradient_slot: int = -1
    stash_slot: int = -1
    phase: str = "forward"
    late: bool = False
    bytes: int = 0
    flops: float = 0.0
    after: tuple[int, ...] = ()
    after_previous: tuple[int, ...] = ()


Refs = tuple[int, ...]


class Slot(NamedTuple):
    """A weight buffer: which block is in it, what makes its content valid, what still reads it."""

    unit: int = -1
    ready: Refs = ()
    busy: Refs = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Carry:
    """What a program leaves to its successor: contents of slots, and references to the operations to wait for."""

    host: tuple[Slot, ...]
    device: tuple[Slot, ...]
    state_busy: tuple[Refs, ...]
    gradient_busy: tuple[Refs, ...]  # per slot: the ring, the resident units', then one for each unit
    stash_busy: tuple[Refs, ...]
    weights_stored: tuple[Refs, ...]  # per unit: the writes that put its newest weights on the SSD
    states_stored: tuple[Refs, ...]
    resident_ready: tuple[Refs, ...]  # per unit: what made the resident weights valid
    device_state_busy: tuple[Refs, ...] = ()
    staging_busy: Refs = ()  # the host copy through which resident weights reach a separate device
    held: tuple[Refs, ...] = ()  # per unit: what made its held gradient valid
    written: Refs = ()  # by the step, so far: the commit that its successor does waits for it
    commit: Refs = ()
    decide: Refs = ()
    pending: tuple[int, ...] = ()  # units (not references) whose update is still to be done


def cold_carry(plan: Plan) -> Carry:
    """Return the carry of a step that follows nothing: empty slots, nothing pending."""
    per_unit: tuple[Refs, ...] = ((),) * len(plan.units)
    return Carry(
        host=(Slot(),) * plan.host_slots,
        device=(Slot(),) * plan.device_slots,
        state_busy=((),) * plan.state_slots,
        gradient_busy=((),) * (plan.gradient_slots + 1 + len(plan.units)),
        stash_busy=((),) * plan.stash_slots,
        weights_stored=per_unit,
        states_stored=per_unit,
        resident_ready=per_unit,
        held=per_unit,
        device_state_busy=((),) * plan.device_state_slots,
    )


def redo_carry(plan: Plan) -> Carry:
    """Return the carry after a step was taken back whose gradients are held still: every update is to be done again."""
    return replace(cold_carry(plan), pending=tuple(range(len(plan.units))))


def _map_refs(value: Any, change: Callable[[Refs], Refs]) -> Any:
    """Apply `change` to each tuple of references inside a carry's field."""
    if isinstance(value, Slot):
        return Slot(value.unit, change(value.ready), change(value.busy))
    if isinstance(value, tuple) and all(isinstance(item, int) for item in value):
        return change(value)
    return tuple(_map_refs(item, change) for item in value)


def renumbered(carry: Carry, change: Callable[[Refs], Refs]) -> Carry:
    """Return `carry` with `change` applied to each tuple of references."""
    refs = {field.name: getattr(carry, field.name) for field in fields(Carry) if field.name != "pending"}
    return Carry(**{name: _map_refs(value, change) for name, value in refs.items()}, pending=carry.pending)


def build_program(plan: Plan, num_micro_batches: int, carry: Carry) -> tuple[Program, Carry]:
    """Return the program of one step over `num_micro_batches` micro-batches, and what it leaves behind."""
    builder = _Builder(plan, num_micro_batches, carry)
    builder.step()
    return builder.finish()


def build_tail(plan: Plan, carry: Carry) -> tuple[Program, Carry]:
    """Return the program that finishes what a step left pending: late updates and their commit."""
    builder = _Builder(plan, 0, carry)
    if carry.pending:
        for unit in carry.pending:
            builder.pending_update(unit)
        builder.commit()
    return builder.finish()


class _Builder:
    """Emits operations in order; the lists below are the newest knowledge about each buffer."""

    def __init__(self, plan: Plan, num_micro: int, carry: Carry) -> None:
        self.plan, self.num_micro = plan, num_micro
        self.ops: list[SlottedOp] = []
        self.shared_refs: dict[Refs, Refs] = {}
        before = renumbered(carry, lambda refs: tuple(~ref for ref in refs))
        self.before = before
        # As sets: looked into for each unit.
        self.held_in_memory, self.pending = frozenset(plan.held_in_memory), frozenset(before.pending)
        self.host, self.device = list(before.host), list(before.device)
        self.state_busy, self.gradient_busy = list(before.state_busy), list(before.gradient_busy)
        self.stash_busy, self.device_state_busy = list(before.stash_busy), list(before.device_state_busy)
        self.weights_stored, self.states_stored = list(before.weights_stored), list(before.states_stored)
        self.resident_ready, self.staging_busy = list(before.resident_ready), before.staging_busy
        self.held: list[Refs] = [()] * len(plan.units)
        self.drains: list[int] = []
        self.accumulator_free: Refs = ()
        self.written: list[int] = list(before.written)
        self.commit_refs: Refs = ()
        self.decide_refs: Refs = ()
        self.state_turn = self.gradient_turn = self.stash_turn = self.device_state_turn = 0
        self.first_chunk = list(accumulate((plan.num_chunks(unit) for unit in range(len(plan.units))), initial=0))
        self.position = 0  # of compute, in the order of block uses: forward 0..L-1, backward L..2L-1
        self.acquired: dict[int, tuple[int, int, Refs]] = {}  # block -> host slot, device slot, ready
        self.stashed: dict[tuple[int, int], Refs] = {}
        self.recalled: dict[tuple[int, int], tuple[int, Refs]] = {}
        self.newest_use: Refs = ()  # the block that was run last, forward or backward

    def emit(self, verb: Verb, lane: Lane, after: Iterable[int], **fields: Any) -> int:
        wanted = sorted(set(after))
        previous = bisect_left(wanted, 0)
        here, there = tuple(wanted[previous:]), tuple([~ref for ref in reversed(wanted[:previous])])
        op = SlottedOp(
            index=len(self.ops),
            verb=verb,
            lane=lane,
            # Chunks of a unit often wait for all of it: one tuple for all of them, not as many as chunks.
            after=self.shared_refs.setdefault(here, here),
            after_previous=self.shared_refs.setdefault(there, there),
            **fields,
        )
        self.ops.append(op)
        return op.index

    def finish(self) -> tuple[Program, Carry]:
        carry = Carry(
            host=tuple(self.host),
            device=tuple(self.device),
            state_busy=tuple(self.state_busy),
            gradient_busy=tuple(self.gradient_busy),
            stash_busy=tuple(self.stash_busy),
            weights_stored=tuple(self.weights_stored),
            states_stored=tuple(self.states_stored),
            resident_ready=tuple(self.resident_ready),
            device_state_busy=tuple(self.device_state_busy),
            staging_busy=self.staging_busy,
            held=tuple(self.held),
            written=tuple(self.written),
            commit=self.commit_refs or self.before.commit,
            decide=self.decide_refs,
            pending=tuple(unit for unit in range(len(self.plan.units)) if unit in self.plan.late_units)
            if self.num_micro
            else (),
        )
        return Program(tuple(self.ops)), renumbered(carry, lambda refs: tuple(ref for ref in refs if ref >= 0))

    # -- the step -------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        plan = self.plan
        last_block, epilogue = plan.num_blocks, plan.num_blocks + 1
        self.pending_update(0)
        for micro in range(self.num_micro):
            self.emit(Verb.PROLOGUE, Lane.COMPUTE, self.resident_ready[0], unit=0, micro=micro, flops=self.flops(0))
        for block in range(1, last_block + 1):
            self.position = block - 1
            for ahead in range(block, min(block + plan.prefetch, last_block) + 1):
                self.acquire(ahead, "forward")
            self.forward(block)
        if plan.has_epilogue:
            self.pending_update(epilogue)
        if self.before.pending:
            self.commit()
        self.epilogue()
        for block in range(last_block, 0, -1):
            self.position = 2 * last_block - block
            for ahead in range(block, max(block - plan.prefetch, 1) - 1, -1):
                self.acquire(ahead, "backward")
            self.backward(block)
        refs = [
            # Both resident units accumulate in one buffer; the epilogue's drain is the first.
            self.emit(
                Verb.PROLOGUE_BACKWARD,
                Lane.COMPUTE,
                # Changed: without an epilogue it waited for the last block's drain, for which there was no reason.
                self.drains[:1] if self.plan.has_epilogue else (),
                unit=0,
                micro=micro,
                phase="backward",
                flops=self.flops(0),
            )
            for micro in range(self.num_micro)
        ]
        self.drain(0, refs, self.gradient_slot(0))
        self.decide_refs = (self.emit(Verb.DECIDE, Lane.COMPUTE, self.drains, phase="backward"),)
        if not plan.late_units:
            self.commit()

    def forward(self, block: int) -> None:
        host, device, ready = self.acquired.pop(block)
        for micro in range(self.num_micro):
            # What waits for its way out is bounded: compute may be one block ahead of the stash.
            after = [*ready, *self.stashed.get((block - 1, micro), ())]
            ref = self.emit(
                Verb.FORWARD,
                Lane.COMPUTE,
                after,
                unit=block,
                micro=micro,
                host_slot=host,
                device_slot=device,
                flops=self.flops(block),
            )
            self.weights_read(host, device, ref)
            self.stash(block, micro, ref)
            self.newest_use = (ref,)

    def epilogue(self) -> None:
        unit = self.plan.num_blocks + 1 if self.plan.has_epilogue else 0
        after = [*self.resident_ready[0], *self.resident_ready[unit]]
        refs = [
            self.emit(
                Verb.EPILOGUE,
                Lane.COMPUTE,
                after,
                unit=unit,
                micro=micro,
                phase="backward",
                flops=3 * self.plan.results.epilogue_flops,
            )
            for micro in range(self.num_micro)
        ]
        if unit:
            self.drain(unit, refs, self.gradient_slot(unit))

    def backward(self, block: int) -> None:
        host, device, ready = self.acquired.pop(block)
        gradient = self.gradient_slot(block)
        after = [*ready]
        if self.plan.accumulate or self.plan.separate_device:
            after += self.accumulator_free  # there is one; the block before must be drained
        else:
            after += self.gradient_busy[gradient]  # the gradient is made where it will be read
        refs = []
        for micro in range(self.num_micro):
            self.recall_ahead(block, micro)
            stash, recalled = self.recalled.pop((block, micro))
            ref = self.emit(
                Verb.BACKWARD,
                Lane.COMPUTE,
                [*after, *recalled],
                unit=block,
                micro=micro,
                phase="backward",
                host_slot=host,
                device_slot=device,
                gradient_slot=gradient,
                stash_slot=stash,
                flops=self.backward_flops(block),
            )
            if stash >= 0 and not self.plan.separate_device:
                self.stash_busy[stash] = (ref,)
            self.weights_read(host, device, ref)
            self.newest_use = (ref,)
            refs.append(ref)
        self.drain(block, refs, gradient, host)
        self.accumulator_free = (self.drains[-1],)

    # -- weights --------------------------------------------------------------------------------------------------------

    def acquire(self, block: int, phase: str) -> None:
        """Make `block`'s weights ready for compute at its coming use; with an update pending, by updating them."""
        if block in self.acquired:
            return
        separate = self.plan.separate_device
        pending = phase == "forward" and block in self.pending
        device = _find(self.device, block) if separate and not pending else -1
        # Updates behind backward work on the host's copy, so backward wants it there although compute may not need it.
        if device >= 0 and not (phase == "backward" and block not in self.plan.late_units):
            self.acquired[block] = (-1, device, self.device[device].ready)
            return
        host = self.fetch(block, phase)
        # Hold the slot while the rest is arranged: nothing may choose it as its victim.
        self.acquired[block] = (host, device, self.host[host].ready)
        if pending:
            self.pending_update(block, host)
        if separate and device < 0:
            device = self.upload(block, host)
        self.acquired[block] = (host, device, (self.device[device] if separate else self.host[host]).ready)

    def fetch(self, block: int, phase: str) -> int:
        found = _find(self.host, block)
        if found >= 0:
            return found
        slot = self.victim(self.host)
        old = self.host[slot]
        ref = self.emit(
            Verb.FETCH,
            Lane.SSD_READ,
            [*old.busy, *old.ready, *self.weights_stored[block]],
            unit=block,
            host_slot=slot,
            phase=phase,
            bytes=self.weight_bytes(block),
        )
        self.host[slot] = Slot(block, (ref,))
        return slot

    def upload(self, block: int, host: int) -> int:
        slot = _find(self.device, block)  # an older version of the block is replaced where it is
        slot = slot if slot >= 0 else self.victim(self.device)
        old = self.device[slot]
        ref = self.emit(
            Verb.UPLOAD,
            Lane.HOST_TO_DEVICE,
            [*self.host[host].ready, *old.busy, *old.ready],
            unit=block,
            host_slot=host,
            device_slot=slot,
            bytes=self.weight_bytes(block),
        )
        self.device[slot] = Slot(block, (ref,))
        self.add_reader(self.host, host, ref)
        return slot

    def victim(self, slots: list[Slot]) -> int:
        """Return the slot whose block is used again last (Belady 1966: the order of use is known)."""
        for index, slot in enumerate(slots):
            if slot.unit < 0:
                return index
        free = [index for index, slot in enumerate(slots) if slot.unit not in self.acquired]
        return max(free, key=lambda index: (self.uses_until(slots[index].unit), -index))

    def uses_until(self, block: int) -> int:
        blocks = self.plan.num_blocks
        return next(
            use - self.position for use in (block - 1, 2 * blocks - block, 2 * blocks + block - 1) if use > self.position
        )

    def weights_read(self, host: int, device: int, ref: int) -> None:
        separate = self.plan.separate_device
        self.add_reader(self.device if separate else self.host, device if separate else host, ref)

    @staticmethod
    def add_reader(slots: list[Slot], index: int, ref: int) -> None:
        unit, ready, busy = slots[index]
        slots[index] = Slot(unit, ready, (*busy, ref))

    # -- block inputs ---------------------------------------------------------------------------------------------------

    def stash(self, block: int, micro: int, made: int) -> None:
        tier = self.plan.stash_tiers[block - 1]
        if tier == "device":
            return
        after, slot = [made], -1
        if tier == "ssd":
            slot = self.take_stash_slot()
            after += self.stash_busy[slot]
        common: dict[str, Any] = {"unit": block, "micro": micro, "stash_slot": slot, "bytes": self.plan.stash_bytes(block)}
        ref = self.emit(Verb.STASH, Lane.DEVICE_TO_HOST, after, **common)
        if tier == "ssd":
            ref = self.emit(Verb.SPILL, Lane.SSD_WRITE, [ref], **common)
            self.stash_busy[slot] = (ref,)
        self.stashed[block, micro] = (ref,)

    def take_stash_slot(self) -> int:
        slot = self.stash_turn
        self.stash_turn = (slot + 1) % self.plan.stash_slots
        return slot

    def recall_ahead(self, block: int, micro: int) -> None:
        """Start bringing back the inputs of this use and of the next ones, as many as there are buffers for."""
        ahead = max(1, min(self.plan.stash_slots - 1, RECALLED_AHEAD))
        for _ in range(ahead + 1):
            if block < 1:
                return
            if (block, micro) not in self.recalled:
                self.recalled[block, micro] = self.recall(block, micro)
            block, micro = (block, micro + 1) if micro + 1 < self.num_micro else (block - 1, 0)

    def recall(self, block: int, micro: int) -> tuple[int, Refs]:
        """Return the stash slot that backward reads (-1: none) and what it waits for."""
        plan, tier = self.plan, self.plan.stash_tiers[block - 1]
        if tier == "device":
            return -1, ()
        refs, slot = self.stashed[block, micro], -1
        common: dict[str, Any] = {"unit": block, "micro": micro, "phase": "backward", "bytes": plan.stash_bytes(block)}
        if tier == "ssd":
            slot = self.take_stash_slot()
            refs = (self.emit(Verb.UNSPILL, Lane.SSD_READ, [*refs, *self.stash_busy[slot]], stash_slot=slot, **common),)
            self.stash_busy[slot] = refs
        if plan.separate_device:
            # Not before compute has come so far: what is recalled takes memory of the device, and no slot holds it back.
            refs = (self.emit(Verb.RECALL, Lane.HOST_TO_DEVICE, [*refs, *self.newest_use], stash_slot=slot, **common),)
            if slot >= 0:
                self.stash_busy[slot] = refs
        return slot, refs

    # -- gradients ------------------------------------------------------------------------------------------------------

    def gradient_slot(self, unit: int) -> int:
        """Return the drained-gradient buffer of `unit`: its own, the resident units', or the next of a ring."""
        if unit in self.held_in_memory:
            return self.plan.own_gradient_slot(unit)
        if unit in self.plan.resident_units:
            return self.plan.gradient_slots
        slot = self.gradient_turn
        self.gradient_turn = (slot + 1) % self.plan.gradient_slots
        return slot

    def drain(self, unit: int, made: list[int], slot: int, host: int = -1) -> None:
        """Bring a unit's gradient to the host; then update the unit, or hold the gradient for later, or both."""
        plan = self.plan
        num_bytes = plan.units[unit].num_elements * plan.gradient_bytes_per_element
        common: dict[str, Any] = {"unit": unit, "gradient_slot": slot, "phase": "backward", "bytes": num_bytes}
        ref = self.emit(Verb.DRAIN, Lane.DEVICE_TO_HOST, [*made, *self.gradient_busy[slot]], **common)
        self.drains.append(ref)
        self.held[unit], self.gradient_busy[slot] = (ref,), (ref,)
        if plan.is_held(unit) and plan.held_gradients == "ssd":
            self.held[unit] = self.gradient_busy[slot] = (self.emit(Verb.HOLD, Lane.SSD_WRITE, [ref], **common),)
        if unit not in plan.late_units:
            updated = self.update(unit, slot, (ref,), host, late=False)
            self.gradient_busy[slot] = (*self.gradient_busy[slot], *updated)

    # -- updates --------------------------------------------------------------------------------------------------------

    def pending_update(self, unit: int, host: int = -1) -> None:
        """Emit the update of `unit` that the previous step left pending, if it did."""
        if unit not in self.pending:
            return
        plan = self.plan
        if host < 0 and unit not in plan.resident_units:
            host = self.fetch(unit, "update")
        slot, ready = self.gradient_slot(unit), self.before.held[unit]
        if plan.held_gradients == "ssd":
            num_bytes = plan.units[unit].num_elements * plan.gradient_bytes_per_element
            ready = (
                self.emit(
                    Verb.UNHOLD,
                    Lane.SSD_READ,
                    [*ready, *self.gradient_busy[slot]],
                    unit=unit,
                    gradient_slot=slot,
                    phase="update",
                    late=True,
                    bytes=num_bytes,
                ),
            )
        self.gradient_busy[slot] = self.update(unit, slot, (*ready, *self.before.decide), host, late=True)

    def update(self, unit: int, gradient: int, ready: Refs, host: int, *, late: bool) -> Refs:
        """Emit a unit's update, chunk by chunk, in place on its weights in host memory; returns what reads the gradient.

        A late one is the previous step's.
        """
        plan, resident = self.plan, unit in self.plan.resident_units
        after = [*ready, *self.update_weights_ready(unit, host)]
        # Writes go to the slot that the commit of the step before made free.
        committed = self.before.commit if late else self.commit_refs or self.before.commit
        updates, readers, weights, states = [], [], [], []
        for chunk in range(plan.num_chunks(unit)):
            start, stop = plan.chunk(unit, chunk)
            state_bytes = plan.planes.state_bytes(stop - start)
            common: dict[str, Any] = {"unit": unit, "chunk": chunk, "phase": "update", "host_slot": host, "late": late}
            own, slot = list(after), -1
            if unit in plan.resident_states:
                own += committed  # a checkpoint may be reading these states
            else:
                slot = self.state_turn
                self.state_turn = (slot + 1) % plan.state_slots
                read_after = [*self.state_busy[slot], *self.states_stored[unit]]
                own.append(self.emit(Verb.READ_STATES, Lane.SSD_READ, read_after, state_slot=slot, bytes=state_bytes, **common))
            work = {**common, "state_slot": slot, "gradient_slot": gradient}
            if self.is_updated_on_device(unit, chunk):
                reader, update = self.update_on_device(stop - start, own, work)
            else:
                traffic = plan.rule.traffic_bytes(stop - start, plan.gradient_bytes_per_element)
                reader = update = self.emit(Verb.UPDATE, Lane.UPDATE, own, bytes=traffic, **work)
            readers.append(reader)
            updates.append(update)
            write_after = [update, *committed]
            if slot >= 0:
                states.append(
                    self.emit(Verb.WRITE_STATES, Lane.SSD_WRITE, write_after, state_slot=slot, bytes=state_bytes, **common)
                )
                self.state_busy[slot] = (states[-1],)
            weight_bytes = (stop - start) * plan.planes.weight.bytes_per_element
            weights.append(self.emit(Verb.WRITE_WEIGHTS, Lane.SSD_WRITE, write_after, bytes=weight_bytes, **common))
        self.weights_stored[unit], self.states_stored[unit] = tuple(weights), tuple(states)
        self.written += [*weights, *states, *updates]
        if not resident:
            self.host[host] = Slot(unit, tuple(updates), tuple(weights))
            stale = _find(self.device, unit)
            if stale >= 0 and not late:
                self.device[stale] = self.device[stale]._replace(unit=-1)
        elif plan.separate_device:
            self.resident_ready[unit] = self.upload_resident(unit, updates)
            self.staging_busy = (*weights, *self.resident_ready[unit])
        else:
            self.resident_ready[unit] = tuple(updates)
        return tuple(readers)

    def is_updated_on_device(self, unit: int, chunk: int) -> bool:
        every = self.plan.device_update_every if self.plan.device_state_slots else 0
        return bool(every) and (self.first_chunk[unit] + chunk + 1) % every == 0

    def update_on_device(self, num_elements: int, after: list[int], common: dict[str, Any]) -> tuple[int, int]:
        """Emit a chunk's way to the device, its update there and its way back; returns the first and the last operation."""
        plan = self.plan
        slot = self.device_state_turn
        self.device_state_turn = (slot + 1) % plan.device_state_slots
        common = {**common, "device_state_slot": slot}
        back_bytes = plan.planes.num_bytes(num_elements)
        there_bytes = back_bytes + num_elements * plan.gradient_bytes_per_element
        traffic = num_elements * (plan.rule.device_traffic_bytes or 0)
        after = [*after, *self.device_state_busy[slot]]
        there = self.emit(Verb.STATES_TO_DEVICE, Lane.HOST_TO_DEVICE, after, bytes=there_bytes, **common)
        update = self.emit(Verb.UPDATE, Lane.DEVICE_UPDATE, [there], bytes=traffic, **common)
        back = self.emit(Verb.STATES_TO_HOST, Lane.DEVICE_TO_HOST, [update], bytes=back_bytes, **common)
        self.device_state_busy[slot] = (back,)
        return there, back

    def update_weights_ready(self, unit: int, host: int) -> Refs:
        """Return what must be done before a unit's weights in host memory may be changed in place."""
        if unit not in self.plan.resident_units:
            return (*self.host[host].ready, *self.host[host].busy)
        if not self.plan.separate_device:
            return self.weights_stored[unit]
        after = [*self.staging_busy, *self.weights_stored[unit]]
        num_bytes = self.weight_bytes(unit)
        return (self.emit(Verb.FETCH, Lane.SSD_READ, after, unit=unit, phase="update", bytes=num_bytes),)

    def upload_resident(self, unit: int, updates: list[int]) -> Refs:
        return (self.emit(Verb.UPLOAD, Lane.HOST_TO_DEVICE, updates, unit=unit, phase="update", bytes=self.weight_bytes(unit)),)

    def commit(self) -> None:
        self.commit_refs = (
            self.emit(
                Verb.COMMIT,
                Lane.COMMIT,
                [*self.written, *self.decide_refs, *self.before.decide],
                phase="update",
                late=bool(self.before.pending),
            ),
        )
        self.written = []

    # -- sizes ----------------------------------------------------------------------------------------------------------

    def weight_bytes(self, unit: int) -> int:
        return self.plan.units[unit].num_elements * self.plan.planes.weight.bytes_per_element

    def flops(self, unit: int) -> float:
        return self.plan.results.forward_flops[unit] if self.plan.results.forward_flops else 0.0

    def backward_flops(self, block: int) -> float:
        """Gradients cost twice the forward, and the recompute what is neither kept nor skipped."""
        spared = self.plan.results.spared_flops[block - 1] if self.plan.results.spared_flops else 0.0
        return 3 * self.flops(block) - spared


def _find(slots: list[Slot], unit: int) -> int:
    return next((index for index, slot in enumerate(slots) if slot.unit == unit), -1)
