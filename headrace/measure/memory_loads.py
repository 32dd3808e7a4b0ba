"""Host memory and the link: a stream over all of it, the update kernel, copies to the device and back.

Invariant: buffers are written before they are read. Pages that were never written are all one shared page of zeros, and reading
them measures the cache.
"""

from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.machine.host_memory import huge_page_buffer
from headrace.machine.protocol import Machine
from headrace.terms.lanes import Lane
from headrace.terms.layout import GroupRange
from headrace.terms.options.options import Options
from headrace.update import StepScalars, Updater, optimizer_of, rule_of, square_sum
from headrace.update.rules.rule import Chunk

# The default rule: plans know other rules by their rate relative to its.
_RULE = rule_of(optimizer_of(Options()), "bfloat16")
_ONE_IN_BFLOAT16 = 0x3F80
# The drain converts in pieces of this many elements, on one thread.
_CONVERT_ELEMENTS = 32768


class StreamLoad:
    """Multiplies an array in place, on `threads` threads: each byte is read once and written once."""

    def __init__(self, num_bytes: int, threads: int) -> None:
        self._values: NDArray[np.float32] = huge_page_buffer(num_bytes // 4 * 4).view(np.float32)
        self._values[:] = 1.0
        self._parts = np.array_split(self._values, threads)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="headrace measure stream")

    def unit(self) -> float:
        """Pass over the array once; returns bytes read and written."""
        wait([self._pool.submit(np.multiply, part, np.float32(1.0), part) for part in self._parts])
        return 2.0 * self._values.nbytes

    def close(self) -> None:
        """End the threads, and give the memory back."""
        self._pool.shutdown()
        self._parts, self._values = [], np.empty(0, np.float32)


class UpdateBuffers:
    """Weights, states and gradient of `num_elements` parameters in bfloat16 planes, all of them 1.0: a number as in training.

    Arbitrary bits would not do: with subnormal numbers some processors take ten times as long.
    """

    def __init__(self, num_elements: int) -> None:
        self.weight = _filled(num_elements, _RULE.planes.weight.dtype, _ONE_IN_BFLOAT16)
        remainder, *own = _RULE.planes.states
        self.states = (
            _filled(num_elements, remainder.dtype, 0),
            *(_filled(num_elements, plane.dtype, 1) for plane in own),
        )
        self.gradient = _filled(num_elements, "uint16", _ONE_IN_BFLOAT16)


class UpdateLoad:
    """The update kernel over `buffers`, on `threads` threads."""

    def __init__(self, buffers: UpdateBuffers, threads: int) -> None:
        self._buffers = buffers
        self._updater = Updater(_RULE, threads)
        self._scalars = StepScalars(learning_rate=1e-5, update=1)
        self._groups = (GroupRange(0, buffers.weight.size, 1.0, 0.0),)

    def unit(self) -> float:
        """Update all parameters once, as a step does; returns all bytes that cross the memory bus, as plans count them."""
        buffers, size = self._buffers, self._buffers.weight.size
        arrays = buffers.weight, buffers.states, buffers.gradient
        self._updater.update_range(Chunk(*arrays), self._scalars, self._groups, take_checksums=True)
        return float(2 * _RULE.planes.num_bytes(size) + size * buffers.gradient.itemsize)

    def close(self) -> None:
        """End the threads."""
        self._updater.close()


class CopyLoad:
    """Copies `num_bytes` between host and device, in the lane that the engine copies in."""

    def __init__(self, machine: Machine, lane: Lane, num_bytes: int) -> None:
        self._machine, self._lane = machine, lane
        host = machine.host_buffer(num_bytes)
        host[:] = 1
        device = machine.device_buffer(num_bytes)
        device.fill_(1)
        inward = lane is Lane.HOST_TO_DEVICE
        self._into, self._source = (device, torch.from_numpy(host)) if inward else (torch.from_numpy(host), device)

    def unit(self) -> float:
        """Copy once; returns the bytes of the buffer."""
        with self._machine.lane(self._lane):
            self._machine.copy(self._into, self._source)
            event = self._machine.record(self._lane)
        if event is not None:
            event.synchronize()
        return float(self._into.nbytes)


class DrainLoad:
    """How a gradient leaves compute on a CPU: float32 to bfloat16 and its sum of squares, on one thread."""

    def __init__(self, num_elements: int) -> None:
        self._source = torch.ones(num_elements, dtype=torch.float32)
        self._into = torch.zeros(num_elements, dtype=torch.bfloat16)

    def unit(self) -> float:
        """Drain once; returns the bytes of the drained gradient."""
        for start in range(0, self._into.numel(), _CONVERT_ELEMENTS):
            part = slice(start, start + _CONVERT_ELEMENTS)
            self._into[part].copy_(self._source[part])
        square_sum(self._into.view(torch.int16).numpy().view(np.uint16))
        return float(self._into.nbytes)


def _filled(num_elements: int, dtype: str, value: int) -> NDArray[Any]:
    """Return an array on huge pages, `value` written to each element."""
    array: NDArray[Any] = huge_page_buffer(num_elements * np.dtype(dtype).itemsize).view(dtype)
    array[:] = value
    return array
