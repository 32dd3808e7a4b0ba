"""How a unit is updated, in any schedule that takes gradients: at once, chunk by chunk, or behind the next program's weights.

A gradient that waits lies in a buffer of its own, or on the drives. While the contents of that buffer are the unit, its update
is still to be done.
"""

from itertools import accumulate
from typing import Any

from headrace.plan.schedules.ledger import Snapshot
from headrace.plan.schedules.pages import WeightPages
from headrace.plan.schedules.weights import RESIDENT, SSD_WEIGHTS, STAGING, TRAINED, VERDICT
from headrace.plan.value.buffer_sizes import ChunkBytes, chunk_bytes
from headrace.plan.value.plan import Plan
from headrace.terms.cuts import is_uneven
from headrace.terms.lanes import Lane
from headrace.terms.program import PIECE_SHIFT, Pool, Verb, Waiting, buffer

PIECE = 1 << PIECE_SHIFT
GRADIENT, HELD, FREE_SLOTS, NORM = buffer(Pool.GRADIENT), buffer(Pool.HELD), buffer(Pool.FREE_SLOTS), buffer(Pool.NORM)
_STATES, _RESIDENT_STATES, _DEVICE_STATES = buffer(Pool.STATES), buffer(Pool.RESIDENT_STATES), buffer(Pool.DEVICE_STATES)
_SSD_STATES, _SSD_TRAINED = buffer(Pool.SSD_STATES), buffer(Pool.SSD_TRAINED)


def held_at(plan: Plan) -> dict[int, int]:
    """Return by unit where its gradient waits for a late update: while the unit is in `contents` there, that is still to be
    done.
    """
    on_ssd, slot_of = {unit: HELD + unit for unit in plan.held_on_ssd}, plan.gradient_slot_of
    return on_ssd | {unit: GRADIENT + slot_of[unit] for unit in plan.held_in_memory}


class UpdateOps(WeightPages):
    """Emits the operations of updates, in order. `durable`: the step before, whose updates are pending, is a checkpoint."""

    def __init__(self, plan: Plan, before: Snapshot, *, durable: bool, shared: bool = False) -> None:
        super().__init__(plan, before, shared=shared, paged=plan.batch.pages)
        self.plan = plan
        self.durable = durable
        units = range(len(plan.units))
        # Sets and mappings, because they are looked into for each unit.
        self.held_at, self.held_on_ssd = held_at(plan), frozenset(plan.held_on_ssd)
        self.late = frozenset(plan.updates.late_units)
        self.gradient_slot_of = plan.gradient_slot_of
        self.resident_states, self.staying = frozenset(plan.updates.resident_states), frozenset(plan.staying_weights)
        self.pending = frozenset(unit for unit, where in self.held_at.items() if self.contents.get(where) == unit)
        self.state_turn = self.gradient_turn = self.device_state_turn = 0
        self.every = plan.updates.device_every if plan.device_state_slots else 0
        # If the device has a place for all blocks, updated weights go there behind backward, not when forward asks for them.
        # But after them nothing that compute waits for may come over the same link.
        apart = plan.separate_device and plan.device_slots >= plan.num_blocks and not self.every
        self.brings_at_once = apart and all(tier == "device" for tier in plan.stash.tiers)
        self.paged = self.paged and not self.brings_at_once
        self.is_uneven = is_uneven(plan.planes.states)
        self.known_sizes: dict[tuple[int, int], ChunkBytes] = {}
        self.first_chunk = list(accumulate((plan.num_chunks(unit) for unit in units), initial=0))
        self.gradient_bytes = [plan.gradient_bytes(unit) for unit in units]

    # -- gradients ------------------------------------------------------------------------------------------------------

    def gradient_slot(self, unit: int) -> int:
        """Return the drained-gradient buffer of `unit`: the one that it always has, or the next of the ring."""
        slot = self.gradient_slot_of.get(unit, -1)
        if slot < 0:
            slot = self.gradient_turn
            self.gradient_turn = (slot + 1) % self.plan.gradients.slots
        return GRADIENT + slot

    def settle(self, unit: int, gradient: int, host: int = -1) -> None:
        """Update a unit whose gradient is in host memory, or hold the gradient for later, or both."""
        if unit in self.held_on_ssd:
            num_bytes = self.gradient_bytes[unit]
            held, what = (HELD + unit,), Waiting.GRADIENT
            self.ledger.op(Verb.OUT, Lane.SSD_WRITE, (gradient,), held, unit=unit, num_bytes=num_bytes, waiting=what)
        if unit in self.late:
            self.contents[self.held_at[unit]] = unit
        else:
            self.update(unit, gradient, host, late=False)

    def changes_first(self, unit: int) -> bool:
        """See `Weights.changes_first`."""
        return unit in self.pending and unit in self.in_place and self.contents.get(self.held_at[unit]) == unit

    # -- updates --------------------------------------------------------------------------------------------------------

    def pending_update(self, unit: int, host: int = -1) -> None:
        """Emit the update of `unit` that the previous step left pending, if it did."""
        if unit not in self.pending:
            return
        if host < 0 and unit not in self.residents and unit in self.in_place:
            host = self.fetch(unit)
        gradient = self.gradient_slot(unit)
        if unit in self.held_on_ssd:
            what: dict[str, Any] = {"unit": unit, "num_bytes": self.gradient_bytes[unit], "waiting": Waiting.GRADIENT}
            self.ledger.op(Verb.IN, Lane.SSD_READ, (HELD + unit,), (gradient,), late=True, **what)
        del self.contents[self.held_at[unit]]
        self.update(unit, gradient, host, late=True)

    def update(self, unit: int, gradient: int, host: int, *, late: bool) -> None:
        """Emit a unit's update, chunk by chunk, in place on its weights in host memory. A late one belongs to the previous
        step.
        """
        plan, op = self.plan, self.ledger.op
        in_place = unit in self.in_place
        staged = in_place and self.separate and unit in self.residents
        if staged:
            reads, num_bytes = (SSD_WEIGHTS + unit,), self.stored_bytes[unit]
            op(Verb.FETCH, Lane.SSD_READ, reads, (STAGING,), unit=unit, num_bytes=num_bytes)
        weights = STAGING if staged else RESIDENT + unit if unit in self.residents else host
        weights = weights if in_place else TRAINED + unit
        newest = (SSD_WEIGHTS if in_place else _SSD_TRAINED) + unit
        given = (gradient, VERDICT) if late else (gradient,)
        resident, first = unit in self.resident_states, self.first_chunk[unit] + 1
        for chunk in range(plan.num_chunks(unit)):
            common: dict[str, Any] = {"unit": unit, "chunk": chunk, "late": late}
            piece, sizes = (chunk + 1) * PIECE, self.sizes(unit, chunk)
            states: tuple[int, ...] = ()
            if resident:
                states = (_RESIDENT_STATES + unit + piece,)
            elif sizes.states:
                states = (_STATES + self.state_turn,)
                self.state_turn = (self.state_turn + 1) % plan.updates.state_slots
                stored = (_SSD_STATES + unit + piece,)
                op(Verb.READ_STATES, Lane.SSD_READ, stored, states, num_bytes=sizes.states, **common)
            changed = (weights + piece, *states)
            if in_place and self.every and (first + chunk) % self.every == 0:
                self.update_on_device(sizes, given, changed, common)
            else:
                op(Verb.UPDATE, Lane.UPDATE, given, changed, num_bytes=sizes.traffic, flops=sizes.flops, **common)
            # States that stay in memory have to be on the drives only where a checkpoint names them.
            if states and (self.durable or not (late and resident)):
                stored, written = (_SSD_STATES + unit + piece,), (*states, FREE_SLOTS)
                op(Verb.WRITE_STATES, Lane.SSD_WRITE, written, (), stored, num_bytes=sizes.states, **common)
            if self.durable or not (late and unit in self.staying):
                stored, written = (newest + piece,), (weights + piece, FREE_SLOTS)
                op(Verb.WRITE_WEIGHTS, Lane.SSD_WRITE, written, (), stored, num_bytes=sizes.weights, **common)
        self.gather(unit, weights)
        if staged:
            num_bytes = self.stored_bytes[unit]
            op(Verb.UPLOAD, Lane.HOST_TO_DEVICE, (STAGING,), (RESIDENT + unit,), unit=unit, num_bytes=num_bytes)
        elif not late and unit not in self.beside:
            self.forget(unit)
            if self.brings_at_once and unit in self.in_place and host >= 0:
                self.bring(unit, host)

    def update_on_device(
        self, sizes: ChunkBytes, given: tuple[int, ...], changed: tuple[int, ...], common: dict[str, Any]
    ) -> None:
        """Emit a chunk's way to the device, its update there and its way back."""
        op, slot = self.ledger.op, (_DEVICE_STATES + self.device_state_turn,)
        self.device_state_turn = (self.device_state_turn + 1) % self.plan.device_state_slots
        # What goes to the device changes from here on, until it is back.
        there = (*slot, *changed)
        op(Verb.STATES_TO_DEVICE, Lane.HOST_TO_DEVICE, given, there, num_bytes=sizes.to_device, **common)
        op(Verb.UPDATE, Lane.DEVICE_UPDATE, (), slot, num_bytes=sizes.device_traffic, flops=sizes.flops, **common)
        op(Verb.STATES_TO_HOST, Lane.DEVICE_TO_HOST, slot, changed, num_bytes=sizes.to_host, **common)

    def commit(self) -> None:
        """Emit the commit; it is that of the step before, if that has updates pending."""
        self.ledger.op(Verb.COMMIT, Lane.COMMIT, (VERDICT,), (FREE_SLOTS,), late=bool(self.pending))

    # -- sizes ----------------------------------------------------------------------------------------------------------

    def sizes(self, unit: int, chunk: int) -> ChunkBytes:
        """Return the bytes of a chunk."""
        start, stop = self.plan.chunk(unit, chunk)
        planes, in_place = self.plan.planes_of(unit), unit in self.in_place
        kind = (stop - start, in_place) if not self.is_uneven else (unit, chunk)
        found = self.known_sizes.get(kind)
        if found is None:
            states = self.plan.chunk_state_bytes(unit, chunk)
            found = chunk_bytes(self.plan, stop - start, planes, states)
            found = self.known_sizes[kind] = found._replace(flops=self.plan.chunk_flops(unit, chunk))
        return found
