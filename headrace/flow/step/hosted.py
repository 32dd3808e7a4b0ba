"""Hidden states wait in host memory between two blocks, and their gradients: device -> host after compute, and back before it.

Where a block's input waits for backward in host memory, it is this same copy (`stash`).
"""

from collections.abc import MutableMapping
from typing import Any

import torch

from headrace.flow.step.step_state import StepState
from headrace.flow.weights.places import in_memory_order, places_of
from headrace.terms.lanes import Lane
from headrace.terms.program import Op, Pool, Waiting

# Gradients lie under this number of a unit, which none has.
_GRADIENT = -1


def hidden_to_host(state: StepState, op: Op) -> None:
    """Copy the input of a unit, or the gradient of its output, to host memory."""
    what, on_device, key = _which(state, op)
    tensor = on_device.pop(key)
    machine, (place,) = state.parts.machine, places_of([tensor])
    machine.lend(tensor, op.lane)  # compute made it, and it is dropped once the copy is issued
    machine.copy(place.of(_memory(state, op)), in_memory_order(tensor))
    state.on_host[what, op.micro] = place


def hidden_to_device(state: StepState, op: Op) -> None:
    """Bring it to the device."""
    what, on_device, key = _which(state, op)
    machine, place = state.parts.machine, state.on_host[what, op.micro]
    memory = torch.empty(place.num_bytes, dtype=torch.uint8, device=machine.device)
    machine.copy(memory, _memory(state, op)[: place.num_bytes])
    machine.lend(memory, Lane.COMPUTE)
    on_device[key] = place.restored(memory)


def _which(state: StepState, op: Op) -> tuple[int, MutableMapping[Any, torch.Tensor], Any]:
    """Return the number under which it lies on the host, and where compute has it."""
    if op.waiting is Waiting.HIDDEN_GRADIENT:
        return _GRADIENT, state.hidden_gradients, op.micro
    return op.unit, state.inputs, (op.unit, op.micro)


def _memory(state: StepState, op: Op) -> torch.Tensor:
    buffers, slot = state.parts.buffers, op.slot(Pool.BETWEEN)
    return torch.from_numpy(buffers.between[slot] if slot >= 0 else buffers.host_stash[op.unit][op.micro])
