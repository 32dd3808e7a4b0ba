"""Host memory: page-aligned buffers on huge pages, and what the kernel says about this process.

Huge pages are the point: O_DIRECT transfers into 4 KiB pages cost several times the CPU and, on virtual disks, half the
throughput (measured: `docs/decisions/0003`). A mapping must be private and anonymous for the kernel to use them.
"""

import contextlib
import ctypes
import mmap
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.spec.sizes import KEPT_FREE_BYTES, LARGEST_HEAP_BLOCK_BYTES, MAPPED_BYTES

Bytes = NDArray[np.uint8]

_HUGE_PAGE_BYTES = 2 << 20
# Parameters of glibc's mallopt, and more than any heap keeps.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_EVERYTHING_BYTES = (1 << 31) - 1
# What peaks stay below a plan, for they differ a little from step to step.
_MARGIN_BYTES = 16 << 20


def huge_page_buffer(num_bytes: int) -> Bytes:
    """Return `num_bytes` of zeroed memory that starts on a huge-page border.

    Nothing is resident until it is touched. The mapping lives as long as the array or a view of it.
    """
    mapping = mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = np.frombuffer(mapping, dtype=np.uint8)
    start = -whole.ctypes.data % _HUGE_PAGE_BYTES
    whole_pages_bytes = num_bytes // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    # Not the tail: a huge page there would make more resident than was asked for.
    if hasattr(mmap, "MADV_HUGEPAGE") and whole_pages_bytes:
        mapping.madvise(mmap.MADV_HUGEPAGE, start, whole_pages_bytes)
    return whole[start : start + num_bytes]


def keep_freed_memory(keep: bool) -> bool:
    """Choose what the C library does with large freed blocks; returns whether it could be told.

    Kept, blocks of up to 32 MiB come from one heap and are used again: their pages are there. But they leave pieces that later
    requests do not fit, half as much again as is alive (LOG.md, 2026-11-21); `plan.footprint` counts it. Given back at once,
    blocks of `MAPPED_BYTES` and more are mapped and unmapped one by one, on pages that are fresh each time: 15 to 28 % of
    a step where the CPU computes. Of what is smaller, the heap keeps `KEPT_FREE_BYTES` at its end in either case.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    # One heap: each thread's own would keep pieces of its own.
    one_heap = bool(mallopt(_ARENA_MAX, 1))
    mapped, kept = (LARGEST_HEAP_BLOCK_BYTES, _EVERYTHING_BYTES) if keep else (MAPPED_BYTES, KEPT_FREE_BYTES)
    told = bool(mallopt(_MMAP_THRESHOLD, mapped)) and bool(mallopt(_TRIM_THRESHOLD, kept))
    if not keep:
        return_pieces()  # what was kept until now
    return one_heap and told


def return_pieces() -> None:
    """Give back to the kernel what the C library keeps at this moment; it goes on keeping what is freed from now on."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


class HeapGuard:
    """Keeps freed memory as long as there is room, and gives it back between two operations where there is not.

    `keep` says whether it is kept from the beginning. Otherwise it is from the first step on that leaves room for what an
    operation leaves behind. While it is kept, all is given back when an operation ends with more than a limit resident: at
    first `planned_bytes` less two workspaces, for an operation was seen to add one and a half (LOG.md, 2026-11-21); then what
    brings the peaks of steps just below `planned_bytes`.
    """

    def __init__(self, planned_bytes: int, workspace_bytes: int, *, keep: bool) -> None:
        self._target_bytes = planned_bytes - _MARGIN_BYTES
        self._roomy_bytes = self._target_bytes - workspace_bytes
        self._most_bytes = planned_bytes - workspace_bytes
        self._seen_bytes = 0
        self.limit_bytes, self.keeps = planned_bytes - 2 * workspace_bytes, keep
        keep_freed_memory(keep)

    def after_operation(self) -> None:
        """Look once: some tens of microseconds. To be called when what an operation made has been freed."""
        if not self.keeps:
            return
        resident = process_status_bytes("RssAnon")
        self._seen_bytes = max(self._seen_bytes, resident)
        if resident > self.limit_bytes:
            return_pieces()

    def after_step(self, peak_bytes: int) -> None:
        """Take note of a step's peak, as far as it was seen from outside; operations may have ended with more."""
        peak_bytes, self._seen_bytes = max(peak_bytes, self._seen_bytes), 0
        if self.keeps:
            # Whatever the limit is moved by, peaks move by at most.
            self.limit_bytes = min(self._most_bytes, self.limit_bytes + self._target_bytes - peak_bytes)
        elif peak_bytes <= self._roomy_bytes:
            self.keeps = keep_freed_memory(True)


def process_status_bytes(field: str) -> int:
    """Return a memory field of this process (`RssAnon`, `VmRSS`, `VmHWM`, ...) in bytes, 0 where the kernel has none."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
