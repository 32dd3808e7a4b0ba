"""The machine that this process runs on."""

import torch

from headrace.machine.cpu import CpuMachine
from headrace.machine.cuda import CudaMachine
from headrace.machine.protocol import Machine


def this_machine(device_bytes: int | None) -> Machine:
    """Return the GPU, held to `device_bytes`; without one the CPU, which plays a device of its own where a budget names one."""
    if torch.cuda.is_available():
        return CudaMachine(memory_limit_bytes=device_bytes)
    return CpuMachine(separate_device=device_bytes is not None)
