"""From rates to the figures of a machine profile: what both ways of measuring (`machine`, `brief`) share.

Invariant: noise never leads to a figure that `Ceilings.from_json` refuses.
"""

import platform
from collections.abc import Sequence

import torch

from headrace.machine.protocol import Machine
from headrace.measure.drives import DriveFile
from headrace.measure.loads import LoadFigures
from headrace.terms.lanes import Lane

# A lane that keeps more than this share of its own rate counts as undisturbed: repeats differ by as much.
_UNDISTURBED = 0.97
_LEAST_SHARE = 0.01


def title(machine: Machine, cores: int, num_drives: int) -> str:
    """Return what a machine is called."""
    gpu = machine.device.type == "cuda"
    name = torch.cuda.get_device_name(machine.device) if gpu else f"{platform.machine()} CPU with {cores} threads"
    return f"{name}, {num_drives} SSD {'directory' if num_drives == 1 else 'directories'}"


def both_ways(found: LoadFigures, one: str, other: str) -> float:
    """Return the total rate of two directions at once; noise above the sum of the two alone is cut off."""
    first, second = found.shares[one, other]
    return min(1.0, first) * found.rates[one] + min(1.0, second) * found.rates[other]


def drive_figures(found: LoadFigures, index: int, drive: DriveFile) -> dict[str, float | int | None]:
    """Return the figures of drive number `index`, whose loads are called `read` and `write` with that number."""
    read, write = f"read {index}", f"write {index}"
    return {
        "read_bytes_per_second": found.rates[read],
        "write_bytes_per_second": found.rates[write],
        "mixed_bytes_per_second": both_ways(found, read, write),
        "capacity_bytes": drive.capacity_bytes,
        "threads_per_direction": drive.setting.threads if drive.setting else None,
        "piece_bytes": drive.setting.piece_bytes if drive.setting else None,
        "io_cpu_seconds_per_gigabyte": drive.cpu_seconds_per_gigabyte,
    }


def slowdowns(found: LoadFigures, pairs: Sequence[tuple[str, str]]) -> dict[str, dict[str, float]]:
    """Return the share that each lane keeps of its rate beside another, as far as the shared memory bus does not explain it."""
    lanes = set(Lane)
    bus = max(found.rates["stream"], found.rates["update all"])
    kept_by_lane: dict[str, dict[str, float]] = {}
    for one, other in pairs:
        shares = found.shares.get((one, other))
        if shares is None or not {one, other} <= lanes or (one, other) == (Lane.HOST_TO_DEVICE, Lane.DEVICE_TO_HOST):
            continue
        explained = 1.0
        if Lane.COMPUTE not in (one, other):
            explained = min(1.0, bus / (found.rates[one] + found.rates[other]))
        for lane, beside, share in ((one, other, shares[0]), (other, one, shares[1])):
            kept = max(_LEAST_SHARE, share / explained)
            if kept < _UNDISTURBED:
                kept_by_lane.setdefault(str(lane), {})[str(beside)] = round(kept, 4)
    return kept_by_lane
