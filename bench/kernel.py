"""How fast the update runs against what memory can do, and against torch's fused AdamW.

    python bench/kernel.py [--out kernel.json]
    OMP_NUM_THREADS=2 DEEPSPEED_ENV/bin/python bench/kernel.py --threads 2 --cpu-adam   (with numba, PYTHONPATH=.)

Each round times every contestant once, so that a busy moment of the machine hits all of them; medians over the rounds, and of
the ratios within a round, are shown. `stream` is an in-place scale of a float32 array, one read and one write per element: the
most that an in-place update can reach. All arrays lie on huge pages where the system grants them. GB/s are the bytes that must
be moved: 26 per parameter for bfloat16 planes. `torch fused` works on the same planes in chunks: split master joined and the
gradient widened into buffers, `_fused_adamw_`, the master split again. `with checksums` takes those of what is written in the
same pass, as training does; `checksums after` in one of their own. `--cpu-adam` adds DeepSpeed's CPUAdam on float32 parameters,
moments and gradients (28 bytes per parameter, no 16-bit weights); its threads are OpenMP's, so that the environment decides.
"""

import argparse
import json
import mmap
import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numba
import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from headrace.machine.jit import JIT_OPTIONS, full_width
from headrace.store.checksum import checksum
from headrace.terms.layout import GroupRange
from headrace.update import (
    StepScalars,
    Updater,
    square_sum,
)
from headrace.update.rules.adamw import AdamW, AdamWRule
from headrace.update.rules.kernels import joined, lower_half, upper_half, widened
from headrace.update.rules.rule import Chunk

RULE = AdamW(beta1=0.9, beta2=0.95, eps=1e-8)
STEP = StepScalars(learning_rate=1e-5, update=10)
# The fastest of 2^14, 2^16, 2^18 and 2^20 for torch: its call costs much, and the third-level cache holds the buffers.
FUSED_CHUNK_ELEMENTS = 1 << 20


@numba.njit(nogil=True)
def scale(array, factor):
    for i in range(array.size):
        array[i] = array[i] * factor


@numba.njit(**JIT_OPTIONS)
def split(master, hi, lo):
    """Write the halves of float32 `master` to `hi` and `lo`."""
    full_width()
    for i in range(master.size):
        hi[i] = upper_half(master[i])
        lo[i] = lower_half(master[i])


@numba.njit(**JIT_OPTIONS)
def join_and_widen(hi, lo, gradient, master, wide):
    """Write what `hi` and `lo` are the halves of to `master`, and the bfloat16 `gradient` as float32 to `wide`."""
    full_width()
    for i in range(master.size):
        master[i] = joined(hi[i], lo[i])
        wide[i] = widened(gradient[i])


def on_huge_pages(num_elements: int, dtype: DTypeLike) -> NDArray:
    """Return zeros in a private mapping that asks for huge pages."""
    num_bytes = num_elements * np.dtype(dtype).itemsize
    memory = mmap.mmap(-1, num_bytes + (2 << 20), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    offset = -array.ctypes.data % (2 << 20)
    array = array[offset : offset + num_bytes].view(dtype)
    array[:] = 0
    return array


def make_planes(num_elements: int, compute_dtype: str) -> tuple[NDArray, tuple[NDArray, ...]]:
    """Return `(weight, states)` of one plane set, as at the start of a run."""
    planes = AdamWRule(RULE, compute_dtype).planes
    weight = on_huge_pages(num_elements, planes.weight.dtype)
    states = tuple(on_huge_pages(num_elements, plane.dtype) for plane in planes.states)
    master = np.random.default_rng(0).standard_normal(num_elements, np.float32) * np.float32(0.02)
    if compute_dtype == "bfloat16":
        split(master, weight, states[0])
    else:
        weight[:] = master
        if compute_dtype == "float16":
            states[0][:] = master
    return weight, states


def fused(weight: NDArray, states: tuple[NDArray, ...], gradient: NDArray) -> None:
    """Update with `torch._fused_adamw_`, which wants all tensors in fp32: with casts, in chunks."""
    lo, m, v = states
    p, g = np.empty(FUSED_CHUNK_ELEMENTS, np.float32), np.empty(FUSED_CHUNK_ELEMENTS, np.float32)
    for start in range(0, weight.size, FUSED_CHUNK_ELEMENTS):
        part = slice(start, start + FUSED_CHUNK_ELEMENTS)
        join_and_widen(weight[part], lo[part], gradient[part], p, g)
        tensors = [[torch.from_numpy(array)] for array in (p, g, m[part], v[part])]
        torch._fused_adamw_(
            *tensors,
            [],
            [torch.tensor(float(STEP.update))],
            lr=STEP.learning_rate,
            beta1=RULE.beta1,
            beta2=RULE.beta2,
            weight_decay=0.1,
            eps=RULE.eps,
            amsgrad=False,
            maximize=False,
        )
        split(p, weight[part], lo[part])


def cpu_adam(num_elements: int) -> Callable[[], object]:
    """Return a step of DeepSpeed's CPUAdam over one parameter of so many elements."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    values = on_huge_pages(num_elements, np.float32)
    values[:] = np.random.default_rng(0).standard_normal(num_elements, np.float32) * np.float32(0.02)
    parameter = torch.nn.Parameter(torch.from_numpy(values))
    gradient = on_huge_pages(num_elements, np.float32)
    gradient[:] = np.random.default_rng(1).standard_normal(num_elements, np.float32)
    parameter.grad = torch.from_numpy(gradient)
    optimizer = DeepSpeedCPUAdam(
        [parameter], lr=STEP.learning_rate, betas=(RULE.beta1, RULE.beta2), eps=RULE.eps, weight_decay=0.1
    )
    moments = {name: on_huge_pages(num_elements, np.float32) for name in ("exp_avg", "exp_avg_sq")}
    optimizer.state[parameter] = {"step": 0} | {name: torch.from_numpy(array) for name, array in moments.items()}
    return optimizer.step


def contestants(
    num_elements: int, threads: int, with_cpu_adam: bool
) -> tuple[dict[str, tuple[Callable[[], object], int]], Callable[[], None]]:
    """Return name -> (call, bytes per element), and what closes them. `stream` runs over as many elements as the others."""
    pool = ThreadPoolExecutor(threads)
    groups = (GroupRange(0, num_elements, 1.0, 0.1),)
    gradient = on_huge_pages(num_elements, np.uint16)
    normal = torch.from_numpy(np.random.default_rng(1).standard_normal(num_elements, np.float32))
    gradient[:] = normal.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    # As many bytes as the update moves; ones, because processors have shortcuts for writing zeros over zeros (18 % were seen).
    array = on_huge_pages(num_elements * 26 // 8, np.float32)
    array[:] = 1
    parts = np.array_split(array, threads)
    calls: dict[str, tuple[Callable[[], object], int]] = {
        "stream": (lambda: list(pool.map(lambda part: scale(part, np.float32(1)), parts)), 26),
    }
    updaters = []
    for compute_dtype, num_bytes in (("bfloat16", 26), ("float32", 26), ("float16", 28)):
        weight, states = make_planes(num_elements, compute_dtype)
        updater = Updater(AdamWRule(RULE, compute_dtype), threads)
        updaters.append(updater)

        def update(updater=updater, weight=weight, states=states) -> None:
            updater.update_range(Chunk(weight, states, gradient), STEP, groups)

        calls[f"headrace {compute_dtype}"] = (update, num_bytes)
        if compute_dtype == "bfloat16":

            def update_and_sum(updater=updater, weight=weight, states=states) -> None:
                updater.update_range(Chunk(weight, states, gradient), STEP, groups, take_checksums=True)

            def update_then_sum(update=update, arrays=(weight, *states)) -> None:
                update()
                list(pool.map(checksum, [part for array in arrays for part in np.array_split(array, threads)]))

            calls["with checksums"] = (update_and_sum, num_bytes)
            calls["checksums after"] = (update_then_sum, num_bytes)
            pieces = [slice(a[0], a[-1] + 1) for a in np.array_split(np.arange(num_elements), threads)]

            def run_fused(weight=weight, states=states, pieces=pieces) -> None:
                def work(piece: slice) -> None:
                    fused(weight[piece], tuple(state[piece] for state in states), gradient[piece])

                list(pool.map(work, pieces))

            calls["torch fused, casts"] = (run_fused, 26)
    if with_cpu_adam:
        calls["DeepSpeed CPUAdam"] = (cpu_adam(num_elements), 28)
    if threads == 1:
        calls["square sum, bfloat16"] = (lambda: square_sum(gradient), 2)
        calls["square sum, float32"] = (lambda: square_sum(array[:num_elements]), 4)

    def close() -> None:
        pool.shutdown()
        for updater in updaters:
            updater.close()

    return calls, close


def measure(num_elements: int, threads: int, rounds: int, with_cpu_adam: bool) -> list[dict[str, object]]:
    """Return one row per contestant; `of_stream` is the median over rounds of the ratio within the round."""
    calls, close = contestants(num_elements, threads, with_cpu_adam)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for call, _ in calls.values():
        call()
    for _ in range(rounds):
        for name, (call, _) in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    close()
    rows = []
    for name, (_, num_bytes) in calls.items():
        rate = num_elements / np.array(seconds[name])
        stream = num_elements * 26 / np.array(seconds["stream"])
        rows.append(
            {
                "name": name,
                "threads": threads,
                "parameters_per_second": float(np.median(rate)),
                "gigabytes_per_second": float(np.median(rate)) * num_bytes / 1e9,
                "of_stream": float(np.median(rate * num_bytes / stream)),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=1 << 24, help="parameters in the unit (a multiple of 2^17)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write")
    parser.add_argument("--cpu-adam", action="store_true", help="DeepSpeed's too; OMP_NUM_THREADS must be what --threads says")
    options = parser.parse_args()
    if options.cpu_adam and [os.environ.get("OMP_NUM_THREADS")] != [str(threads) for threads in options.threads]:
        parser.error(f"--cpu-adam: give one number of --threads and the same OMP_NUM_THREADS, found {options.threads}")
    torch.set_num_threads(1)
    measured = (measure(options.elements, threads, options.rounds, options.cpu_adam) for threads in options.threads)
    rows = [row for part in measured for row in part]
    print(f"{'':22} threads  G parameters/s   GB/s  of stream")
    for row in rows:
        print(
            f"{row['name']:22} {row['threads']:7d} {row['parameters_per_second'] / 1e9:15.2f} "
            f"{row['gigabytes_per_second']:6.1f} {row['of_stream']:10.2f}"
        )
    if options.out is not None:
        versions = {"python": platform.python_version(), "torch": torch.__version__, "numba": numba.__version__}
        report = {"elements": options.elements, "rounds": options.rounds, "versions": versions, "rows": rows}
        options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
