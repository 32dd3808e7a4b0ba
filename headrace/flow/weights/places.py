"""Where tensors lie in a buffer of bytes, so that they come back with the bits, shapes and strides that they had."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headrace.plan.value.buffer_sizes import TENSOR_ALIGNMENT_BYTES
from headrace.terms.sizes import round_up


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor lies in a buffer, and how to restore its shape."""

    start: int
    num_bytes: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def stop(self) -> int:
        """The end of its bytes."""
        return self.start + self.num_bytes

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the elements within the bytes of `memory`, in one dimension."""
        return memory[self.start : self.stop].view(self.dtype)

    def restored(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the tensor within the bytes of `memory`."""
        # `.data` gives each tensor a version counter of its own, though they share the buffer.
        return self.of(memory).as_strided(self.size, self.stride).data


def places_of(tensors: Sequence[torch.Tensor], first_bytes: int = 0) -> list[TensorPlace]:
    """Return where each tensor lies in a buffer: one after the other, each on a cache line. The first has `first_bytes`, or
    what it takes.
    """
    places: list[TensorPlace] = []
    for tensor in tensors:
        start = round_up(max(places[-1].stop, first_bytes), TENSOR_ALIGNMENT_BYTES) if places else 0
        num_bytes = tensor.numel() * tensor.element_size()
        places.append(TensorPlace(start, num_bytes, tensor.dtype, tuple(tensor.shape), _strides(tensor)))
    return places


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
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
