"""Memory of the device, cut like a host arena into the buffers of a plan."""

import torch

from headrace.machine.protocol import Machine
from headrace.terms.sizes import PAGE_BYTES, round_up

TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class DeviceArena:
    """An `Arena` for memory that only torch can address."""

    def __init__(self, machine: Machine, num_bytes: int) -> None:
        self._memory = machine.device_buffer(max(num_bytes, PAGE_BYTES))
        self._used_bytes = 0

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return the next `num_bytes` as a uint8 tensor."""
        start = self._used_bytes
        self._used_bytes += round_up(num_bytes, PAGE_BYTES)
        if self._used_bytes > self._memory.numel():
            raise AssertionError(f"device arena of {self._memory.numel()} bytes is smaller than the plan's buffers")
        # `.data`: views of one tensor share a version counter, so autograd would take a write to one buffer for a write to all.
        return self._memory[start : start + num_bytes].data
