"""The seam between the engine and the hardware: buffers, copies, and marks in a lane's queue. Nothing else.

Lanes (terms.program.Lane) are threads on the host. On a machine with a GPU some lanes also own a CUDA stream: compute, both
copies, and updates on the device. A lane's thread *issues* an operation; it is *finished* when the mark after it is reached.
"""

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from headrace.machine.host_memory import Bytes
from headrace.terms.lanes import Lane


class DeviceEvent(Protocol):
    """A mark in the queue of a lane of the device."""

    def synchronize(self) -> None:
        """Block this host thread until the mark is reached."""

    def reached_seconds(self) -> float:
        """Return when a mark that is reached was reached, on the clock of `time.perf_counter`."""


class Machine(Protocol):
    """What the engine asks of the hardware.

    `separate_device` says whether the device has memory of its own, so that weights, gradients and activations cross a link.
    `device_overhead_bytes` of it are taken by libraries and the allocator besides tensors.
    """

    device: torch.device
    separate_device: bool
    device_overhead_bytes: int

    def multiplies(self, dtype: str) -> bool:
        """Say whether the device has instructions for products of numbers of `dtype`."""

    def host_buffer(self, num_bytes: int) -> Bytes:
        """Return zeroed host memory for an arena: page-aligned, on huge pages, pinned where there is a GPU."""

    def pinned(self, buffer: Bytes) -> Bytes:
        """Return host memory that was not made by `host_buffer`, as fit for copies as what was."""

    def device_buffer(self, num_bytes: int) -> torch.Tensor:
        """Return device memory for an arena as a uint8 tensor."""

    def lane(self, lane: Lane) -> AbstractContextManager[object]:
        """Return a context in which this thread's device work goes to `lane`'s queue."""

    def record(self, lane: Lane) -> DeviceEvent | None:
        """Mark the end of what `lane` has issued so far; `None` where issuing is finishing."""

    def wait(self, event: DeviceEvent, lane: Lane) -> None:
        """Make `lane` wait for `event`: on the device where `lane` has a queue there, else block this thread."""

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """Copy equal-sized 1-D tensors of equal dtype between host and device, in the current lane's queue."""

    def lend(self, tensor: torch.Tensor, lane: Lane) -> None:
        """Say that `lane` uses device memory that was taken in another lane: it is not handed on before `lane` is done with it.

        An allocator that orders frees by queue knows only the queue that a tensor was made in.
        """

    def release_host_buffers(self) -> None:
        """Finish all device work and give back what `host_buffer` pinned; its buffers are ordinary memory from here on."""

    def device_memory_bytes(self) -> tuple[int, int]:
        """Return `(free, total)` bytes of the device's own memory."""

    def device_peak_bytes(self) -> int:
        """Return the largest number of bytes in use on the device since the start."""
