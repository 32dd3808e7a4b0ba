"""Machine profiles for tests: round figures, nothing shared unless asked for."""

from typing import Any

from headrace.terms.machine.ceilings import Ceilings

ON_DEVICE = ("compute", "device-update", "make")


def machine(
    *,
    compute: float = 1e12,
    read: float = 10e9,
    write: float = 5e9,
    mixed: float | None = None,
    inward: float = 20e9,
    outward: float = 20e9,
    both_ways: float | None = None,
    update: float = 40e9,
    memory: float = 1e13,
    device: float = 1e12,
    **changes: Any,
) -> Ceilings:
    """Return a profile with these rates (FLOP/s, bytes/s); by default pairs are full duplex and nothing is slowed."""
    drive = {
        "read_bytes_per_second": read,
        "write_bytes_per_second": write,
        "mixed_bytes_per_second": read + write if mixed is None else mixed,
        "capacity_bytes": 10**12,
    }
    values: dict[str, Any] = {
        "name": "made up",
        "has_device": True,
        "device_memory_bytes": 8 << 30,
        "host_memory_bytes": 64 << 30,
        "cores": 8,
        "flops_per_second": {"bfloat16": compute},
        "host_to_device_bytes_per_second": inward,
        "device_to_host_bytes_per_second": outward,
        "both_ways_bytes_per_second": inward + outward if both_ways is None else both_ways,
        "host_memory_bytes_per_second": memory,
        "device_memory_bytes_per_second": device,
        "update_bytes_per_second": update,
        "update_bytes_per_second_per_core": update / 4,
        "drives": [drive],
        "slowdowns": {lane: {other: 1.0 for other in ON_DEVICE if other != lane} for lane in ON_DEVICE},
    }
    return Ceilings.from_json(values | changes)
