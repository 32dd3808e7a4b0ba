"""The ceilings of this machine, measured: each part alone, pairs of parts at once, and fixed costs of operations.

What is run is what training runs: blocks through the model's code, the update kernel, the engine's copies and its I/O.
Invariant: the result passes the checks of `Ceilings.from_json`; measuring takes about `seconds_budget`, and leaves no files.
"""

import contextlib
import math
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from headrace.machine.here import this_machine
from headrace.machine.limits import available_memory_bytes
from headrace.measure.compute_loads import AttentionLoad, BlockLoad, HeadLoad, fitted_rates, fresh_pages_share
from headrace.measure.decoding import attended_rate, decoded_per_second, decoding_seconds, row_product_rate
from headrace.measure.drives import DriveFile, DriveLoad
from headrace.measure.loads import LoadFigures, in_order, interleaved, rates_together, seconds_taken
from headrace.measure.parts import Parts
from headrace.terms.errors import ConfigError
from headrace.terms.events import Notice, Sink
from headrace.terms.lanes import Lane
from headrace.terms.layout import COMPUTE_DTYPES
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.sizes import MIB

_ROUNDS = 3
# Shapes of the block that is measured: hidden size and tokens. The largest for which one turn has time is taken.
_SHAPES_CPU = ((256, 256), (1024, 512), (2048, 1024))
_SHAPES_GPU = ((1024, 2048), (4096, 2048))
# Blocks to which the time besides matrix products is fitted. None of them may take more than `_LONGEST_TURNS` turns.
_SAMPLED_SHAPES_CPU = ((768, 256), (768, 1024), (1024, 512), (2048, 256), (2048, 1024))
_SAMPLED_SHAPES_GPU = ((1024, 512), (1024, 2048), (2048, 2048), (4096, 2048))
# Rows, heads, length, width of a head.
_ATTENTION_SHAPE_CPU = (2, 12, 512, 64)
_ATTENTION_SHAPE_GPU = (4, 16, 2048, 64)
# Hidden size and tokens of the head, to which its time besides matrix products is fitted.
_HEAD_SHAPES = ((768, 256), (2048, 256))
_LONGEST_TURNS = 4
# Activations must be as large here as in training: those below 2 MiB are not mapped one by one. The first shape for which there
# is time is taken, or the last one.
_FRESH_SHAPES = ((1024, 2048), (512, 2048))
_LAUNCH_SHAPE = (64, 16)
_LAUNCH_REPEATS = 15
# Of the stream, copies and updates: larger than any cache; shrunk where memory is scarce.
_MOST_BYTES = (512 * MIB, 128 * MIB, 256 * MIB)
_MEMORY_SHARE = 16
# A quick look does not write gigabytes.
_QUICK_SECONDS = 20.0
_QUICK_FILE_BYTES = 256 * MIB
_FILE_BYTES = 4096 * MIB
# Shares of the time: building and filling before anything is measured, and trying settings of the I/O engine.
_SETUP_SHARE = 0.25
_TUNING_SHARE = 0.12
_DEFAULT_DTYPE = "bfloat16"
# A processor has no instructions for a dtype that takes so many times as long as the default one: a small block tells.
_EMULATED = 8


def measure_machine(directories: Sequence[Path], *, seconds_budget: float = 90, sink: Sink | None = None) -> Ceilings:
    """Measure this machine and its SSD `directories`; `sink` gets a notice per phase.

    With little time (below 20 s) blocks and files are smaller and fewer repeats are taken: rough, but of the right order.
    Every directory's file is written over and over for up to a third of the time.

    Raises:
        ConfigError: no directory is given, or no time, or endless time.
        StorageError: a directory cannot be written to, or has no space.
    """
    if not directories or not 0 < seconds_budget < math.inf:
        raise ConfigError(f"bench machine: {len(directories)} SSD directories and {seconds_budget} seconds given; needs both")
    with contextlib.ExitStack() as stack:
        return _Bench(directories, seconds_budget, sink, stack).measure()


class _Bench(Parts):
    """The loads of one machine, built once, and measured by turns."""

    def __init__(self, directories: Sequence[Path], seconds: float, sink: Sink | None, stack: contextlib.ExitStack) -> None:
        super().__init__(this_machine(None), directories, stack)
        self._seconds, self._sink = seconds, sink
        # Past this moment, what is left to measure is left out: the machine is slower than the shares of the time allow for.
        self._deadline = time.perf_counter() + seconds
        self._quick = seconds < _QUICK_SECONDS
        self._unit_seconds = 0.0  # of the block that is measured in each dtype
        self._decoded: dict[str, float] = {}

    def measure(self) -> Ceilings:
        """Build, warm up, measure, and put together."""
        self._say("SSDs: writing test files" + ("" if self._quick else ", trying how many transfers of which size are best"))
        self._open_drives()
        self._say("memory: building buffers and compiling the update kernel")
        smaller, scarce = 8 if self._quick else 1, available_memory_bytes() // _MEMORY_SHARE
        self._add_memory(*(min(most // smaller, scarce) for most in _MOST_BYTES))
        self._say("compute: building a block for each dtype")
        shape = self._block_shape()
        launch_seconds = self._build_compute(shape)
        overheads = {
            "fresh_pages_share": self._fresh_pages_share(shape),
            "launch_seconds": launch_seconds,
            **dict(zip(("operator_seconds", "turn_seconds"), decoding_seconds(self._machine), strict=True)),
            **self._drive_overheads(),
        }
        self._decoded = {} if self._quick else decoded_per_second()
        for load in self._loads.values():
            load.unit()
        self._say(f"measuring {len(self._loads)} parts alone and {len(self._pairs())} pairs at once")
        return self._ceilings(self._run(), overheads)

    # -- loads ----------------------------------------------------------------------------------------------------------

    def _open_drives(self) -> None:
        """Fill a file on each drive and choose how it is kept busy; a quick look keeps the engine's defaults."""
        most_bytes = _QUICK_FILE_BYTES if self._quick else _FILE_BYTES
        for index, directory in enumerate(self._directories):
            drive = self._stack.enter_context(DriveFile(directory, most_bytes))
            drive.fill()
            if not self._quick:
                drive.tune(_TUNING_SHARE * self._seconds / len(self._directories))
            self._drives.append(drive)
            self._loads[f"read {index}"] = DriveLoad([drive], write=False)
            self._loads[f"write {index}"] = DriveLoad([drive], write=True)
        # With one directory, it is all of them.
        together = len(self._drives) > 1
        for lane, name, write in ((Lane.SSD_READ, "read 0", False), (Lane.SSD_WRITE, "write 0", True)):
            self._loads[lane] = DriveLoad(self._drives, write=write) if together else self._loads[name]

    def _build_compute(self, shape: tuple[int, int]) -> float:
        """Add a block of `shape` per dtype that works here; return the seconds of a tiny operation."""
        launch = BlockLoad(self._machine, _DEFAULT_DTYPE, hidden_size=_LAUNCH_SHAPE[0], tokens=_LAUNCH_SHAPE[1])
        launch_seconds = seconds_taken(launch.unit, _LAUNCH_REPEATS) / 2
        least = (_SHAPES_GPU if self._gpu else _SHAPES_CPU)[0]
        default_seconds = seconds_taken(self._block(_DEFAULT_DTYPE, least).unit, 2)
        for dtype in COMPUTE_DTYPES:
            # Some processors' libraries lack some products in 16 bits.
            with contextlib.suppress(RuntimeError, NotImplementedError):
                small = self._block(dtype, least)
                emulated = seconds_taken(small.unit, 1) > _EMULATED * default_seconds
                load = small if emulated else self._block(dtype, shape)
                load.unit()
                self._loads[Lane.COMPUTE if dtype == _DEFAULT_DTYPE else f"compute {dtype}"] = load
        self._unit_seconds = seconds_taken(self._loads[Lane.COMPUTE].unit, 1)
        for other in () if self._quick else _SAMPLED_SHAPES_GPU if self._gpu else _SAMPLED_SHAPES_CPU:
            if other != shape and self._has_time(other, shape):
                self._loads[f"block of {other[0]} x {other[1]}"] = self._block(_DEFAULT_DTYPE, other)
        if not self._quick:
            self._loads["attention"] = AttentionLoad(self._machine, _ATTENTION_SHAPE_GPU if self._gpu else _ATTENTION_SHAPE_CPU)
        for hidden_size, tokens in () if self._quick else _HEAD_SHAPES:
            self._loads[f"head of {hidden_size}"] = HeadLoad(self._machine, hidden_size=hidden_size, tokens=tokens)
        return launch_seconds

    def _fresh_pages_share(self, shape: tuple[int, int]) -> float:
        if self._gpu:
            return 1.0
        fitting = [other for other in _FRESH_SHAPES if self._has_time(other, shape)]
        chosen = _SHAPES_CPU[0] if self._quick else (*fitting, _FRESH_SHAPES[-1])[0]
        return fresh_pages_share(self._block(_DEFAULT_DTYPE, chosen), self._turn_seconds(), self._rounds())

    def _has_time(self, other: tuple[int, int], shape: tuple[int, int]) -> bool:
        """Return whether a unit of the `other` shape is short enough, judged by what one of `shape` takes."""
        return self._unit_seconds * _work(other, shape) < _LONGEST_TURNS * self._turn_seconds()

    def _block(self, dtype: str, shape: tuple[int, int]) -> BlockLoad:
        return BlockLoad(self._machine, dtype, hidden_size=shape[0], tokens=shape[1])

    def _block_shape(self) -> tuple[int, int]:
        """Return the largest shape whose unit takes no longer than a turn, judged by the smaller ones."""
        turn = self._turn_seconds()
        shapes = _SHAPES_GPU if self._gpu else _SHAPES_CPU
        if self._quick:
            return shapes[0]
        chosen = shapes[1]  # smaller ones say little about a model's blocks: 0.10 instead of 0.24 TFLOP/s on two cores
        for shape, larger in pairwise(shapes[1:]):
            load = self._block(_DEFAULT_DTYPE, shape)
            if seconds_taken(load.unit, 2) * _work(larger, shape) > turn:
                break
            chosen = larger
        return chosen

    # -- measuring ------------------------------------------------------------------------------------------------------

    def _pairs(self) -> list[tuple[str, str]]:
        """Return what is measured together: each drive's and the link's directions, and lanes that may disturb each other."""
        drives = [(f"read {index}", f"write {index}") for index in range(len(self._drives))]
        moving: list[tuple[str, str]] = [(Lane.HOST_TO_DEVICE, Lane.DEVICE_TO_HOST)]
        on_bus = [lane for lane in Lane if lane.row.on_bus and lane in self._loads]
        moving += [(Lane.COMPUTE, lane) for lane in on_bus]
        moving += [(Lane.UPDATE, lane) for lane in on_bus if lane is not Lane.UPDATE]
        return drives + moving

    def _rounds(self) -> int:
        return 1 if self._quick else _ROUNDS

    def _turn_seconds(self) -> float:
        # Parts and pairs: three for each drive, and about thirty more; measuring the cost of fresh pages counts as six.
        turns = self._rounds() * (3 * len(self._directories) + 36)
        return (1 - _SETUP_SHARE - (0 if self._quick else _TUNING_SHARE)) * self._seconds / turns

    def _run(self) -> LoadFigures:
        turn, pairs = self._turn_seconds(), self._pairs()

        def measure(names: Sequence[str]) -> Sequence[float]:
            return rates_together([self._loads[name] for name in names], turn)

        paired = [name for name in self._loads if any(name in pair for pair in pairs)]
        names = [name for name in self._loads if name not in paired] + paired
        return interleaved(measure, in_order(names, pairs), self._rounds(), deadline=self._deadline)

    # -- results --------------------------------------------------------------------------------------------------------

    def _ceilings(self, found: LoadFigures, overheads: dict[str, float]) -> Ceilings:
        values = {
            **self._values(found, self._pairs()),
            **self._compute_rates(found.rates, overheads["launch_seconds"]),
            "sources": self._sources(),
            "attended_bytes_per_second": attended_rate(),
            "row_product_bytes_per_second": row_product_rate(self._machine),
            "decoded_per_second": self._decoded,
            **overheads,
        }
        return Ceilings.from_json(values)

    def _compute_rates(self, rates: dict[str, float], launch_seconds: float) -> dict[str, Any]:
        """Return rates of matrix products and of attention, and the seconds that blocks and the head take besides.

        What the simulator adds to each operation is subtracted: a block is two operations, forward and backward.
        """
        blocks = {name: load for name, load in self._loads.items() if isinstance(load, BlockLoad)}
        attention_rate = rates.get("attention", math.inf)  # a rough look counts attention as any product

        def seconds(name: str) -> float:
            load, unit_seconds = blocks[name], blocks[name].flops / rates[name]
            attention_seconds = (load.flops - load.product_flops) / attention_rate
            return max(unit_seconds - 2 * launch_seconds - attention_seconds, unit_seconds / 2)

        usual = [name for name in blocks if name == Lane.COMPUTE or name.startswith("block of ")]
        amounts = [(blocks[name].product_flops, float(blocks[name].hidden_elements)) for name in usual]
        product_seconds, hidden_seconds = fitted_rates(amounts, [seconds(name) for name in usual])
        if product_seconds <= 0:  # only by noise, because no block is without products
            product_seconds, hidden_seconds = seconds(Lane.COMPUTE) / blocks[Lane.COMPUTE].product_flops, 0.0
        flops = {_DEFAULT_DTYPE: 1 / product_seconds}
        for dtype in COMPUTE_DTYPES:
            name = f"compute {dtype}"
            if name in blocks:  # the rate was measured on one block only
                besides = min(hidden_seconds * blocks[name].hidden_elements, seconds(name) / 2)
                flops[dtype] = blocks[name].product_flops / (seconds(name) - besides)
        heads = {name: load for name, load in self._loads.items() if isinstance(load, HeadLoad)}
        left = [max(0.0, load.flops * (1 / rates[name] - product_seconds) - launch_seconds) for name, load in heads.items()]
        logit_seconds, head_seconds = fitted_rates([(load.logits, load.parameters) for load in heads.values()], left)
        return {
            "flops_per_second": flops,
            "attention_share": min(1.0, attention_rate * product_seconds),
            "hidden_seconds": hidden_seconds,
            "logit_seconds": logit_seconds,
            "head_seconds": head_seconds,
        }

    def _sources(self) -> dict[str, str]:
        how = f"median of up to {self._rounds()} interleaved turns of {self._turn_seconds():.2g} s, torch {torch.__version__}"
        kept = "a rough look" if self._quick else "measured"
        directories = {f"drives[{index}]": str(path.resolve()) for index, path in enumerate(self._directories)}
        return {"all figures": f"{kept} by headrace bench machine: {how}", **directories}

    def _say(self, text: str) -> None:
        if self._sink is not None:
            self._sink(Notice(text=text, level="info"))


def _work(one: tuple[int, int], other: tuple[int, int]) -> float:
    """Return the operations of one block shape relative to another's: hidden size squared, times tokens."""
    return (one[0] / other[0]) ** 2 * one[1] / other[1]
