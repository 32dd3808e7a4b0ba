"""What the machine can do when nothing else runs: memory streams, bare file input and output, and fio beside it.

Invariant: the bare loop is the best that plain threads reach, so that a training run can be held against it. It reads and
writes whole blocks with O_DIRECT between buffers on huge pages and a preallocated file; nothing is computed, nothing checked.
Writes JSON. Rates count the bytes moved, in 10^9 bytes per second; every figure is the median of interleaved repeats.
"""

import argparse
import itertools
import json
import mmap
import os
import resource
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numba
import numpy as np
from launch import GB, machine_facts, require_disk, scratch_directory
from worker import refuse

MIB = 1 << 20
HUGE_PAGE = 2 * MIB
# Training reads 14 and writes 12 bytes per parameter and step (docs/architecture.md), so that is the mix of interest.
TRAINING_READ_SHARE = 14 / 26


def huge_page_buffer(size_bytes: int) -> np.ndarray:
    """Return zeroed bytes on transparent huge pages: private and anonymous, or the kernel would ignore the advice."""
    mapping = mmap.mmap(-1, size_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(mapping, np.uint8)
    start = -whole.ctypes.data % HUGE_PAGE
    buffer = whole[start : start + size_bytes]
    buffer[:] = 0
    return buffer


@numba.njit(nogil=True, parallel=True)
def copy(target, source):
    for index in numba.prange(target.size):
        target[index] = source[index]


@numba.njit(nogil=True, parallel=True)
def scale(target, factor):
    for index in numba.prange(target.size):
        target[index] *= factor


@numba.njit(nogil=True, parallel=True)
def triad(target, first, second, factor):
    for index in numba.prange(target.size):
        target[index] = first[index] + factor * second[index]


def memory_rates(size_bytes: int, repeats: int) -> list[dict[str, Any]]:
    """Measure three streams over float32 arrays of `size_bytes` with 1, 2, 4, ... threads.

    `scale` works in place, as an optimizer does; `copy` and `triad` also fetch the lines they overwrite, which is not counted.
    """
    a, b, c = (huge_page_buffer(size_bytes).view(np.float32) for _ in range(3))
    factor = np.float32(1.0000001)
    streams = {
        "scale": (lambda: scale(a, factor), 2),
        "copy": (lambda: copy(a, b), 2),
        "triad": (lambda: triad(a, b, c, factor), 3),
    }
    for run, _ in streams.values():
        run()  # compiles
    most = numba.config.NUMBA_NUM_THREADS
    counts = sorted({most, *(1 << power for power in range(most.bit_length()))})
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in itertools.product(streams, counts)}
    for _ in range(repeats):
        for name, threads in seconds:
            numba.set_num_threads(threads)
            start = time.perf_counter()
            streams[name][0]()
            seconds[name, threads].append(time.perf_counter() - start)
    return [
        {"stream": name, "threads": threads, "gb_per_second": streams[name][1] * size_bytes / median(taken) / GB}
        for (name, threads), taken in seconds.items()
    ]


def requests(block_bytes: int, file_bytes: int, read_share: float) -> Iterator[tuple[bool, int]]:
    """Yield `(is_read, offset)` without end: reads walk over the first half of the file, writes over the second.

    The share of reads is kept exactly at every moment, as evenly as it can be spread.
    """
    half = file_bytes // 2 // block_bytes * block_bytes
    blocks = half // block_bytes
    reads = writes = 0
    while True:
        if reads < read_share * (reads + writes + 1):
            yield True, reads % blocks * block_bytes
            reads += 1
        else:
            yield False, half + writes % blocks * block_bytes
            writes += 1


def bare_loop(file: int, buffers: list[np.ndarray], stream: Iterator[tuple[bool, int]], seconds: float) -> dict[str, float]:
    """Serve `stream` with one thread per buffer for `seconds`; return rates and CPU seconds per 10^9 bytes."""
    lock = threading.Lock()
    moved = {True: 0, False: 0}
    failures: list[OSError] = []
    deadline = time.perf_counter() + seconds

    def serve(buffer: np.ndarray) -> None:
        view = memoryview(buffer)
        try:
            while time.perf_counter() < deadline:
                with lock:
                    is_read, offset = next(stream)
                done = os.preadv(file, [view], offset) if is_read else os.pwritev(file, [view], offset)
                with lock:
                    moved[is_read] += done
        except OSError as error:
            failures.append(error)

    threads = [threading.Thread(target=serve, args=(buffer,)) for buffer in buffers]
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if moved[False]:
        os.fdatasync(file)  # what a commit waits for
    elapsed, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    if failures:
        raise failures[0]
    total = moved[True] + moved[False]
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    rates = {"read_gb_per_second": moved[True] / elapsed / GB, "write_gb_per_second": moved[False] / elapsed / GB}
    return rates | {"gb_per_second": total / elapsed / GB, "cpu_seconds_per_gb": cpu / total * GB}


def file_rates(path: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the bare loop over block sizes, numbers in flight, and read only, write only, mixed."""
    file_bytes = options.file_gib << 30
    file = open_direct(path)
    try:
        os.posix_fallocate(file, 0, file_bytes)
        fill(file, file_bytes)
        shares = {"read": 1.0, "write": 0.0, "mixed": options.read_share}
        cases = list(itertools.product(options.blocks_mib, options.in_flight, shares))
        results: dict[tuple, list[dict[str, float]]] = {case: [] for case in cases}
        buffers = [huge_page_buffer(max(options.blocks_mib) * MIB) for _ in range(max(options.in_flight))]
        for _, (block, in_flight, mode) in itertools.product(range(options.repeats), cases):
            used = [buffer[: block * MIB] for buffer in buffers[:in_flight]]
            stream = requests(block * MIB, file_bytes, shares[mode])
            results[block, in_flight, mode].append(bare_loop(file, used, stream, options.seconds))
    finally:
        os.close(file)
    return [
        {"mode": mode, "block_mib": block, "in_flight": in_flight}
        | {key: median(sample[key] for sample in samples) for key in samples[0]}
        for (block, in_flight, mode), samples in results.items()
    ]


def open_direct(path: Path) -> int:
    """Open `path` with O_DIRECT; leaves with exit code 2 where the file system refuses it."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    except OSError as error:
        refuse(
            f"--scratch {path.parent}: the file system refuses O_DIRECT ({error.strerror}); give a directory on a local disk"
        )


def fill(file: int, file_bytes: int) -> None:
    """Write the whole file once: reading a block that was only allocated costs the disk nothing."""
    view = memoryview(huge_page_buffer(16 * MIB))
    view[:] = np.random.default_rng(0).bytes(16 * MIB)  # zeros might be treated specially by the disk
    for offset in range(0, file_bytes, 16 * MIB):
        os.pwritev(file, [view], offset)
    os.fsync(file)


def fio_rates(scratch: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run fio's io_uring engine with its usual buffers and, through glibc's allocator, with buffers on huge pages."""
    results = []
    for huge, mode in itertools.product([False, True], ["read", "write", "rw"]):
        command = ["fio", "--name=limits", f"--directory={scratch}", f"--size={options.file_gib}G", "--direct=1", "--thread"]
        command += [
            f"--rw={mode}",
            f"--rwmixread={round(100 * options.read_share)}",
            "--bs=4M",
            "--ioengine=io_uring",
            "--iodepth=4",
        ]
        command += [
            f"--runtime={round(1000 * options.seconds)}ms",
            "--time_based",
            "--output-format=json",
            "--fallocate=posix",
            "--end_fsync=1",
        ]
        tunables = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if huge else {}
        done = subprocess.run(command, env=dict(os.environ) | tunables, capture_output=True, text=True, check=False)
        case = {"mode": {"rw": "mixed"}.get(mode, mode), "huge_pages": huge, "block_mib": 4, "in_flight": 4}
        if done.returncode:
            results.append(case | {"failed": done.stderr[-400:]})
            continue
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        read, write = (job[way]["bw_bytes"] / GB for way in ("read", "write"))
        results.append(case | {"read_gb_per_second": read, "write_gb_per_second": write, "gb_per_second": read + write})
    return results


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--scratch", type=Path, required=True, help="directory on the disk under test; nothing stays in it")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--file-gib", type=int, default=4)
    parser.add_argument("--blocks-mib", type=numbers, default="1,4,16")
    parser.add_argument("--in-flight", type=numbers, default="1,2,4,8")
    parser.add_argument(
        "--read-share", type=float, default=round(TRAINING_READ_SHARE, 3), help="of the bytes of the mixed case"
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="of one sample")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--stream-mib", type=int, default=512, help="of one array; should be well above the last-level cache")
    return parser.parse_args()


def main() -> None:
    options = options_of()
    results: dict[str, Any] = {"options": vars(options)}
    with scratch_directory(options.scratch) as scratch:
        require_disk(scratch, 2 * options.file_gib << 30, f"--file-gib {options.file_gib}")
        results["machine"] = machine_facts(scratch)
        results["memory"] = show(memory_rates(options.stream_mib * MIB, 3 * options.repeats))
        path = scratch / "bare"
        results["bare_loop"] = show(file_rates(path, options))
        path.unlink()
        if shutil.which("fio"):
            results["fio"] = show(fio_rates(scratch, options))
        else:
            print("fio is not installed: left out")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=1, default=str), encoding="utf-8")


def show(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Print `rows`, one a line, and return them."""
    for row in rows:
        print(", ".join(f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()))
    return rows


if __name__ == "__main__":
    main()
