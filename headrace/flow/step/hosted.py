"""Hidden states wait in host memory between two blocks, and their gradients: device -> host after compute, and back before it.

Where a block's input waits for backward in host memory, it is this same copy (`stash`).
"""

from collections.abc import MutableMapping
from typing import Any

import torch

from headrace.flow.step.step_state import StepState
from headrace.flow.weights.places import in_memory_order, places_of
from headrace.terms.lanes import Lane
from headrace.terms.program import Op, Pool

# Gradients lie under this number of a unit, which none has.
_GRADIENT = -1


def hidden_out(state: StepState, op: Op) -> None:
    """Copy the input of a unit to host memory."""
    _out(state, op, op.unit, state.inputs.pop((op.unit, op.micro)))


def hidden_in(state: StepState, op: Op) -> None:
    """Bring the input of a unit to the device."""
    _in(state, op, op.unit, state.inputs, (op.unit, op.micro))


def gradient_out(state: StepState, op: Op) -> None:
    """Copy the gradient of a unit's output to host memory."""
    _out(state, op, _GRADIENT, state.hidden_gradients.pop(op.micro))


def gradient_in(state: StepState, op: Op) -> None:
    """Bring the gradient of a unit's output to the device."""
    _in(state, op, _GRADIENT, state.hidden_gradients, op.micro)


def _out(state: StepState, op: Op, what: int, tensor: torch.Tensor) -> None:
    machine, (place,) = state.parts.machine, places_of([tensor])
    machine.lend(tensor, op.lane)  # compute made it, and it is dropped once the copy is issued
    machine.copy(place.of(_memory(state, op)), in_memory_order(tensor))
    state.on_host[what, op.micro] = place


def _in(state: StepState, op: Op, what: int, into: MutableMapping[Any, torch.Tensor], key: Any) -> None:
    machine, place = state.parts.machine, state.on_host[what, op.micro]
    memory = torch.empty(place.num_bytes, dtype=torch.uint8, device=machine.device)
    machine.copy(memory, _memory(state, op)[: place.num_bytes])
    machine.lend(memory, Lane.COMPUTE)
    into[key] = place.restored(memory)


def _memory(state: StepState, op: Op) -> torch.Tensor:
    buffers, slot = state.parts.buffers, op.slot(Pool.BETWEEN)
    return torch.from_numpy(buffers.between[slot] if slot >= 0 else buffers.host_stash[op.unit][op.micro])
