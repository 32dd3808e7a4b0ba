"""What a run may use when nobody says: a share of what is free now, or of what a machine that is not here has.

Invariant: the same as what the engine takes here (`terms.budget.default_bytes`, `machine.limits`).
"""

import torch

from headrace.machine.cuda import GPU_OVERHEAD_BYTES
from headrace.machine.limits import default_host_bytes as host_bytes_here
from headrace.terms.budget import default_bytes
from headrace.terms.ceilings import Ceilings


def default_device_bytes(ceilings: Ceilings | None, *, here: bool) -> int | None:
    """Return 90 % of the bytes of device memory that are free here, or that the profile has; None without a device."""
    if here and torch.cuda.is_available():
        return default_bytes("device", torch.cuda.mem_get_info()[0])
    if ceilings is None or not ceilings.has_device:
        return None
    return default_bytes("device", ceilings.device_memory_bytes)


def default_device_overhead_bytes(ceilings: Ceilings | None, *, here: bool) -> int:
    """Return the bytes of a GPU that libraries and the allocator take besides tensors; 0 where the CPU computes."""
    gpu = (here and torch.cuda.is_available()) or (ceilings is not None and ceilings.has_device)
    return GPU_OVERHEAD_BYTES if gpu else 0


def default_host_bytes(ceilings: Ceilings | None, *, here: bool) -> int:
    """Return 70 % of the bytes of memory that are available here (`machine.limits`), or that the profile has."""
    if not here and ceilings is not None:
        return default_bytes("host", ceilings.host_memory_bytes)
    return host_bytes_here(pins=torch.cuda.is_available())
