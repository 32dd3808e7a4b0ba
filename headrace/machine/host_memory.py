"""Host memory: page-aligned buffers on huge pages, and what the kernel says about this process.

Huge pages are the point: O_DIRECT transfers into 4 KiB pages cost several times the CPU and, on virtual disks, half the
throughput (measured: `docs/decisions/0003`). A mapping must be private and anonymous for the kernel to use them.
"""

import contextlib
import ctypes
import mmap
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.terms.sizes import KEPT_FREE_BYTES, LARGEST_HEAP_BLOCK_BYTES, MAPPED_BYTES

Bytes = NDArray[np.uint8]

_HUGE_PAGE_BYTES = 2 << 20
# Parameters of glibc's mallopt, and more than any heap keeps.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_EVERYTHING_BYTES = (1 << 31) - 1
STATM = Path("/proc/self/statm")
# What may be made between two looks at what is resident: one block of the heap, several where they are small.
_MARGIN_BYTES, _SMALL_BLOCKS_MARGIN_BYTES = LARGEST_HEAP_BLOCK_BYTES, 8 * MAPPED_BYTES
# If too much stays after a return, it is tried again when so much more is resident, or after so many looks. Memory freed since
# cannot be seen, and each try stops every thread that allocates.
_REGROWN_BYTES, _LOOKS_BETWEEN = MAPPED_BYTES, 20


def huge_page_buffer(num_bytes: int) -> Bytes:
    """Return `num_bytes` of zeroed memory that starts on a huge-page border.

    Nothing is resident until it is touched. The mapping lives as long as the array or a view of it.
    """
    mapping = mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = np.frombuffer(mapping, dtype=np.uint8)
    start = -whole.ctypes.data % _HUGE_PAGE_BYTES
    whole_pages_bytes = num_bytes // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    # Not the last part of a page: a huge page there would take more memory than was asked for.
    if hasattr(mmap, "MADV_HUGEPAGE") and whole_pages_bytes:
        mapping.madvise(mmap.MADV_HUGEPAGE, start, whole_pages_bytes)
    return whole[start : start + num_bytes]


def keep_freed_memory(keep: bool) -> bool:
    """Choose what the C library does with large freed blocks; returns whether it could be told.

    Kept, blocks of up to 32 MiB come from one heap and are used again: their pages are there. But they leave pieces that later
    requests do not fit, half as much again as is alive (docs/log/freed-memory); the plan counts it. If returned
    at once, blocks of `MAPPED_BYTES` and more are mapped and unmapped one by one, on fresh pages each time. That is 15
    to 28 % of a step where the CPU computes. Of what is smaller, the heap keeps `KEPT_FREE_BYTES` at its end in either case.
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
    """Keeps freed memory as long as there is room, and gives it back where there is not.

    `keep` says whether it is kept from the beginning. Otherwise it is from the first step on that leaves room for another
    workspace. Everything is returned as soon as more than `most_bytes` is `resident`, even if all kept blocks are too small to
    be mapped. Scans of state-space layers make so many of them that half a workspace more stayed than planned. `look` must be
    called all the time for this, not between operations. One operation was seen to add 1.9 to 2.8 workspaces, by chance
    (docs/log/state-space-models, docs/log/freed-memory). Where giving back does not suffice, freed memory is no longer kept.
    """

    def __init__(
        self, planned_bytes: int, workspace_bytes: int, *, keep: bool, resident: Callable[[], int] | None = None
    ) -> None:
        self._planned_bytes = planned_bytes
        self._roomy_bytes = planned_bytes - _MARGIN_BYTES - workspace_bytes
        self._was_kept = keep  # once kept, large blocks lie in the heap for as long as they live
        self._left_bytes = self._looks = 0
        self.keeps = keep
        self._resident = resident or anonymous_bytes
        keep_freed_memory(keep)

    @property
    def most_bytes(self) -> int:
        """What may be resident before freed memory is given back."""
        return self._planned_bytes - (_MARGIN_BYTES if self._was_kept else _SMALL_BLOCKS_MARGIN_BYTES)

    def look(self, resident_bytes: int) -> None:
        """Take note of what is resident at this moment. May be called from another thread."""
        if resident_bytes <= self.most_bytes:
            self._left_bytes = 0
            return
        self._looks += 1
        if self._left_bytes and resident_bytes <= self._left_bytes + _REGROWN_BYTES and self._looks < _LOOKS_BETWEEN:
            return
        self._looks = 0
        return_pieces()
        self._left_bytes = self._resident()
        if self.keeps and self._left_bytes > self.most_bytes:
            self.keeps = False
            keep_freed_memory(False)

    def after_step(self, peak_bytes: int) -> None:
        """Take note of a step's peak."""
        if not self._was_kept and peak_bytes <= self._roomy_bytes:
            self.keeps = self._was_kept = keep_freed_memory(True)


def anonymous_bytes() -> int:
    """Return what this process has of memory that is no file's (`RssAnon`), in bytes; 0 where the kernel does not say."""
    try:
        return anonymous_bytes_of(STATM.read_bytes())
    except OSError:
        return 0


def anonymous_bytes_of(statm: bytes) -> int:
    """Return `anonymous_bytes` from what the kernel writes into `STATM`, which is read in a third of the time of `status`."""
    _, resident, shared = statm.split()[:3]
    return (int(resident) - int(shared)) * mmap.PAGESIZE
