"""Tensors that wait in a file: hidden states of micro-batches between two blocks, and rounded experts. Memory holds one.

Invariant: `read` returns what was written last; after `sync` that is on the drive.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from headrace.terms.errors import StorageError

# A tensor's dtype is its place here, in a byte behind all tensors; 0 stands for one that was never written.
_DTYPES = (None, torch.bfloat16, torch.float16, torch.float32)
_MOST_BYTES = 4


class HiddenRows:
    """A file with a tensor for each of `shapes`, in the dtype in which it was written: blocks decide what they hand on.

    Each has room for float32; what is not written takes no space. Close it after use.
    """

    def __init__(self, path: Path, shapes: Sequence[tuple[int, ...]]) -> None:
        self._path, self._shapes = path, [torch.Size(shape) for shape in shapes]
        sizes = [shape.numel() * _MOST_BYTES for shape in self._shapes]
        self._starts = [sum(sizes[:index]) for index in range(len(sizes))]
        self._marks = sum(sizes)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)

    def read(self, index: int) -> torch.Tensor:
        """Return tensor `index`.

        Raises:
            StorageError: it was not written, or the file is shorter than what was written to it.
        """
        mark = os.pread(self._descriptor, 1, self._marks + index)
        dtype = _DTYPES[mark[0]] if mark and mark[0] < len(_DTYPES) else None
        if dtype is None:
            raise StorageError(f"{self._path}: holds no rows {index}; remove the directory and start again")
        tensor = torch.empty(self._shapes[index], dtype=dtype)
        left = memoryview(tensor.view(-1).view(torch.uint8).numpy().data)
        offset = self._starts[index]
        while left:
            count = os.preadv(self._descriptor, [left], offset)
            if count == 0:
                raise StorageError(f"{self._path}: ends at byte {offset}; remove the directory and begin again")
            left, offset = left[count:], offset + count
        self._drop(index)
        return tensor

    def write(self, index: int, tensor: torch.Tensor) -> None:
        """Write tensor `index`: bfloat16, float16 or float32."""
        left = memoryview(tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().data)
        offset = self._starts[index]
        while left:
            count = os.pwrite(self._descriptor, left, offset)
            left, offset = left[count:], offset + count
        os.pwrite(self._descriptor, bytes([_DTYPES.index(tensor.dtype)]), self._marks + index)

    def sync(self) -> None:
        """Make everything that was written survive a power cut."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def _drop(self, index: int) -> None:
        if hasattr(os, "posix_fadvise"):
            size = self._shapes[index].numel() * _MOST_BYTES
            os.posix_fadvise(self._descriptor, self._starts[index], size, os.POSIX_FADV_DONTNEED)
