"""States come, the rule makes one pass, states and weights go: chunk by chunk, out of core, exactly."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.flow.state import StepState
from headrace.machine import Bytes
from headrace.spec.program import Op


def read_states(state: StepState, op: Op) -> None:
    """Read a chunk's states into their staging buffer."""
    if state.updating.skipped is None:
        state.parts.store.read_states(op.unit, op.chunk, _states(state, op)).wait()


def update(state: StepState, op: Op) -> None:
    """Apply the rule to a chunk: weights in their host slot and states in staging, both in place."""
    verdict = state.updating
    if verdict.skipped is not None:
        return
    plan, buffers = state.plan, state.parts.buffers
    start, stop = plan.chunk(op.unit, op.chunk)
    weights = _weights(state, op).view(plan.planes.weight.dtype)
    state.parts.updater.update_range(
        weights,
        _state_planes(state, op, stop - start),
        buffers.gradient(op.unit, op.gradient_slot)[start:stop],
        verdict.hyper,
        state.parts.chain.layouts[op.unit].groups,
        start,
        stop,
        op.unit,
    )


def write_states(state: StepState, op: Op) -> None:
    """Write a chunk's new states into the slot that is not committed."""
    if state.updating.skipped is None:
        state.parts.store.write_states(op.unit, op.chunk, _states(state, op)).wait()


def write_weights(state: StepState, op: Op) -> None:
    """Write a chunk's new weights into the slot that is not committed."""
    if state.updating.skipped is None:
        state.parts.store.write_weights(op.unit, op.chunk, _weights(state, op)).wait()


def _weights(state: StepState, op: Op) -> Bytes:
    """Return the chunk's part of the unit's weights in host memory."""
    plan, buffers = state.plan, state.parts.buffers
    start, stop = plan.chunk(op.unit, op.chunk)
    whole = buffers.resident_host_weights(op.unit) if op.host_slot < 0 else buffers.host_weights[op.host_slot]
    width = plan.planes.weight.bytes_per_element
    return whole[start * width : stop * width]


def _states(state: StepState, op: Op) -> Bytes:
    """Return the chunk's states, all planes back to back: in staging, or where they always are."""
    plan, buffers = state.plan, state.parts.buffers
    start, stop = plan.chunk(op.unit, op.chunk)
    if op.state_slot >= 0:
        return buffers.states[op.state_slot][: plan.planes.state_bytes(stop - start)]
    return buffers.resident_states[op.unit][plan.states_of_chunk(op.unit, op.chunk)]


def _state_planes(state: StepState, op: Op, num_elements: int) -> tuple[NDArray[Any], ...]:
    whole = _states(state, op)
    return tuple(whole[part].view(np.dtype(plane.dtype)) for plane, part in state.plan.planes.split_states(num_elements))
