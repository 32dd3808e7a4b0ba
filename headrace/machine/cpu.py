"""The CPU as the device.

Without a device budget, device memory *is* host memory: nothing is copied. With one, a separate arena in host memory plays the
device, so that the whole three-tier path runs, with real copies, on any machine.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path

import numpy as np
import torch

from headrace.machine.host_memory import Bytes, huge_page_buffer
from headrace.machine.limits import available_memory_bytes
from headrace.machine.protocol import DeviceEvent
from headrace.terms.lanes import Lane

# What processors call their instructions for products of 16-bit numbers: x86 (AVX-512, AMX), and ARM.
_PRODUCT_FLAGS = {
    "bfloat16": {"avx512_bf16", "amx_bf16", "bf16"},
    "float16": {"avx512_fp16", "amx_fp16", "asimdhp"},
}


class CpuMachine:
    """`separate_device=True` gives the CPU a device arena of its own inside host memory."""

    def __init__(self, *, separate_device: bool = False) -> None:
        self.device = torch.device("cpu")
        self.separate_device = separate_device
        self.device_overhead_bytes = 0

    def multiplies(self, dtype: str) -> bool:
        """Say whether this processor multiplies numbers of `dtype`; where the kernel does not list what it has, suppose so."""
        flags = processor_flags()
        return not flags or dtype not in _PRODUCT_FLAGS or bool(flags & _PRODUCT_FLAGS[dtype])

    def host_buffer(self, num_bytes: int) -> Bytes:
        """Return huge-page host memory."""
        return huge_page_buffer(num_bytes)

    def pinned(self, buffer: Bytes) -> Bytes:
        """Nothing is pinned."""
        return buffer

    def device_buffer(self, num_bytes: int) -> torch.Tensor:
        """Return host memory that stands for the device's."""
        return torch.from_numpy(huge_page_buffer(num_bytes))

    def lane(self, lane: Lane) -> AbstractContextManager[object]:
        """Work happens where it is called."""
        return nullcontext()

    def record(self, lane: Lane) -> DeviceEvent | None:
        """Issuing is finishing."""
        return None

    def wait(self, event: DeviceEvent, lane: Lane) -> None:
        """Never needed; there are no events."""
        event.synchronize()

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """Copy on this thread alone: torch's own copy would start a second team of threads beside compute's."""
        np.copyto(into.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())

    def lend(self, tensor: torch.Tensor, lane: Lane) -> None:
        """Nothing to say: lanes finish where they issue."""

    def release_host_buffers(self) -> None:
        """Nothing is pinned."""

    def device_memory_bytes(self) -> tuple[int, int]:
        """Return what is available of host memory."""
        available = available_memory_bytes()
        return available, available

    def device_peak_bytes(self) -> int:
        """Device memory is host memory here; the host's peak counts it."""
        return 0


@cache
def processor_flags() -> frozenset[str]:
    """Return what the kernel says that the processor has, by its names; empty where it says nothing."""
    return frozenset(_first_of("flags", "features").split())


def processor_name() -> str:
    """Return what the kernel calls the processor; empty where it says nothing."""
    return _first_of("model name", "cpu part")


def _first_of(*fields: str) -> str:
    """Return the first value of one of these fields of the kernel's list of processors."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.lower().startswith(fields)), "")
