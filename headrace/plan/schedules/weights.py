"""How the weights of blocks reach compute, in any schedule: prefetched, sent to the device, made from their families.

A schedule says what it does with a block by `acquire` and `release`, and when it will want the block again by `uses_until`.
Where ranks share out every unit (`shared`), each fetches its part, and gathers those of others.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.plan.schedules.ledger import Ledger, Snapshot
from headrace.plan.value.placement import Placement
from headrace.plan.value.slots import SOURCE_SLOTS
from headrace.terms.lanes import Lane
from headrace.terms.program import Pool, Verb, buffer

if TYPE_CHECKING:
    from headrace.plan.value.plan import Plan

HOST, COMPUTED = buffer(Pool.HOST_WEIGHTS), buffer(Pool.DEVICE_WEIGHTS)
RESIDENT, TRAINED, SOURCES = buffer(Pool.RESIDENT_WEIGHTS), buffer(Pool.TRAINED), buffer(Pool.SOURCES)
SSD_WEIGHTS, FAR, VERDICT = buffer(Pool.SSD_WEIGHTS), buffer(Pool.FAR), buffer(Pool.VERDICT)
STAGING = buffer(Pool.STAGING)
NONE = -1


class Weights:
    """Emits the operations that bring weights, in order, into the program that is being built."""

    def __init__(self, plan: Placement, before: Snapshot, *, shared: bool = False) -> None:
        self._weights_plan, self.shared = plan, shared
        self.ledger, self.results = Ledger(before), plan.results
        self.contents = self.ledger.contents
        self.separate, self.blocks = plan.separate_device, plan.num_blocks
        self.residents = frozenset(plan.resident_units)
        self.made = frozenset(index for index, unit in enumerate(plan.units) if unit.is_made)
        self.beside = frozenset(index for index, unit in enumerate(plan.units) if unit.is_beside)
        self.in_place = frozenset(index for index, unit in enumerate(plan.units) if unit.in_place and not unit.is_far)
        self.far = frozenset(plan.far_units)
        # Parts of these come to compute from the copy in host memory, beside the slot.
        self.in_parts = frozenset(i for i, unit in enumerate(plan.units) if plan.slot_elements(i) < unit.num_elements)
        # Where weights lie as on the drive, and where compute reads those that are brought or made.
        self.host_slots = range(HOST, HOST + plan.host_slots)
        self.computed_slots = range(COMPUTED, COMPUTED + plan.device_slots)
        self.stored_bytes = [plan.stored_bytes(unit) for unit in range(len(plan.units))]
        self.come_in_parts = False  # whether compute brings parts of blocks from their copy in host memory
        self.position = 0  # of compute, counted in uses of blocks
        self.source_turn = 0
        self.acquired: dict[int, tuple[int, int]] = {}  # block -> its buffer in host memory, and the one that compute reads

    def uses_until(self, block: int) -> int:
        """Return after how many further uses of blocks it will be `block`'s turn."""
        raise NotImplementedError

    def bring_up_to_date(self, block: int, host: int) -> None:
        """Emit what has to be done to `block`'s weights before they are used."""

    def acquire(self, block: int, *, pending: bool = False, on_host: bool = False) -> None:
        """Make `block`'s weights ready for compute at its coming use; if `pending`, after bringing them up to date.

        `on_host`: they are also needed in host memory, as they lie on the drive.
        """
        if block in self.acquired:
            return
        if block in self.residents:
            self.acquired[block] = (NONE, RESIDENT + block)
            self.refresh(block)
            if pending:
                self.bring_up_to_date(block, NONE)
            return
        apart, on_host = self.separate or block in self.made, on_host or block in self.in_parts
        if pending and block in self.beside:  # the weights of such a block stay as they are
            self.bring_up_to_date(block, NONE)
            pending = False
        computed = self.find(self.computed_slots, block) if apart and not pending else NONE
        if computed >= 0 and not on_host:
            self.acquired[block] = (NONE, computed)
            return
        host = self.fetch(block)
        # Hold the slots while the rest is arranged, so that nothing chooses them as its victims.
        self.acquired[block] = (host, computed)
        if pending:
            self.bring_up_to_date(block, host)
        if not apart:
            self.acquired[block] = (host, host)
        elif computed < 0:
            self.acquired[block] = (host, self.bring(block, host))

    def reads_of(self, block: int, host: int, computed: int) -> tuple[int, ...]:
        """Return the buffers that compute reads for a block's weights; parts come from the one in host memory."""
        return (computed, host) if self.come_in_parts and host >= 0 else (computed,)

    def fetch(self, block: int) -> int:
        """Return the buffer in host memory that has `block`'s weights; read them if they are not there."""
        found = self.find(self.host_slots, block)
        if found >= 0:
            return found
        slot = self.victim(self.host_slots)
        self.contents[slot] = block
        self.read(block, slot)
        return slot

    def read(self, unit: int, into: int) -> None:
        """Bring a unit's newest weights from where they live: a drive, or another site, once its update there is concluded."""
        common: dict[str, Any] = {"unit": unit, "num_bytes": self.stored_bytes[unit]}
        if unit in self.far:
            self.ledger.op(Verb.PULL, Lane.NIC_DOWN, (FAR + unit, VERDICT), (into,), **common)
        else:
            self.ledger.op(Verb.FETCH, Lane.SSD_READ, (SSD_WEIGHTS + unit,), (into,), **common)
            if not self.changes_first(unit):
                self.gather(unit, into)

    def changes_first(self, unit: int) -> bool:
        """Return whether the next that happens to a unit's weights is their update, for which each rank needs its own part."""
        return False

    def gather(self, unit: int, into: int) -> None:
        """Complete what lies in `into` with the parts of a unit that other ranks hold, if there are any."""
        if self.shared:
            num_bytes = self._weights_plan.trained_bytes(unit) if into == TRAINED + unit else self.stored_bytes[unit]
            self.ledger.op(Verb.GATHER, Lane.NIC_DOWN, (), (into,), unit=unit, num_bytes=num_bytes)

    def refresh(self, unit: int) -> None:
        """Bring the weights of a far unit that stays where compute reads it, if the site has newer ones."""
        if unit not in self.far or self.contents.get(RESIDENT + unit) == unit:
            return
        self.contents[RESIDENT + unit] = unit
        self.read(unit, STAGING if self.separate else RESIDENT + unit)
        if self.separate:
            common: dict[str, Any] = {"unit": unit, "num_bytes": self.stored_bytes[unit]}
            self.ledger.op(Verb.UPLOAD, Lane.HOST_TO_DEVICE, (STAGING,), (RESIDENT + unit,), **common)

    def visit(self, plan: "Plan", after: Sequence[int]) -> None:
        """Bring a head that has its memory for the loss only, if there is one: `after` compute has done with the blocks."""
        if plan.visits:
            from_host = plan.visiting_head == "host"
            way = (Verb.UPLOAD, Lane.HOST_TO_DEVICE) if from_host else (Verb.FETCH, Lane.SSD_READ)
            unit = plan.ends[-1]
            self.ledger.op(*way, (), (RESIDENT + unit,), after=after, unit=unit, num_bytes=plan.visiting_bytes)

    def bring(self, block: int, host: int) -> int:
        """Return the buffer that compute reads, into which `block`'s weights are copied, or in which they are made."""
        slot = self.find(self.computed_slots, block)  # an older version of the block is replaced in its place
        slot = slot if slot >= 0 else self.victim(self.computed_slots)
        self.contents[slot] = block
        if block in self.made:
            self.make(block, host, slot)
        else:
            self.upload(block, (host,), (slot,), self._weights_plan.sent_bytes(block))
        return slot

    def upload(
        self, block: int, reads: Sequence[int], writes: Sequence[int], num_bytes: int, then: Callable[[], int] | None = None
    ) -> None:
        """Copy a block's weights, or what they are made of, to the device; and `then` emit what is done with them there."""
        self.ledger.op(Verb.UPLOAD, Lane.HOST_TO_DEVICE, reads, writes, unit=block, num_bytes=num_bytes)
        if then is not None:
            then()

    def make(self, block: int, host: int, slot: int) -> None:
        """Make a slot of what is stored and what is trained; on a separate device, of what is sent there for it."""
        plan, op, figures = self._weights_plan, self.ledger.op, self._weights_plan.units[block]
        sources: tuple[int, ...] = (host, TRAINED + block) if figures.is_completed else (host,)
        read_bytes = plan.sent_bytes(block)
        made: dict[str, Any] = {"unit": block, "num_bytes": max(plan.slot_bytes(block) + read_bytes, figures.making_like)}
        if self.separate:
            sent = (SOURCES + self.source_turn,)
            self.source_turn = (self.source_turn + 1) % SOURCE_SLOTS
            # Weights that are not coded need no buffer on the way: they are read into the slot, and completed there.
            there = sent if figures.stored_bytes is not None else (slot, *sent)
            self.upload(block, sources, there, read_bytes, partial(op, Verb.MAKE, Lane.MAKE, sent, (slot,), **made))
        else:
            op(Verb.MAKE, Lane.MAKE, sources, (slot,), **made)

    def forget(self, block: int) -> None:
        """Note that compute's copy of `block`'s weights is no longer the newest."""
        if (stale := self.find(self.computed_slots, block)) >= 0:
            del self.contents[stale]

    def forget_everywhere(self, unit: int) -> None:
        """Note that nothing here has the newest weights of a far unit."""
        self.forget(unit)
        if (stale := self.find(self.host_slots, unit)) >= 0:
            del self.contents[stale]
        self.contents.pop(RESIDENT + unit, None)

    def find(self, slots: range, block: int) -> int:
        """Return the buffer that holds `block`'s weights, -1 if none does."""
        contents = self.contents
        return next((slot for slot in slots if contents.get(slot) == block), NONE)

    def victim(self, slots: range) -> int:
        """Return the buffer whose block is next used last (Belady 1966: the order of use is known)."""
        for slot in slots:
            if slot not in self.contents:
                return slot
        free: Sequence[int] = [slot for slot in slots if self.contents[slot] not in self.acquired]
        return max(free, key=lambda slot: (self.uses_until(self.contents[slot]), -slot))

    def flops(self, unit: int) -> float:
        """Return the operations of a unit's forward on one micro-batch."""
        return self.results.forward_flops[unit] if self.results.forward_flops else 0.0
