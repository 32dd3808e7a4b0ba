"""Arrays in files whose blocks have checksums: each block gets one when it is written, and is checked when it is first read.

Invariant: no element leaves a `BlockArray` before the block that holds it was found to be as it was written.
"""

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace.terms.errors import CorruptData

# Large enough that a checksum is a small part of a read, small enough that the first sample of a run waits for little.
BLOCK_BYTES = 1 << 18
_T = TypeVar("_T", bound=np.generic)


class BlockChecksums:
    """The CRC-32 of each `BLOCK_BYTES` of what is added, piece by piece; the last block may be shorter."""

    def __init__(self) -> None:
        self._sums: list[int] = []
        self._in_block_bytes = BLOCK_BYTES

    def add(self, data: bytes) -> None:
        """Add the next bytes of the file."""
        rest = memoryview(data)
        while rest:
            if self._in_block_bytes == BLOCK_BYTES:
                self._sums.append(0)
                self._in_block_bytes = 0
            piece = rest[: BLOCK_BYTES - self._in_block_bytes]
            self._sums[-1] = zlib.crc32(piece, self._sums[-1])
            self._in_block_bytes += len(piece)
            rest = rest[len(piece) :]

    @property
    def sums(self) -> NDArray[np.uint32]:
        """The checksums so far, one for each block."""
        return np.array(self._sums, dtype=np.uint32)


class BlockArray(Generic[_T]):
    """The array of `count` elements in the file `path`, mapped; each block is checked against its checksum when first read."""

    def __init__(self, path: Path, dtype: np.dtype[_T], count: int, checksums: Sequence[int] | NDArray[np.uint32]) -> None:
        """Map the file.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file has another length, or there is not one checksum for each block.
        """
        num_bytes = count * dtype.itemsize
        if (found := path.stat().st_size) != num_bytes:
            raise ValueError(f"{path.name} has {found} bytes, expected {num_bytes}")
        if len(checksums) != num_blocks(num_bytes):
            raise ValueError(f"{path.name} has {num_blocks(num_bytes)} blocks and {len(checksums)} checksums")
        self._path = path
        self._values: NDArray[_T] = np.memmap(path, dtype=dtype, mode="r", shape=(count,))
        self._bytes = self._values.view(np.uint8)
        self._checksums = checksums
        self._verified = np.zeros(len(checksums), dtype=np.bool_)

    def __len__(self) -> int:
        return len(self._values)

    def read(self, start: int, stop: int) -> NDArray[_T]:
        """Return elements `start` to `stop`, a view of the file.

        Raises:
            CorruptData: a block that holds some of them is not as it was written.
        """
        size = self._values.itemsize
        for block in range(start * size // BLOCK_BYTES, num_blocks(stop * size)):
            if not self._verified[block]:
                self._verify(block)
        return self._values[start:stop]

    def _verify(self, block: int) -> None:
        offset = block * BLOCK_BYTES
        found, expected = zlib.crc32(self._bytes[offset : offset + BLOCK_BYTES].data), int(self._checksums[block])
        if found != expected:
            raise CorruptData(
                f"{self._path}: the token cache is damaged: bytes {offset} to {min(offset + BLOCK_BYTES, len(self._bytes))} "
                f"have the checksum {found:08x}, they were written with {expected:08x}. Remove {self._path.parent} to "
                "tokenise the data again, and check the drive"
            )
        self._verified[block] = True


class HeldArray(Generic[_T]):
    """An array in memory, read as a `BlockArray` is."""

    def __init__(self, values: NDArray[_T]) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def read(self, start: int, stop: int) -> NDArray[_T]:
        """Return elements `start` to `stop`, a view."""
        return self._values[start:stop]


def num_blocks(num_bytes: int) -> int:
    """Return how many blocks a file of `num_bytes` has."""
    return -(-num_bytes // BLOCK_BYTES)
