"""Reading a model's files leaves none of their pages in the page cache: a budget of memory has no room for a second copy."""

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from headrace.model.stored.safetensors_file import read_bytes, read_header, read_tensor_rows

PAGE = mmap.PAGESIZE


def cached_bytes(path: Path) -> int:
    """Return how much of a file is in the page cache."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        view = np.frombuffer(mapped, dtype=np.uint8)
        found = (ctypes.c_ubyte * -(-view.size // PAGE))()
        failed = ctypes.CDLL(None).mincore(ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(view.size), found)
        del view  # a mapping with views cannot be closed
    assert not failed
    return sum(page & 1 for page in found) * PAGE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("read", [read_tensor_rows, read_bytes])
def test_no_page_of_a_file_stays_whatever_the_order_of_its_tensors(read: object, dtype: torch.dtype, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({f"t{number}": torch.zeros(3000 + number, 1001, dtype=dtype) for number in range(5)}, path)
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    if cached_bytes(path):
        pytest.skip("this file system keeps its files in memory")
    tensors = read_header(path)
    for key in ("t3", "t0", "t4", "t1", "t2"):
        assert sum(1 for _ in read(tensors[key])) > 1  # type: ignore[operator]
    assert cached_bytes(path) <= 4 * PAGE, "the header's page, and those that two tensors share"
