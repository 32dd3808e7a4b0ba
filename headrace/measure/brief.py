"""What decides a plan, measured in a few seconds before a long run. Measured are products, the drives, copies, the update, and
how much they slow one another.

`headrace bench machine` measures more, and more exactly; this module stays inside a run's own budgets instead.
Invariant: no more of a tier is taken than `MeasuringRoom` says, all of it is given back, and no file stays.
"""

import contextlib
import gc
import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from headrace.machine.host_memory import return_pieces
from headrace.machine.protocol import Machine
from headrace.measure.compute_loads import BlockLoad, fresh_pages_share
from headrace.measure.decoding import attended_rate
from headrace.measure.drives import DriveFile, DriveLoad
from headrace.measure.loads import Load, LoadFigures, rates_together, seconds_taken
from headrace.measure.memory_loads import StreamLoad
from headrace.measure.parts import Parts
from headrace.model import WideProducts
from headrace.terms.errors import ConfigError
from headrace.terms.lanes import Lane
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.sizes import MIB, format_bytes

BRIEF_SECONDS = 10.0
# With less memory, what is measured fits into caches and says nothing about a run.
LEAST_HOST_BYTES = 64 * MIB
# Sizes are meant for this much memory; with less they shrink in proportion.
_ROOMY_BYTES = 512 * MIB
_DRIVE_SHARE = 1 / 4
_MOST_TRANSFER_BYTES, _TRANSFERS = 16 * MIB, 4
_FILE_BYTES = 128 * MIB
# A block's hidden size and tokens, and the most memory that it takes where it is computed: weights, gradients, activations.
_SHAPES_CPU = (
    ((1024, 512), 224 * MIB),
    ((1024, 256), 176 * MIB),
    ((512, 256), 64 * MIB),
    ((256, 256), 24 * MIB),
)
_SHAPES_GPU = (((4096, 2048), 3072 * MIB), ((2048, 2048), 1024 * MIB), ((1024, 1024), 320 * MIB), ((256, 256), 24 * MIB))
_LAUNCH_SHAPE, _LAUNCH_REPEATS = (64, 16), 9
# Shares of the time. After the first, only what cannot be left out is begun (where others use the cores, what is under way
# takes long). The others: a unit of a block, a turn of anything else, filling the drives, all turns of the drives.
_DEADLINE_SHARE = 0.75
_UNIT_SHARE, _TURN_SHARE, _FILL_SHARE, _DRIVES_SHARE = 0.04, 0.01, 0.07, 0.05
_LOOK_ROWS, _LOOK_WIDTH = 256, 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuringRoom:
    """What measuring may take: of host memory, and of the memory of a GPU (0 where there is none)."""

    host_bytes: int
    device_bytes: int = 0


def measure_briefly(
    machine: Machine, directories: Sequence[Path], compute_dtype: str, room: MeasuringRoom, *, seconds: float = BRIEF_SECONDS
) -> Ceilings:
    """Measure `machine`, which holds no host buffers yet, for products of `compute_dtype`, and the SSD `directories`, each on a
    drive of its own. It takes at most about `seconds`.

    Raises:
        ConfigError: `room` is too small.
        StorageError: a directory cannot be written to, or has no space.
    """
    if room.host_bytes < LEAST_HOST_BYTES:
        raise ConfigError(f"{format_bytes(room.host_bytes)} of memory are left, {format_bytes(LEAST_HOST_BYTES)} are needed")
    with contextlib.ExitStack() as stack:
        stack.callback(_give_back)
        return _Brief(machine, directories, compute_dtype, room, seconds, stack).measure()


def look_at_products(machine: Machine, compute_dtype: str) -> float:
    """Return the FLOP/s of matrix products of `compute_dtype` on `machine`, measured for a tenth of a second."""
    dtype = getattr(torch, compute_dtype)
    left = torch.full((_LOOK_ROWS, _LOOK_WIDTH), 0.01, dtype=dtype, device=machine.device)
    right = torch.full((_LOOK_WIDTH, _LOOK_WIDTH), 0.01, dtype=dtype, device=machine.device)

    def multiply() -> None:
        with torch.no_grad(), nullcontext() if machine.multiplies(compute_dtype) else WideProducts():
            torch.mm(left, right)
        if machine.device.type == "cuda":
            torch.cuda.synchronize(machine.device)

    return 2.0 * _LOOK_ROWS * _LOOK_WIDTH * _LOOK_WIDTH / seconds_taken(multiply, 5)


def _give_back() -> None:
    """Give the memory of objects that are no longer used back to the system."""
    gc.collect()
    return_pieces()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class _Brief(Parts):
    """One measurement; each load is measured as soon as it is made."""

    def __init__(
        self,
        machine: Machine,
        directories: Sequence[Path],
        compute_dtype: str,
        room: MeasuringRoom,
        seconds: float,
        stack: contextlib.ExitStack,
    ) -> None:
        super().__init__(machine, directories, stack)
        self._dtype, self._room, self._seconds = compute_dtype, room, seconds
        self._deadline = time.perf_counter() + _DEADLINE_SHARE * seconds
        self._turn_seconds = seconds * _TURN_SHARE
        self._host_bytes = min(room.host_bytes, _ROOMY_BYTES)
        self._found = LoadFigures({}, {})

    def measure(self) -> Ceilings:
        """Measure one part after the other. Pairs come last, as far as there is time: the one that matters most comes first."""
        self._measure_drives()
        share = self._host_bytes // 32
        self._add_memory(4 * share, share, 4 * share)
        self._together(Lane.HOST_TO_DEVICE, Lane.DEVICE_TO_HOST)
        launch = BlockLoad(self._machine, self._dtype, hidden_size=_LAUNCH_SHAPE[0], tokens=_LAUNCH_SHAPE[1])
        # The shortest: where others use the cores, a tiny operation waits for them, and a large one hardly more.
        launch_seconds = seconds_taken(launch.unit, _LAUNCH_REPEATS, min) / 2
        block = self._block()
        self._add(Lane.COMPUTE, block)
        self._together(Lane.COMPUTE, Lane.UPDATE)
        unit_seconds = block.flops / self._found.rates[Lane.COMPUTE]
        fresh = 1.0
        if not self._gpu and self._has_time(4 * unit_seconds):
            fresh = fresh_pages_share(block, self._turn_seconds, 1)
        pairs = self._pairs()
        for pair in pairs[1:]:
            if self._has_time(2 * unit_seconds):
                self._together(*pair)
        # Without what the simulator adds to each operation: a block is two of them, forward and backward.
        values = {
            **self._values(self._found, pairs),
            "flops_per_second": {self._dtype: block.flops / max(unit_seconds - 2 * launch_seconds, unit_seconds / 2)},
            # Plans without a GPU do not ask for it.
            "attended_bytes_per_second": attended_rate() if self._gpu and self._has_time(self._turn_seconds) else None,
            "fresh_pages_share": fresh,
            "launch_seconds": launch_seconds,
            **self._drive_overheads(),
            "sources": {"all figures": f"measured in {self._seconds:g} s before a run, torch {torch.__version__}"},
        }
        return Ceilings.from_json(values)

    # -- parts ----------------------------------------------------------------------------------------------------------

    def _measure_drives(self) -> None:
        """Measure each drive alone, and keep a load that moves the bytes of all of them, for the pairs."""
        count = len(self._directories)
        most_bytes = int(self._host_bytes * _DRIVE_SHARE) // (2 * _TRANSFERS * count)
        most_bytes = max(MIB, min(_MOST_TRANSFER_BYTES, most_bytes) // MIB * MIB)
        turn = self._seconds * _DRIVES_SHARE / (3 * count)
        for index, directory in enumerate(self._directories):
            drive = self._stack.enter_context(DriveFile(directory, _FILE_BYTES))
            self._drives.append(drive)
            begin = time.perf_counter()
            drive.fill(self._seconds * _FILL_SHARE / count, MIB)
            # A slow drive moves less at a time, so that one unit is no longer than a turn.
            rate = drive.filled_bytes / (time.perf_counter() - begin)
            size = max(MIB, min(most_bytes, int(rate * turn) // _TRANSFERS, drive.filled_bytes // _TRANSFERS) // MIB * MIB)
            for name, write in ((f"read {index}", False), (f"write {index}", True)):
                self._add(name, DriveLoad([drive], write=write, transfers=_TRANSFERS, transfer_bytes=size), turn)
            self._together(f"read {index}", f"write {index}", turn)
        for lane, word in ((Lane.SSD_READ, "read"), (Lane.SSD_WRITE, "write")):
            each = [self._loads[f"{word} {index}"] for index in range(count)]
            if count == 1:  # one drive is all of them
                self._loads[lane], self._found.rates[lane] = each[0], self._found.rates[f"{word} 0"]
            else:
                self._add(lane, _DrivesTogether(each), turn)

    def _block(self) -> BlockLoad:
        """Return the largest block that there is room and time for. The time is estimated from a short look at products."""
        rate = look_at_products(self._machine, self._dtype)
        room_bytes = self._room.device_bytes if self._gpu else self._host_bytes // 2
        shapes = _SHAPES_GPU if self._gpu else _SHAPES_CPU
        for (hidden_size, tokens), num_bytes in shapes[:-1]:
            flops = 4 * 2.0 * tokens * 12 * hidden_size**2
            if num_bytes <= room_bytes and flops / rate <= _UNIT_SHARE * self._seconds:
                return BlockLoad(self._machine, self._dtype, hidden_size=hidden_size, tokens=tokens)
        (hidden_size, tokens), _ = shapes[-1]
        return BlockLoad(self._machine, self._dtype, hidden_size=hidden_size, tokens=tokens)

    def _pairs(self) -> list[tuple[str, str]]:
        """Return which lanes may disturb one another, most important pairs first. Copies to the device count on a GPU only."""
        moving = [Lane.SSD_READ, Lane.SSD_WRITE, Lane.DEVICE_TO_HOST, *([Lane.HOST_TO_DEVICE] if self._gpu else [])]
        pairs: list[tuple[str, str]] = [(Lane.COMPUTE, Lane.UPDATE)]
        return pairs + [(one, lane) for one in (Lane.COMPUTE, Lane.UPDATE) for lane in moving]

    # -- measuring ------------------------------------------------------------------------------------------------------

    def _has_time(self, seconds: float) -> bool:
        return time.perf_counter() + seconds < self._deadline

    def _add(self, name: str, load: Load, seconds: float | None = None) -> None:
        super()._add(name, load)
        load.unit()  # warm up: what the first unit makes once is not counted
        (self._found.rates[name],) = rates_together([load], seconds or self._turn_seconds)
        if isinstance(load, StreamLoad):  # what follows needs its memory
            load.close()

    def _together(self, one: str, other: str, seconds: float | None = None) -> None:
        both = rates_together([self._loads[one], self._loads[other]], seconds or self._turn_seconds)
        alone = self._found.rates[one], self._found.rates[other]
        self._found.shares[one, other] = both[0] / alone[0], both[1] / alone[1]


class _DrivesTogether:
    """Several drives as one load."""

    def __init__(self, loads: Sequence[Load]) -> None:
        self._loads = tuple(loads)

    def unit(self) -> float:
        """Move the buffers of each drive once."""
        return math.fsum(load.unit() for load in self._loads)
