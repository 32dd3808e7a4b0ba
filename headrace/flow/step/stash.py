"""What forward keeps for backward: a block's input and chosen operator outputs, on the device, in host memory or on SSD.

In host memory all of it lies in one buffer, so that it is one transfer. Where hidden states wait in host memory between blocks
(`hosted`), the input is there already. Invariant: what comes back has the bits, shapes and strides that it had.
"""

from typing import Any

import torch

from headrace.flow.step.step_state import HOLE, Package, StepState
from headrace.flow.weights.places import TensorPlace, in_memory_order, places_of
from headrace.machine.host_memory import Bytes
from headrace.plan.value.buffer_sizes import hidden_pages, stash_offset, stash_slot_bytes
from headrace.terms.lanes import Lane
from headrace.terms.program import Op, Pool, Verb


def input_to_host(state: StepState, op: Op) -> None:
    """Copy what a block leaves for backward from the device to its host buffer; of hosted states all but its input."""
    # Blocks of several sizes may share the buffer: only the part that this block needs is used.
    package, buffer = state.left.packages.pop((op.unit, op.micro)), torch.from_numpy(_pages(state, op))
    tensors, places = _laid_out(state, package)
    if places[-1].stop > buffer.numel():
        # The device's attention keeps more than was planned: then recomputing, which is exact too, takes its place.
        state.left.not_kept.add(op.unit)
        package = Package(package.hidden, {}, package.skipped)
        tensors, places = _laid_out(state, package)
    there = 1 if state.plan.hosted else 0
    for tensor, place in zip(tensors[there:], places[there:], strict=True):
        state.parts.machine.lend(tensor, op.lane)  # compute made it, and it is dropped once the copy is issued
        state.parts.machine.copy(place.of(buffer), in_memory_order(tensor))
    _note(state, op, package, places)


def leave_hosted(state: StepState, op: Op, package: Package) -> None:
    """Note where an input lies that is in host memory already, and beside which nothing is kept."""
    _note(state, op, package, _laid_out(state, package)[1])


def input_pages(state: StepState, op: Op) -> tuple[int, Bytes]:
    """Return where a stash buffer waits on the SSD, and its pages. A hosted input and what is kept beside it leave one after
    the other, and come back together.
    """
    offset = stash_offset(state.plan, op.unit, op.micro)
    if (slot := op.slot(Pool.BETWEEN)) >= 0:
        return offset, state.parts.buffers.between[slot]
    start = hidden_pages(state.plan) if state.plan.hosted and op.verb is Verb.OUT else 0
    return offset + start, _pages(state, op)[start:]


def read_in_place(state: StepState, op: Op) -> None:
    """Have compute read a stash buffer that came from the SSD where it is, unless the device is separate."""
    if not state.plan.separate_device:
        _deliver(state, op, torch.from_numpy(_buffer(state, op)))


def input_to_device(state: StepState, op: Op) -> None:
    """Copy a stash buffer from the host to the device."""
    num_bytes = state.left.layouts[op.unit, op.micro][1][-1].stop
    memory = torch.empty(num_bytes, dtype=torch.uint8, device=state.parts.machine.device)
    state.parts.machine.copy(memory, torch.from_numpy(_buffer(state, op)[:num_bytes]))
    state.parts.machine.lend(memory, Lane.COMPUTE)
    _deliver(state, op, memory)


def _deliver(state: StepState, op: Op, memory: torch.Tensor) -> None:
    """Put a package back together over `memory`."""
    skeleton, places = state.left.layouts.pop((op.unit, op.micro))
    tensors = iter([place.restored(memory) for place in places])
    state.left.recalled[op.unit, op.micro] = skeleton.like(lambda _: next(tensors))


def _note(state: StepState, op: Op, package: Package, places: list[TensorPlace]) -> None:
    state.left.layouts[op.unit, op.micro] = (package.like(lambda tensor: HOLE), places)


def _laid_out(state: StepState, package: Package) -> tuple[list[torch.Tensor], list[TensorPlace]]:
    """Return the tensors of a package, and where they lie in its buffer."""
    tensors = _tensors(package)
    return tensors, places_of(tensors, hidden_pages(state.plan) if state.plan.hosted else 0)


def _tensors(package: Package) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def collect(tensor: Any) -> Any:
        found.append(tensor)
        return tensor

    package.like(collect)
    return found


def _buffer(state: StepState, op: Op) -> Bytes:
    buffers, slot = state.parts.buffers, op.slot(Pool.STASH)
    if slot >= 0:
        return buffers.stash[slot]
    in_memory = buffers.host_stash[op.unit]
    return in_memory[op.micro % len(in_memory)]


def _pages(state: StepState, op: Op) -> Bytes:
    return _buffer(state, op)[: stash_slot_bytes(state.plan, op.unit)]
