"""What forward keeps for backward: a block's input and chosen operator outputs, on the device, in host memory or on SSD.

In host memory all of it lies in one buffer, so that it is one transfer. Invariant: what comes back has the bits, shapes and
strides that it had.
"""

from dataclasses import dataclass
from typing import Any

import torch

from headrace.flow.step_state import HOLE, Package, StepState
from headrace.machine.host_memory import Bytes
from headrace.plan.buffer_sizes import TENSOR_ALIGNMENT_BYTES, stash_offset, stash_slot_bytes
from headrace.terms.lanes import Lane
from headrace.terms.program import Op, Pool
from headrace.terms.sizes import round_up


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies in a stash buffer, and how to restore its shape."""

    start: int
    num_bytes: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + self.num_bytes


def stash(state: StepState, op: Op) -> None:
    """Copy what a block leaves for backward from the device to its host buffer."""
    # Blocks of several sizes may share the buffer: only the part that this block needs is used.
    package, buffer = state.packages.pop((op.unit, op.micro)), torch.from_numpy(_pages(state, op))
    tensors = _tensors(package)
    places = _places(tensors)
    if places[-1].stop > buffer.numel():
        # The device's attention keeps more than was planned: then recomputing, which is exact too, takes its place.
        state.not_kept.add(op.unit)
        package = Package(package.hidden, {}, package.skipped)
        tensors = _tensors(package)
        places = _places(tensors)
    for tensor, place in zip(tensors, places, strict=True):
        state.parts.machine.lend(tensor, op.lane)  # compute made it, and it is dropped once the copy is issued
        state.parts.machine.copy(buffer[place.start : place.stop].view(place.dtype), _in_memory_order(tensor))
    state.layouts[op.unit, op.micro] = (package.like(lambda tensor: HOLE), places)


def spill(state: StepState, op: Op) -> None:
    """Write a stash buffer to the SSD."""
    state.parts.store.scratch_write(stash_offset(state.plan, op.unit, op.micro), _pages(state, op)).wait()


def unspill(state: StepState, op: Op) -> None:
    """Read a stash buffer back from the SSD; unless the device is separate, compute reads it there."""
    state.parts.store.scratch_read(stash_offset(state.plan, op.unit, op.micro), _pages(state, op)).wait()
    if not state.plan.separate_device:
        _deliver(state, op, torch.from_numpy(_buffer(state, op)))


def recall(state: StepState, op: Op) -> None:
    """Copy a stash buffer from the host to the device."""
    num_bytes = state.layouts[op.unit, op.micro][1][-1].stop
    memory = torch.empty(num_bytes, dtype=torch.uint8, device=state.parts.machine.device)
    state.parts.machine.copy(memory, torch.from_numpy(_buffer(state, op)[:num_bytes]))
    state.parts.machine.lend(memory, Lane.COMPUTE)
    _deliver(state, op, memory)


def _deliver(state: StepState, op: Op, memory: torch.Tensor) -> None:
    """Put a package back together over `memory`."""
    skeleton, places = state.layouts.pop((op.unit, op.micro))
    # `.data` gives each tensor a version counter of its own, though they share the buffer.
    tensors = iter(
        [memory[place.start : place.stop].view(place.dtype).as_strided(place.size, place.stride).data for place in places]
    )
    state.recalled[op.unit, op.micro] = skeleton.like(lambda _: next(tensors))


def _tensors(package: Package) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def collect(tensor: Any) -> Any:
        found.append(tensor)
        return tensor

    package.like(collect)
    return found


def _places(tensors: list[torch.Tensor]) -> list[_Place]:
    """Return where each tensor lies in a stash buffer: one after the other, each on a cache line."""
    places: list[_Place] = []
    for tensor in tensors:
        start = round_up(places[-1].stop, TENSOR_ALIGNMENT_BYTES) if places else 0
        places.append(
            _Place(start, tensor.numel() * tensor.element_size(), tensor.dtype, tuple(tensor.shape), _strides(tensor))
        )
    return places


def _in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as a 1-D tensor in the order of their memory, without a copy if they are dense."""
    return tensor.permute(_memory_order(tensor)).reshape(-1)


def _memory_order(tensor: torch.Tensor) -> list[int]:
    """Return the axes from the one with the largest stride to the one with the smallest."""
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda axis: (-strides[axis], axis))


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides with which the dense copy of `tensor` has its shape."""
    strides, step = [0] * tensor.dim(), 1
    for axis in reversed(_memory_order(tensor)):
        strides[axis] = step
        step *= tensor.shape[axis]
    return tuple(strides)


def _buffer(state: StepState, op: Op) -> Bytes:
    buffers, slot = state.parts.buffers, op.slot(Pool.STASH)
    return buffers.stash[slot] if slot >= 0 else buffers.host_stash[op.unit][op.micro]


def _pages(state: StepState, op: Op) -> Bytes:
    return _buffer(state, op)[: stash_slot_bytes(state.plan, op.unit)]
