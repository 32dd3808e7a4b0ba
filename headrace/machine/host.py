"""Host memory: page-aligned buffers on huge pages, and what the kernel says about this process.

Huge pages are the point: O_DIRECT transfers into 4 KiB pages cost several times the CPU and, on virtual disks, half the
throughput (measured: `docs/decisions/0003`). A mapping must be private and anonymous for the kernel to use them.
"""

import ctypes
import mmap
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.spec.sizes import KEPT_FREE_BYTES, MAPPED_BYTES

Bytes = NDArray[np.uint8]

_HUGE_PAGE_BYTES = 2 << 20


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


def return_freed_memory() -> bool:
    """Make the C library give large freed blocks back to the kernel at once; returns whether it could be asked to.

    glibc keeps freed blocks of up to 32 MiB for itself, in pieces that later requests do not fit: measured on blocks of 50 M
    parameters, 0.5 GiB above what is alive (LOG.md, 2026-11-21). A budget cannot be kept like that. Here blocks of
    `MAPPED_BYTES` and more are mapped and unmapped one by one. Their pages are fresh each time; as torch's allocator takes huge
    ones for blocks of that size, they cost little. With a threshold of 256 KiB fresh small pages took 40 % of a step. Of what
    is smaller, the heap keeps `KEPT_FREE_BYTES` at its end for the next operation.
    """
    mmap_threshold, trim_threshold = -3, -1
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    return bool(mallopt(mmap_threshold, MAPPED_BYTES)) and bool(mallopt(trim_threshold, KEPT_FREE_BYTES))


def process_status_bytes(field: str) -> int:
    """Return a memory field of this process (`RssAnon`, `VmRSS`, `VmHWM`, ...) in bytes, 0 where the kernel has none."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
