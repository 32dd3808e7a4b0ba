"""What is measured at any depth (`machine`, `brief`): the loads of drives and memory, and the figures of a profile that follow.

Invariant: noise never leads to a figure that `Ceilings.from_json` refuses.
"""

import platform
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import torch

from headrace.machine.host_memory import keep_freed_memory
from headrace.machine.protocol import Machine
from headrace.measure.drives import DriveFile
from headrace.measure.loads import Load, LoadFigures
from headrace.measure.memory_loads import CopyLoad, DrainLoad, StreamLoad, UpdateBuffers, UpdateLoad
from headrace.terms.lanes import Lane
from headrace.terms.layout import COMPUTE_DTYPES, UNIT_ALIGNMENT

# A lane that keeps more than this share of its own rate counts as undisturbed: repeats differ by as much.
_UNDISTURBED = 0.97
_LEAST_SHARE = 0.01
_BYTES_PER_UPDATED = 16


class Parts:
    """The loads of `machine`, by name, and a file on each drive; closed by `stack`. A subclass adds compute, and measures."""

    def __init__(self, machine: Machine, directories: Sequence[Path], stack: ExitStack) -> None:
        self._machine, self._directories, self._stack = machine, tuple(directories), stack
        stack.callback(machine.release_host_buffers)
        stack.callback(keep_freed_memory, False)
        keep_freed_memory(False)  # until the cost of giving it back has been measured
        self._gpu = machine.device.type == "cuda"
        self._cores = torch.get_num_threads()
        self._loads: dict[str, Load] = {}
        self._drives: list[DriveFile] = []

    def _add(self, name: str, load: Load) -> None:
        self._loads[name] = load

    def _add_memory(self, stream_bytes: int, copy_bytes: int, update_bytes: int) -> None:
        stream = StreamLoad(stream_bytes, self._cores)
        self._stack.callback(stream.close)
        self._add("stream", stream)
        num_bytes = copy_bytes // 4096 * 4096
        self._add(Lane.HOST_TO_DEVICE, CopyLoad(self._machine, Lane.HOST_TO_DEVICE, num_bytes))
        outward = CopyLoad(self._machine, Lane.DEVICE_TO_HOST, num_bytes) if self._gpu else DrainLoad(num_bytes // 4)
        self._add(Lane.DEVICE_TO_HOST, outward)
        buffers = UpdateBuffers(update_bytes // _BYTES_PER_UPDATED // UNIT_ALIGNMENT * UNIT_ALIGNMENT)
        # Half of the cores, as plans have it where compute needs the others; and without compute, also one core and all.
        for name, threads in (("update 1", 1), ("update all", self._cores), (Lane.UPDATE, max(1, self._cores // 2))):
            update = UpdateLoad(buffers, threads)
            self._stack.callback(update.close)
            self._add(name, update)

    def _drive_overheads(self) -> dict[str, float]:
        return {
            "transfer_seconds": max(drive.transfer_seconds() for drive in self._drives),
            "commit_seconds": max(drive.commit_seconds() for drive in self._drives),
        }

    def _values(self, found: LoadFigures, pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
        """Return the figures of a profile that do not depend on the depth."""
        rates = found.rates
        update = max(rates["update all"], rates[Lane.UPDATE], rates["update 1"])
        gpu = torch.cuda.get_device_name(self._machine.device) if self._gpu else ""
        name = gpu or f"{platform.machine()} CPU with {self._cores} threads"
        return {
            "name": f"{name}, {len(self._drives)} SSD {'directory' if len(self._drives) == 1 else 'directories'}",
            "has_device": self._gpu,
            "device_memory_bytes": self._machine.device_memory_bytes()[1] if self._gpu else 0,
            "host_memory_bytes": psutil.virtual_memory().total,
            "cores": self._cores,
            "host_to_device_bytes_per_second": rates[Lane.HOST_TO_DEVICE],
            "device_to_host_bytes_per_second": rates[Lane.DEVICE_TO_HOST],
            "both_ways_bytes_per_second": _both_ways(found, Lane.HOST_TO_DEVICE, Lane.DEVICE_TO_HOST),
            # The kernel counts bytes as the stream does; the larger of the two rates shows what the bus can do.
            "host_memory_bytes_per_second": max(rates["stream"], update),
            "update_bytes_per_second": update,
            "update_bytes_per_second_per_core": rates["update 1"],
            "drives": [_drive_figures(found, index, drive) for index, drive in enumerate(self._drives)],
            "slowdowns": _slowdowns(found, pairs),
            "widened_dtypes": [dtype for dtype in COMPUTE_DTYPES if not self._machine.multiplies(dtype)],
        }


def _both_ways(found: LoadFigures, one: str, other: str) -> float:
    """Return the total rate of two directions at once; noise above the sum of the two alone is cut off."""
    first, second = found.shares[one, other]
    return min(1.0, first) * found.rates[one] + min(1.0, second) * found.rates[other]


def _drive_figures(found: LoadFigures, index: int, drive: DriveFile) -> dict[str, float | int | None]:
    """Return the figures of drive number `index`, whose loads are called `read` and `write` with that number."""
    read, write = f"read {index}", f"write {index}"
    return {
        "read_bytes_per_second": found.rates[read],
        "write_bytes_per_second": found.rates[write],
        "mixed_bytes_per_second": _both_ways(found, read, write),
        "capacity_bytes": drive.capacity_bytes,
        "threads_per_direction": drive.setting.threads if drive.setting else None,
        "piece_bytes": drive.setting.piece_bytes if drive.setting else None,
        "io_cpu_seconds_per_gigabyte": drive.cpu_seconds_per_gigabyte,
    }


def _slowdowns(found: LoadFigures, pairs: Sequence[tuple[str, str]]) -> dict[str, dict[str, float]]:
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
