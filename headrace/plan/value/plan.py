"""The plan: a frozen value that says what lives where, how large every buffer is, and what the step's program looks like.

It is made before anything is allocated, it is printed to the user, and the engine runs inside its numbers.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from headrace.plan.value.choices import BatchShape, Gradients, Hosted, Stash, Updates
from headrace.plan.value.expert_plan import ExpertParts
from headrace.plan.value.placement import Placement
from headrace.plan.value.stage_place import StageChoices
from headrace.plan.value.stored import from_stored, json_values, stored_fields
from headrace.terms.block_parts import BlockParts
from headrace.terms.cuts import (
    chunk_borders,
    is_uneven,
    largest_item_elements,
    least_chunk_elements,
    product_flops,
    state_bytes,
    state_places,
)
from headrace.terms.embedding_rows import EmbeddingRows
from headrace.terms.errors import ConfigError
from headrace.terms.forms import SSD, UnitFigures
from headrace.terms.layout import PlaneSet, Runs
from headrace.terms.rule_figures import RuleFigures

# Staging buffers on the device for chunks that are updated there: while one is updated, another comes or goes.
DEVICE_STATE_SLOTS = 2
# Update policies under which no gradient is held until the norm is known.
AT_ONCE = ("immediate", "rerun")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Placement):
    """Every choice of a run. `Placement` says what units are.

    `host_slots` buffers hold blocks' weights in host memory. As many blocks as there are slots need not be read again, between
    forward and backward and between steps. So this number is also the size of the weight cache. `freed_memory` says what
    happens to freed tensors of the CPU's compute. They are *returned* to the kernel, so that memory holds only live tensors. Or
    the C library *keeps* them for the next ones, which avoids fresh pages and takes more. Where a step takes less than planned,
    freed memory is kept all the same, and given back near the limit (`machine.host_memory.HeapGuard`).

    A plan that `serves` computes nothing: rows of a micro-batch, loss chunk and threads are those on which workers agreed, or 0
    before they have. `own_rule` is for trained families of their own; None where no unit has one.

    Raises:
        ConfigError: an item that no cut divides, such as a matrix, is longer than `chunk_elements`.
    """

    rule: RuleFigures
    own_rule: RuleFigures | None = None
    tied: bool
    batch: BatchShape
    stash: Stash
    gradients: Gradients
    updates: Updates
    freed_memory: str = "returned"
    experts: ExpertParts | None = None  # how experts come that are parts; None where blocks come whole
    hosted: Hosted | None = None  # how hidden states wait in host memory between blocks; None where they stay on the device
    embedding: EmbeddingRows | None = None  # how its rows are read; None where the whole is in its slot
    # Where the head's weights lie that compute has for the loss only, "host" or "ssd"; None where they stay.
    visiting_head: str | None = None
    # Bytes for a range of its rows, where these come one after the other (`batch.head_rows` each); None where it comes whole.
    head_slot_bytes: int | None = None
    parts: BlockParts | None = None  # how weights of blocks come in parts; None where they come whole
    stage: StageChoices | None = None  # which stage of a run this is for, and how a step goes through it
    serves: bool = False  # for a node: workers compute, all units are streamed to them and updated here

    def __post_init__(self) -> None:
        least = max((least_chunk_elements(unit.cuts) for unit in self.units if unit.cuts), default=self.updates.chunk_elements)
        if self.updates.chunk_elements < least:
            found = f"chunk_elements {self.updates.chunk_elements}, but {self.rule.name} updates up to {least} elements at once"
            raise ConfigError(f"plan: {found}; use {least} or more")

    def with_updates(self, **changes: Any) -> "Plan":
        """Return the plan with these of its `Updates` changed."""
        return replace(self, updates=replace(self.updates, **changes))

    def with_gradients(self, **changes: Any) -> "Plan":
        """Return the plan with these of its `Gradients` changed."""
        return replace(self, gradients=replace(self.gradients, **changes))

    @property
    def planes(self) -> PlaneSet:
        """The planes of the rule."""
        return self.rule.planes

    def planes_of(self, unit: int) -> PlaneSet:
        """Return the planes of what is trained of a unit."""
        if self.own_rule is None or self.units[unit].in_place:
            return self.rule.planes
        return self.own_rule.planes

    def largest_state_bytes(self, num_elements: int) -> int:
        """Return the bytes of the states of a chunk of so many elements, of those planes that take most."""
        return max((self._most_state_bytes(unit, num_elements) for unit in self.updated_units), default=0)

    def _most_state_bytes(self, unit: int, num_elements: int) -> int:
        figures, planes = self.units[unit], self.planes_of(unit)
        if not (figures.cuts and is_uneven(planes.states)):
            return planes.state_bytes(num_elements)
        borders = pairwise(chunk_borders(figures.update_elements, num_elements, figures.cuts))
        return max(state_bytes(planes.states, start, stop, figures.cuts) for start, stop in borders)

    def chunk_state_bytes(self, unit: int, chunk: int) -> int:
        """Bytes of the states of a chunk."""
        return state_bytes(self.planes_of(unit).states, *self.chunk(unit, chunk), self.units[unit].cuts)

    def chunk_flops(self, unit: int, chunk: int) -> float:
        """Operations of the products of matrices in the update of a chunk."""
        return product_flops(self.rule, *self.chunk(unit, chunk), self.units[unit].cuts)

    def state_places(self, unit: int, chunk: int) -> list[slice]:
        """Return where the bytes of each state plane lie in a chunk's states."""
        return state_places(self.planes_of(unit).states, *self.chunk(unit, chunk), self.units[unit].cuts)

    @property
    def staying_weights(self) -> tuple[int, ...]:
        """The units whose trained weights stay in host memory from step to step: nothing reads them from the drives."""
        all_fit = self.host_slots >= len(self.streamed_units)
        return tuple(
            index
            for index, unit in enumerate(self.units)
            if unit.has_own_family or (all_fit if unit.home == SSD else not self.separate_device)
        )

    @property
    def is_lazy(self) -> bool:
        """Whether the states or weights of a unit that is updated late stay in memory, and are only written at checkpoints."""
        return any(unit in self.updates.late_units for unit in {*self.updates.resident_states, *self.staying_weights})

    @property
    def trained_units(self) -> tuple[int, ...]:
        """The units of which anything is updated, here or elsewhere."""
        return tuple(index for index, unit in enumerate(self.units) if unit.is_trained)

    @property
    def learns_prologue(self) -> bool:
        """Whether the embedding is trained, whole or by rows."""
        return self.units[0].is_trained or (self.embedding is not None and self.embedding.learns)

    @property
    def updated_units(self) -> tuple[int, ...]:
        """The units that are updated here."""
        return tuple(index for index, unit in enumerate(self.units) if unit.update_elements)

    @property
    def gradient_bytes_per_element(self) -> int:
        """Bytes of a drained gradient element."""
        return 4 if self.gradients.dtype == "float32" else 2

    @property
    def summed_bytes_per_element(self) -> int:
        """Bytes of a gradient element of a block where backward sums it."""
        return 4 if self.gradients.accumulate else self.gradient_bytes_per_element

    @property
    def largest_gradient_elements(self) -> int:
        """Elements of the largest gradient of a block."""
        return max(unit.gradient_elements for unit in self.units[1 : self.num_blocks + 1])

    @property
    def largest_item_elements(self) -> int:
        """Elements of the largest row or matrix that the rule needs as a whole; 1 where it updates each element alone."""
        return max(largest_item_elements(unit.cuts) for unit in self.units)

    def slot_runs(self, unit: int) -> Runs:
        """See `Placement.slot_runs`; experts that are trained come beside the others, and an embedding may be read by rows. A
        head that visits has no slot.
        """
        if (unit == 0 and self.embedding is not None) or (self.visiting_head and unit == self.ends[-1]):
            return ()
        if self.parts is not None and self.parts.moved[unit]:
            return self.parts.rest[unit]
        return self._commons(unit) or Placement.slot_runs(self, unit)

    def summed_runs(self, unit: int) -> Runs:
        """Which elements of a unit's gradient lie, one after another, where backward sums them."""
        return self._commons(unit) or ((0, self.units[unit].gradient_elements),)

    def summed_elements(self, unit: int) -> int:
        """Elements of a unit's gradient that are summed together; those of trained experts are summed beside them."""
        return sum(stop - start for start, stop in self.summed_runs(unit))

    def _commons(self, unit: int) -> Runs:
        return self.experts.commons[unit] if self.experts and self.experts.commons else ()

    def gradient_bytes(self, unit: int) -> int:
        """Bytes of a unit's drained gradient."""
        return self.units[unit].gradient_elements * self.gradient_bytes_per_element

    def page_bytes(self, unit: int) -> int:
        """See `Placement.page_bytes`."""
        return self.page_of(unit, self.batch.num_micro_batches) if self.batch.pages else self.sent_bytes(unit)

    @property
    def hidden_bytes(self) -> int:
        """Bytes of the hidden states of one micro-batch."""
        batch = self.batch
        return batch.micro_batch_sequences * batch.sequence_length * batch.hidden_size_bytes

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.batch.micro_batch_sequences * self.batch.sequence_length

    @property
    def read_embedding_bytes(self) -> int:
        """The most bytes of rows of the embedding that a step reads."""
        return self.batch.num_micro_batches * self.embedding.read_bytes(self.micro_batch_tokens) if self.embedding else 0

    @property
    def written_embedding_bytes(self) -> int:
        """The most bytes of rows of the embedding that a step writes: those that it read, once, in one of two places."""
        learns = self.embedding is not None and self.embedding.learns
        return self.embedding.read_bytes(self.batch.tokens_per_step) // 2 if self.embedding and learns else 0

    @property
    def visits(self) -> bool:
        """Whether the whole head comes to compute for each loss, and leaves after it."""
        return self.visiting_head is not None and self.head_slot_bytes is None

    @property
    def visiting_bytes(self) -> int:
        """Bytes of the head that comes to compute for each loss; 0 where it stays there."""
        return self.stored_bytes(self.ends[-1]) if self.visiting_head else 0

    @property
    def ranged_head_bytes(self) -> int:
        """Bytes of the head that compute brings in a step, range by range: forward and back, for each micro-batch."""
        return 0 if self.head_slot_bytes is None else 2 * self.batch.num_micro_batches * self.visiting_bytes

    @property
    def coming_slots(self) -> int:
        """Slots on the device for hidden states that come from host memory: those of a group at its experts come together."""
        return (self.hosted.coming if self.hosted else 0) + (self.experts.together - 1 if self.experts else 0)

    @property
    def micros_together(self) -> int:
        """The most micro-batches that go through a block one after another: all of a step, or of a stage's group."""
        count = self.batch.num_micro_batches
        return max(map(len, self.stage.groups_of(count))) if self.stage else count

    @property
    def micros_in_flight(self) -> int:
        """The most micro-batches that wait for backward at a time."""
        count = self.batch.num_micro_batches
        return self.stage.micros_in_flight(count) if self.stage else count

    @property
    def parked_units(self) -> tuple[int, ...]:
        """The blocks whose sums of gradients wait for a stage's next group."""
        several = self.stage is not None and self.stage.groups > 1
        return tuple(unit for unit in self.trained_units if unit not in self.ends) if several else ()

    @property
    def parked_on_ssd(self) -> tuple[int, ...]:
        """Those whose sums wait on the SSD."""
        return self.parked_units if self.stage and self.stage.sums == "ssd" else ()

    @property
    def gradient_in_place(self) -> bool:
        """Whether backward makes a block's gradient where it is drained to: one micro-batch, summed in host memory."""
        return not self.gradients.accumulate and self.sums_on_host

    @property
    def ends_in_place(self) -> bool:
        """Whether prologue and epilogue do so, too: no number is added to more than once, by the other use of a tied matrix."""
        batch, trained = self.batch, [unit for unit in self.ends if self.units[unit].gradient_elements]
        if self.separate_device or self.gradients.accumulate or self.stage is not None or self.serves or not trained:
            return False
        whole = batch.micro_batch_sequences * batch.sequence_length <= batch.loss_chunk_tokens
        return whole and all(
            self.units[unit].in_place
            and unit in self.resident_units
            and self.summed_elements(unit) == self.units[unit].gradient_elements
            for unit in trained
        )

    @property
    def sums_on_host(self) -> bool:
        """Whether gradients of blocks are summed in host memory: nothing else is there, or they leave the device in parts."""
        blocks = self.units[1 : self.num_blocks + 1]
        return not self.separate_device or (self.parts is not None and any(unit.in_place for unit in blocks))

    @property
    def leaving_elements(self) -> int:
        """Elements of the largest gradient of a block that leaves the device by itself; 0 where none do."""
        if self.parts is None or not self.sums_on_host:
            return 0
        return max(self.parts.elements, self.largest(self.slot_elements))

    @property
    def is_at_once(self) -> bool:
        """Whether units are updated behind backward, and no gradient is held until the norm is known."""
        return self.updates.policy in AT_ONCE

    @property
    def held_units(self) -> tuple[int, ...]:
        """The units whose gradients are kept until the step's verdict is known, in tier `gradients.held`."""
        late = frozenset(self.updates.late_units)
        return tuple(unit for unit in self.updated_units if not self.is_at_once or unit in late)

    @property
    def held_in_memory(self) -> tuple[int, ...]:
        """The held units whose gradients wait in host memory: each has a buffer of its own."""
        return self.held_units if self.gradients.held == "host" else ()

    @property
    def held_on_ssd(self) -> tuple[int, ...]:
        """The held units whose gradients wait on the SSD."""
        return self.held_units if self.gradients.held == "ssd" else ()

    @property
    def gradient_slot_of(self) -> dict[int, int]:
        """The drained-gradient buffer of each unit that always has the same one; the others take turns in `gradients.slots`.

        Resident units share one buffer, unless their gradient is held in one of its own.
        """
        shared = dict.fromkeys(self.resident_units, self.gradients.slots)
        return shared | {unit: self.gradients.slots + 1 + unit for unit in self.with_own_gradient}

    @property
    def with_own_gradient(self) -> tuple[int, ...]:
        """The units whose drained gradient has a buffer of its own: held ones, and what follows a tied head made in place."""
        own = {self.ends[-1]} if self.tied and self.ends_in_place else set[int]()
        return tuple(sorted(own.intersection(self.trained_units).union(self.held_in_memory)))

    @property
    def device_state_slots(self) -> int:
        """Staging buffers on the device for chunks that are updated there: none if no chunk is."""
        return DEVICE_STATE_SLOTS if self.separate_device and self.updates.device_every else 0

    def stash_bytes(self, block: int) -> int:
        """Bytes that wait for backward per micro-batch of `block` (1..num_blocks): its input and its kept outputs."""
        return self.hidden_bytes + self.stash.kept_bytes[block - 1]

    def blocks_stashed_on(self, tier: str) -> list[int]:
        """Blocks (1..num_blocks) whose inputs wait on `tier`."""
        return [index for index, home in enumerate(self.stash.tiers, start=1) if home == tier]

    def num_chunks(self, unit: int) -> int:
        """Number of chunks in which `unit` is updated."""
        figures = self.units[unit]
        return len(self._borders(figures)) - 1 if figures.cuts else -(-figures.update_elements // self.updates.chunk_elements)

    def chunk(self, unit: int, chunk: int) -> tuple[int, int]:
        """Elements `[start, stop)` of a chunk."""
        figures = self.units[unit]
        if figures.cuts:
            borders = self._borders(figures)
            return borders[chunk], borders[chunk + 1]
        start = chunk * self.updates.chunk_elements
        return start, min(start + self.updates.chunk_elements, figures.update_elements)

    def state_bytes(self, unit: int) -> int:
        """Bytes of a unit's states: those of its chunks, one after another."""
        figures, planes = self.units[unit], self.planes_of(unit)
        if figures.cuts:
            return sum(state_bytes(planes.states, *each, figures.cuts) for each in pairwise(self._borders(figures)))
        whole, rest = divmod(figures.update_elements, self.updates.chunk_elements)
        return whole * planes.state_bytes(self.updates.chunk_elements) + planes.state_bytes(rest)

    def states_of_chunk(self, unit: int, chunk: int) -> slice:
        """Return where a chunk's states lie among those of its unit, in bytes."""
        figures, (start, stop) = self.units[unit], self.chunk(unit, chunk)
        planes = self.planes_of(unit)
        if figures.cuts:
            before = pairwise(self._borders(figures)[: chunk + 1])
            offset = sum(state_bytes(planes.states, begin, end, figures.cuts) for begin, end in before)
        else:
            offset = chunk * planes.state_bytes(self.updates.chunk_elements)
        return slice(offset, offset + state_bytes(planes.states, start, stop, figures.cuts))

    def _borders(self, unit: UnitFigures) -> tuple[int, ...]:
        return chunk_borders(unit.update_elements, self.updates.chunk_elements, unit.cuts)

    def to_json(self) -> dict[str, Any]:
        """See `Placement.to_json`; a plan that is kept says its format. Nothing is said of what comes with blocks, or stays."""
        return json_values(Placement.to_json(self))

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Plan":
        """Inverse of `to_json`.

        Raises:
            ConfigError: it has another format.
        """
        return from_stored(cls, stored_fields(values))


def spread(count: int, num_blocks: int) -> tuple[int, ...]:
    """Return `count` of the blocks 1..num_blocks, evenly spread."""
    return tuple(block for block in range(1, num_blocks + 1) if block * count // num_blocks > (block - 1) * count // num_blocks)
