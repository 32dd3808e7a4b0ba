"""An update: states are read, the rule makes one pass, states and weights are written. Chunk by chunk, out of core, exactly.

The pass runs on the host, or on the device where the plan says so. Then the chunk goes there and comes back between reading and
writing. Invariant: the bits are the same either way, but for products of matrices (Muon), which each device adds up in an order
of its own.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.flow.step.step_state import StepState
from headrace.flow.weights.load import write_family
from headrace.machine.host_memory import Bytes, huge_page_buffer
from headrace.machine.protocol import Machine
from headrace.plan.value.buffer_sizes import DEVICE_UPDATE_PIECE_ELEMENTS
from headrace.plan.value.plan import Plan
from headrace.terms.cuts import HOST_ITEM_ELEMENTS
from headrace.terms.families import BASIS, NEXT_BASIS, STATES, TRAINED, WEIGHTS
from headrace.terms.program import Op, Pool
from headrace.update import Chunk, DeviceUpdater, UpdateRule


def device_updater(plan: Plan, machine: Machine, rule: UpdateRule) -> DeviceUpdater | None:
    """Return the updater that applies `rule` on the device; None if the plan updates nothing there."""
    if not plan.device_state_slots:
        return None
    piece = HOST_ITEM_ELEMENTS if machine.device.type == "cpu" else DEVICE_UPDATE_PIECE_ELEMENTS
    return DeviceUpdater(rule, piece_elements=min(piece, plan.updates.chunk_elements))


def read_states(state: StepState, op: Op) -> None:
    """Read a chunk's states into their staging buffer."""
    if not state.verdict_of(op).void:
        state.parts.store.read(op.unit, STATES, _states(state, op), op.chunk).wait()


def states_to_device(state: StepState, op: Op) -> None:
    """Copy a chunk's states, weights and gradient to the device."""
    if _is_updated(state, op):
        for there, here in _places(state, op):
            state.parts.machine.copy(there, torch.from_numpy(here))


def states_to_host(state: StepState, op: Op) -> None:
    """Copy a chunk's new states and weights back to where the old ones came from."""
    if _is_updated(state, op):
        for there, here in _places(state, op):
            state.parts.machine.copy(torch.from_numpy(here), there)


def update(state: StepState, op: Op) -> None:
    """Apply the rule to a chunk in place: weights in their host slot and states in staging, or everything on the device."""
    verdict = state.verdict_of(op)
    if not _is_updated(state, op):
        return
    if op.is_on_device:
        _update_on_device(state, op)
        return
    plan, buffers = state.plan, state.parts.buffers
    start, stop = plan.chunk(op.unit, op.chunk)
    weights = _weights(state, op).view(plan.planes_of(op.unit).weight.dtype)
    gradient = buffers.gradient(op.unit, op.slot(Pool.GRADIENT))[start:stop]
    checksums = state.updater_of(op.unit).update_range(
        Chunk(weights, _state_planes(state, op), gradient, op.unit, start),
        verdict.scalars_of(op.unit),
        state.parts.pieces[op.unit],
        take_checksums=True,
    )
    if checksums is not None:
        state.checksums[op.unit, op.chunk] = checksums


def write_states(state: StepState, op: Op) -> None:
    """Write a chunk's new states into the slot that is not committed."""
    if _is_written(state, op, stays=op.unit in state.plan.updates.resident_states):
        known = state.checksums.get((op.unit, op.chunk))
        state.parts.store.write(op.unit, STATES, op.chunk, _states(state, op), known.states if known else None).wait()


def write_weights(state: StepState, op: Op) -> None:
    """Write a chunk's new weights into the slot that is not committed."""
    if _is_written(state, op, stays=op.unit in state.plan.staying_weights):
        known = state.checksums.get((op.unit, op.chunk))
        family = WEIGHTS if state.plan.units[op.unit].in_place else TRAINED
        state.parts.store.write(op.unit, family, op.chunk, _weights(state, op), known.weights if known else None).wait()
        proposal = state.verdict_of(op).proposals.get(op.unit)
        if proposal is not None and proposal.basis.numel() and op.chunk == 0:
            # The basis lies there from this step's commit on, and is put into use afterwards (`settle`).
            content = huge_page_buffer(proposal.basis.nbytes)
            content[:] = proposal.basis.view(torch.uint8).numpy()
            write_family(state.parts.store, op.unit, NEXT_BASIS if proposal.replaces else BASIS, content)


def _is_updated(state: StepState, op: Op) -> bool:
    """True if the update of a chunk has an effect, and is not that of another rank."""
    family = WEIGHTS if state.plan.units[op.unit].in_place else TRAINED
    return not state.verdict_of(op).void and state.parts.store.holds(op.unit, family, op.chunk)


def _is_written(state: StepState, op: Op, *, stays: bool) -> bool:
    """True if this write is needed: always after a real update; after a skipped step only for memory-resident units with
    unsaved earlier steps.
    """
    return not state.verdict_of(op).void or (stays and op.late)


def _weights(state: StepState, op: Op) -> Bytes:
    """Return the chunk's part of the unit's trained weights in host memory."""
    plan, buffers = state.plan, state.parts.buffers
    start, stop = plan.chunk(op.unit, op.chunk)
    whole = buffers.trained[op.unit] if op.unit in buffers.trained else buffers.stored(op.unit, op)
    width = plan.planes_of(op.unit).weight.bytes_per_element
    return whole[start * width : stop * width]


def _states(state: StepState, op: Op) -> Bytes:
    """Return the chunk's states, all planes back to back: in staging, or where they always are."""
    plan, buffers = state.plan, state.parts.buffers
    slot, planes = op.slot(Pool.STATES), plan.planes_of(op.unit)
    if slot >= 0 or not planes.states:  # a rule without states has no bytes in any buffer
        return buffers.states[max(slot, 0)][: plan.chunk_state_bytes(op.unit, op.chunk)]
    return buffers.resident_states[op.unit][plan.states_of_chunk(op.unit, op.chunk)]


def _places(state: StepState, op: Op) -> list[tuple[torch.Tensor, Bytes]]:
    """Return for a chunk's states, weights and, on its way there, gradient where they lie, as bytes: on the device, on the
    host.
    """
    plan = state.plan
    here, slot = [_states(state, op), _weights(state, op)], op.slot(Pool.GRADIENT)
    if slot >= 0:
        first, last = (place * plan.gradient_bytes_per_element for place in plan.chunk(op.unit, op.chunk))
        here.append(state.parts.buffers.gradient_bytes(op.unit, slot)[first:last])
    return list(zip(_on_device(state, op), here, strict=False))


def _on_device(state: StepState, op: Op) -> list[torch.Tensor]:
    """Return a chunk's states, weights and gradient on the device as bytes; they lie back to back."""
    plan = state.plan
    first, last = plan.chunk(op.unit, op.chunk)
    count, weights = last - first, plan.chunk_state_bytes(op.unit, op.chunk)
    slot = state.parts.buffers.device_states[op.slot(Pool.DEVICE_STATES)]
    gradient = weights + plan.planes.weight.num_bytes(count)
    return [slot[:weights], slot[weights:gradient], slot[gradient : gradient + count * plan.gradient_bytes_per_element]]


def _update_on_device(state: StepState, op: Op) -> None:
    parts, plan = state.parts, state.plan
    assert parts.device_updater is not None, "a program for updates on the device comes with a plan that has them"
    assert plan.rule.device_traffic_bytes is not None, "the rule has a figure for it"
    start, _ = plan.chunk(op.unit, op.chunk)
    states, weights, gradient = _on_device(state, op)
    places = zip(plan.planes.states, plan.state_places(op.unit, op.chunk), strict=True)
    planes = tuple(states[place].view(getattr(torch, plane.dtype)) for plane, place in places)
    of_dtype, of_gradient = weights.view(parts.buffers.dtype), gradient.view(parts.buffers.gradient_dtype)
    parts.device_updater.update_range(
        Chunk(of_dtype, planes, of_gradient, op.unit, start),
        state.verdict_of(op).scalars_of(op.unit),
        parts.pieces[op.unit],
    )


def _state_planes(state: StepState, op: Op) -> tuple[NDArray[Any], ...]:
    whole, planes, places = _states(state, op), state.plan.planes_of(op.unit), state.plan.state_places(op.unit, op.chunk)
    return tuple(whole[part].view(np.dtype(plane.dtype)) for plane, part in zip(planes.states, places, strict=True))
