"""Hidden states of micro-batches between two blocks, in a file: memory holds one micro-batch's, whatever their number.

Invariant: `read` returns what was written last; after `sync` that is on the drive.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from headrace.terms.errors import StorageError


class HiddenRows:
    """A file with a tensor of `dtype` for each of `shapes`. Close it after use."""

    def __init__(self, path: Path, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> None:
        self._path, self._shapes, self._dtype = path, [torch.Size(shape) for shape in shapes], dtype
        sizes = [shape.numel() * dtype.itemsize for shape in self._shapes]
        self._starts = [sum(sizes[:index]) for index in range(len(sizes))]
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)

    @staticmethod
    def num_bytes(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> int:
        """Return the size of such a file."""
        return sum(torch.Size(shape).numel() for shape in shapes) * dtype.itemsize

    def read(self, index: int) -> torch.Tensor:
        """Return tensor `index`.

        Raises:
            StorageError: the file is shorter than what was written to it.
        """
        shape = self._shapes[index]
        tensor = torch.empty(shape, dtype=self._dtype)
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
        """Write tensor `index`."""
        left = memoryview(tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().data)
        offset = self._starts[index]
        while left:
            count = os.pwrite(self._descriptor, left, offset)
            left, offset = left[count:], offset + count

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
            size = self._shapes[index].numel() * self._dtype.itemsize
            os.posix_fadvise(self._descriptor, self._starts[index], size, os.POSIX_FADV_DONTNEED)
