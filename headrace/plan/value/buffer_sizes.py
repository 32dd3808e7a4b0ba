"""Every buffer of a plan, with its tier and exact size. The flow takes these buffers and no others; the plan sums them."""

from typing import NamedTuple

from headrace.plan.value.expert_plan import ROUNDS_SUMMED, expert_buffers
from headrace.plan.value.plan import Plan
from headrace.plan.value.weight_sizes import BufferGroup, weight_groups
from headrace.terms.block_parts import PART_SLOTS
from headrace.terms.cuts import HOST_ITEM_ELEMENTS, largest_item_elements
from headrace.terms.layout import PlaneSet
from headrace.terms.options.summing import TREE, partial_sums
from headrace.terms.rule_figures import Grain
from headrace.terms.sizes import PAGE_BYTES, round_up

# Elements that an update on the device works on at once (tests count): its temporaries grow with them.
DEVICE_UPDATE_PIECE_ELEMENTS = 1 << 20
TENSOR_ALIGNMENT_BYTES = 64
# Buffers for sums of gradients on their way to or from the SSD: one is filled while another one is read or written.
PARKING_SLOTS = 2


def buffer_groups(plan: Plan) -> dict[str, BufferGroup]:
    """Return the groups by name. The compute tier is `device` where that is separate, else `host`."""
    if plan.serves:
        return _serving_groups(plan)
    compute_tier, residents = "device" if plan.separate_device else "host", plan.resident_units
    gradient = plan.gradient_bytes_per_element
    states = BufferGroup("host", "states", plan.updates.state_slots, plan.largest_state_bytes(plan.updates.chunk_elements))
    groups = weight_groups(plan) | {"states": states}
    if plan.visiting_head == "host":
        groups["visiting_head"] = BufferGroup("host", "weights", 1, plan.visiting_bytes)
    if plan.head_slot_bytes is not None:
        groups["head_slots"] = BufferGroup(compute_tier, "weights", PART_SLOTS, plan.head_slot_bytes)
    if plan.experts is not None:
        groups |= expert_buffers(plan.experts, plan.planes.weight, separate=plan.separate_device)
        groups |= expert_sums(plan)
    if plan.parts is not None:
        part_bytes = plan.planes.weight.num_bytes(plan.parts.elements)
        groups["part_weights"] = BufferGroup(compute_tier, "weights", PART_SLOTS, part_bytes)
    if plan.leaving_elements:
        leaving = plan.planes.weight.num_bytes(plan.leaving_elements)
        groups["leaving_gradients"] = BufferGroup("host", "gradients", PART_SLOTS, leaving)
    ends = [plan.units[unit].gradient_elements for unit in plan.ends]
    sums = partial_sums(plan.batch.num_micro_batches, plan.gradients.order)
    if any(ends) and not plan.ends_in_place:
        accumulator = sum(ends) if plan.tied else max(ends)
        # A leaf of a tree is all that a micro-batch adds: that of the head waits for that of the embedding.
        leaves = plan.batch.num_micro_batches if plan.tied and plan.gradients.order == TREE else sums
        groups["resident_accumulator"] = BufferGroup(compute_tier, "gradients", leaves, accumulator * 4)
    if plan.separate_device:
        if plan.device_state_slots:
            weight = plan.planes.weight.bytes_per_element
            chunk_bytes = plan.updates.chunk_elements * (weight + gradient) + plan.largest_state_bytes(
                plan.updates.chunk_elements
            )
            groups["device_states"] = BufferGroup("device", "states", plan.device_state_slots, chunk_bytes)
        coming = [plan.stored_bytes(unit) for unit in residents if plan.slot_elements(unit)]
        groups["staging"] = BufferGroup("host", "weights", 1, max(coming, default=0))
    groups |= _gradient_groups(plan, compute_tier, sums)
    for unit in plan.updates.resident_states:
        groups[f"resident_states.{unit}"] = BufferGroup("host", "states", 1, plan.state_bytes(unit))
    if plan.hosted:
        groups["between"] = BufferGroup("host", "activations", plan.batch.num_micro_batches, hidden_pages(plan))
    for block in plan.blocks_stashed_on("host"):
        groups[f"stash.{block}"] = BufferGroup("host", "activations", plan.micros_in_flight, stash_slot_bytes(plan, block))
    spilled = plan.blocks_stashed_on("ssd")
    if spilled:
        largest = max(stash_slot_bytes(plan, block) for block in spilled)
        groups["stash"] = BufferGroup("host", "activations", plan.stash.slots, largest)
    return groups


def _gradient_groups(plan: Plan, compute_tier: str, sums: int) -> dict[str, BufferGroup]:
    """Return the groups for gradients of units: where they are summed, in up to `sums` places, where they wait and pass."""
    groups: dict[str, BufferGroup] = {}
    largest = plan.largest_gradient_elements
    if largest and not plan.gradient_in_place:
        summed = plan.largest(plan.summed_elements) * plan.summed_bytes_per_element
        tier = "host" if plan.sums_on_host else compute_tier
        groups["accumulator"] = BufferGroup(tier, "gradients", max(plan.gradients.accumulators, sums), summed)
    held = plan.with_own_gradient
    for unit in held:
        groups[f"gradient.{unit}"] = BufferGroup("host", "gradients", 1, plan.gradient_bytes(unit))
    passing = sorted(set(plan.trained_units).difference(held))
    residents = plan.resident_units
    if any(unit not in residents for unit in passing):
        groups["gradients"] = BufferGroup("host", "gradients", plan.gradients.slots, largest * plan.gradient_bytes_per_element)
    if any(unit in residents for unit in passing):
        resident_gradient = max(plan.gradient_bytes(unit) for unit in residents)
        groups["resident_gradient"] = BufferGroup("host", "gradients", 1, resident_gradient)
    if laid := plan.parked_on_ssd:
        groups["parking"] = BufferGroup("host", "gradients", PARKING_SLOTS, max(parked_bytes(plan, unit) for unit in laid))
    for unit in set(plan.parked_units).difference(laid):
        groups[f"parked.{unit}"] = BufferGroup("host", "gradients", 1, 4 * plan.units[unit].gradient_elements)
    return groups


def expert_sums(plan: Plan) -> dict[str, BufferGroup]:
    """Return the groups for gradients of trained experts: where a round is summed, and where sums wait for another group."""
    experts = plan.experts
    if experts is None or not experts.commons:
        return {}
    sum_bytes = experts.figures.elements * plan.summed_bytes_per_element
    groups = {"expert_sums": BufferGroup("device", "gradients", ROUNDS_SUMMED * experts.in_round, sum_bytes)}
    if experts.together < plan.batch.num_micro_batches:
        groups["parked_experts"] = BufferGroup("host", "gradients", 1, max(experts.figures.num_experts) * sum_bytes)
    return groups


def _serving_groups(plan: Plan) -> dict[str, BufferGroup]:
    """Return the groups of a plan that computes nothing: buffers for units on their way, each as large as the largest unit."""
    units, held = range(len(plan.units)), plan.held_in_memory
    states = BufferGroup("host", "states", plan.updates.state_slots, plan.largest_state_bytes(plan.updates.chunk_elements))
    groups = weight_groups(plan) | {"states": states}
    groups |= {f"gradient.{unit}": BufferGroup("host", "gradients", 1, plan.gradient_bytes(unit)) for unit in held}
    if set(plan.trained_units).difference(held):
        groups["gradients"] = BufferGroup("host", "gradients", plan.gradients.slots, max(map(plan.gradient_bytes, units)))
    for unit in plan.updates.resident_states:
        groups[f"resident_states.{unit}"] = BufferGroup("host", "states", 1, plan.state_bytes(unit))
    return groups


def device_update_temporary_bytes(plan: Plan) -> int:
    """Return the device memory that updates on the device take for a moment, besides the staging buffers."""
    if not plan.device_state_slots:
        return 0
    piece = max(min(plan.updates.chunk_elements, DEVICE_UPDATE_PIECE_ELEMENTS), plan.largest_item_elements)
    return piece * plan.rule.temporary_bytes


def host_update_temporary_bytes(plan: Plan) -> int:
    """Return the bytes of host memory that updates of whole rows or matrices take for a moment: one piece on each thread.

    Elements that are updated alone are updated in registers.
    """
    all_there = plan.device_state_slots and plan.updates.device_every == 1
    here = [unit for unit in map(plan.units.__getitem__, plan.updated_units) if not (all_there and unit.in_place)]
    if plan.rule.grain is Grain.ELEMENT or not here:
        return 0
    piece = max(HOST_ITEM_ELEMENTS, *(largest_item_elements(unit.cuts) for unit in here))
    return plan.updates.threads * min(piece, plan.updates.chunk_elements) * plan.rule.temporary_bytes


def scratch_bytes(plan: Plan) -> int:
    """Return the bytes on the SSD for block inputs, held gradients and sums that wait: they are not durable and have no second
    slot.
    """
    return stash_scratch_bytes(plan) + held_scratch_bytes(plan) + sum(parked_bytes(plan, unit) for unit in plan.parked_on_ssd)


def stash_scratch_bytes(plan: Plan) -> int:
    """Return the bytes of all block inputs of a step on the SSD."""
    return sum(plan.micros_in_flight * stash_slot_bytes(plan, block) for block in plan.blocks_stashed_on("ssd"))


def stash_slot_bytes(plan: Plan, block: int) -> int:
    """Return the bytes of one micro-batch's input and kept outputs of `block`, each tensor on a cache line, in whole pages. A
    hosted input has pages of its own.
    """
    tensors = 2 * len(plan.stash.kept[block - 1]) + 1  # attention keeps a second output
    if plan.hosted:
        kept = plan.stash.kept_bytes[block - 1]
        return hidden_pages(plan) + (round_up(kept + tensors * TENSOR_ALIGNMENT_BYTES, PAGE_BYTES) if kept else 0)
    return round_up(plan.stash_bytes(block) + tensors * TENSOR_ALIGNMENT_BYTES, PAGE_BYTES)


def hidden_pages(plan: Plan) -> int:
    """Return the bytes of a micro-batch's hidden states in whole pages."""
    return round_up(plan.hidden_bytes, PAGE_BYTES)


def stash_offset(plan: Plan, block: int, micro: int) -> int:
    """Return where a block's stash lies in the scratch space."""
    before = sum(
        plan.micros_in_flight * stash_slot_bytes(plan, other) for other in plan.blocks_stashed_on("ssd") if other < block
    )
    return before + micro % plan.micros_in_flight * stash_slot_bytes(plan, block)


def held_scratch_bytes(plan: Plan) -> int:
    """Return the bytes of all held gradients on the SSD."""
    return sum(held_gradient_bytes(plan, unit) for unit in plan.held_on_ssd)


def held_gradient_offset(plan: Plan, unit: int) -> int:
    """Return where a unit's held gradient lies in the scratch space: after the block inputs."""
    return stash_scratch_bytes(plan) + sum(held_gradient_bytes(plan, other) for other in plan.held_on_ssd if other < unit)


def held_gradient_bytes(plan: Plan, unit: int) -> int:
    """Return the bytes that the held gradient of a unit takes on the SSD, in whole pages."""
    return round_up(plan.gradient_bytes(unit), PAGE_BYTES)


def parked_bytes(plan: Plan, unit: int) -> int:
    """Return the bytes that a unit's sum takes on the SSD, in whole pages."""
    return round_up(4 * plan.units[unit].gradient_elements, PAGE_BYTES)


def parked_offset(plan: Plan, unit: int) -> int:
    """Return where a unit's sum lies in the scratch space: after block inputs and held gradients."""
    before = sum(parked_bytes(plan, other) for other in plan.parked_on_ssd if other < unit)
    return stash_scratch_bytes(plan) + held_scratch_bytes(plan) + before


class ChunkBytes(NamedTuple):
    """What updating a chunk moves, in bytes: its states, its weights, the update's memory traffic, what goes to a device and
    to the host again. Also the operations of its matrix products.
    """

    states: int
    weights: int
    traffic: int
    to_device: int
    to_host: int
    device_traffic: int
    flops: float = 0.0


def chunk_bytes(plan: Plan, num_elements: int, planes: PlaneSet, states: int) -> ChunkBytes:
    """Return what updating a chunk of `num_elements` of `planes` moves; `states` are the bytes of its states."""
    gradient_bytes = num_elements * plan.gradient_bytes_per_element
    all_planes = planes.weight.num_bytes(num_elements) + states
    return ChunkBytes(
        states=states,
        weights=planes.weight.num_bytes(num_elements),
        traffic=2 * all_planes + gradient_bytes,
        to_device=all_planes + gradient_bytes,
        to_host=all_planes,
        device_traffic=num_elements * (plan.rule.device_traffic_bytes or 0),
    )
