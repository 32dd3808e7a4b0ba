"""What the hardware can do, behind one protocol."""

from headrace.machine.arena import Arena
from headrace.machine.base import DeviceEvent, Machine
from headrace.machine.cpu import CpuMachine
from headrace.machine.cuda import CudaMachine
from headrace.machine.here import this_machine
from headrace.machine.host import (
    Bytes,
    HeapGuard,
    anonymous_bytes,
    huge_page_buffer,
    keep_freed_memory,
    return_pieces,
)
from headrace.machine.limits import (
    available_memory_bytes,
    control_group_limit_bytes,
    default_host_bytes,
    pinnable_memory_bytes,
)
from headrace.machine.meter import MemoryMeter

__all__ = [
    "Arena",
    "Bytes",
    "CpuMachine",
    "CudaMachine",
    "DeviceEvent",
    "HeapGuard",
    "Machine",
    "MemoryMeter",
    "anonymous_bytes",
    "available_memory_bytes",
    "control_group_limit_bytes",
    "default_host_bytes",
    "huge_page_buffer",
    "keep_freed_memory",
    "pinnable_memory_bytes",
    "return_pieces",
    "this_machine",
]
