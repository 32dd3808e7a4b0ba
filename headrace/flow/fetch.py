"""Weights come: SSD -> host slot -> device slot."""

import torch

from headrace.flow.step_state import StepState
from headrace.machine.host_memory import Bytes
from headrace.terms.families import WEIGHTS
from headrace.terms.program import Op, Pool


def fetch(state: StepState, op: Op) -> None:
    """Read a unit's newest weights into its host slot (a resident unit: into the staging buffer)."""
    state.parts.store.read(op.unit, WEIGHTS, _host_weights(state, op)).wait()


def upload(state: StepState, op: Op) -> None:
    """Copy a unit's weights from the host to the device."""
    parts = state.parts
    slot = op.slot(Pool.DEVICE_WEIGHTS)
    if slot < 0:
        into = parts.buffers.resident_weights[op.unit]
    else:
        into = parts.buffers.device_weights[slot][: state.plan.units[op.unit].num_elements]
    source = torch.from_numpy(_host_weights(state, op)).view(parts.buffers.dtype)
    parts.machine.copy(into, source)


def _host_weights(state: StepState, op: Op) -> Bytes:
    slot = op.slot(Pool.HOST_WEIGHTS)
    if slot < 0:
        return state.parts.buffers.resident_host_weights(op.unit)
    num_bytes = state.plan.units[op.unit].num_elements * state.plan.planes.weight.bytes_per_element
    return state.parts.buffers.host_weights[slot][:num_bytes]
