"""The sum of squares of a gradient, the same bits for any chunks and any threads.

The norm of all units is not here (add their sums in the order of the units, then take the root), nor what follows (`clip`).

Invariant: each block of `BLOCK_ELEMENTS` elements is summed alone, in fp64; block sums are added in the order of the elements.
What comes in pieces (`PlacedSquares`) has the bits of the whole, in which everything else is zero.
"""

import numpy as np
from numpy.typing import NDArray

from headrace.terms.errors import ConfigError
from headrace.update.rules import kernels
from headrace.update.rules.kernels import BLOCK_ELEMENTS
from headrace.update.rules.rule import GRADIENT_DTYPES

__all__ = ["BLOCK_ELEMENTS", "PlacedSquares", "add_block_sums", "block_square_sums", "square_sum"]

_BLOCKS_AT_ONCE = 1024  # of rows: some 8 MiB


def square_sum(gradient: NDArray[np.generic], carry: float = 0.0) -> float:
    """Return `carry` plus the sum of squares of `gradient`; infinite or NaN if and only if an element is not finite.

    If a unit comes in chunks, pass each chunk's result as the `carry` of the next. The bits are those of one call on the whole,
    provided each chunk but the last is a multiple of `BLOCK_ELEMENTS` long.

    Shapes: `(n,)`, contiguous; uint16 (bfloat16 bits), float32 or float16. Cost: one pass, no GIL.

    Raises:
        ConfigError: an array of another type or shape.
    """
    return add_block_sums(block_square_sums(gradient), carry)


def block_square_sums(gradient: NDArray[np.generic]) -> NDArray[np.float64]:
    """Return the sum of squares of each block, `(ceil(n / BLOCK_ELEMENTS),)`: threads can compute it for parts of a unit.

    Raises:
        ConfigError: an array of another type or shape.
    """
    if gradient.dtype.name not in GRADIENT_DTYPES or gradient.ndim != 1 or not gradient.flags.c_contiguous:
        raise ConfigError(
            f"gradient must be one contiguous dimension of {' or '.join(GRADIENT_DTYPES)}; "
            f"found {gradient.dtype.name}, shape {gradient.shape}, strides {gradient.strides}"
        )
    sums = np.empty(-(-gradient.size // BLOCK_ELEMENTS), np.float64)
    kernels.write_block_square_sums(gradient.view(np.int16) if gradient.dtype == np.float16 else gradient, sums)
    return sums


def add_block_sums(sums: NDArray[np.float64], carry: float = 0.0) -> float:
    """Return `carry` plus the `sums` of blocks, added one after the other."""
    return float(kernels.add_sums_in_order(sums, float(carry)))


class PlacedSquares:
    """The sum of squares of a gradient of which only some pieces are there, each with its place in the whole. They ascend."""

    def __init__(self) -> None:
        self._total = 0.0
        self._block, self._open = -1, np.zeros(BLOCK_ELEMENTS, np.float32)  # the last block, which a piece may still reach

    def add(self, start: int, flat: NDArray[np.generic]) -> None:
        """Add a piece that lies from element `start` on: `(n,)`, of a type as for `square_sum`."""
        at = 0
        while at < flat.size:
            block, within = divmod(start + at, BLOCK_ELEMENTS)
            whole = (flat.size - at) // BLOCK_ELEMENTS * BLOCK_ELEMENTS
            if within == 0 and whole:
                self._close()
                self._total = square_sum(flat[at : at + whole], self._total)
                at += whole
                continue
            count = min(BLOCK_ELEMENTS - within, flat.size - at)
            self._at(block)[within : within + count] = _float32(flat[at : at + count])
            at += count

    def add_rows(self, start: int, ids: NDArray[np.int64], rows: NDArray[np.float32]) -> None:
        """Add the rows `ids` (n, width), which ascend, of a table that lies from element `start` on."""
        width = rows.shape[1]
        at_once = max(1, _BLOCKS_AT_ONCE // (width // BLOCK_ELEMENTS + 2))
        for begin in range(0, ids.size, at_once):
            some = slice(begin, begin + at_once)
            places = (start + ids[some, None] * width + np.arange(width)).reshape(-1)
            self._add_some(places // BLOCK_ELEMENTS, places % BLOCK_ELEMENTS, rows[some].reshape(-1))

    def _add_some(self, blocks: NDArray[np.int64], within: NDArray[np.int64], values: NDArray[np.float32]) -> None:
        """Add elements of these blocks, which ascend; the last block stays open."""
        index = np.concatenate([[0], np.cumsum(np.diff(blocks) != 0)])
        found = np.zeros((int(index[-1]) + 1, BLOCK_ELEMENTS), np.float32)
        found[index, within] = values
        if int(blocks[0]) == self._block:
            found[0] += self._open  # zero where the elements are
        else:
            self._close()
        self._total = add_block_sums(block_square_sums(found[:-1].reshape(-1)), self._total)
        self._block, self._open = int(blocks[-1]), found[-1].copy()

    def total(self) -> float:
        """Return the sum. Nothing is added afterwards."""
        self._close()
        return self._total

    def _at(self, block: int) -> NDArray[np.float32]:
        """Return the numbers of a block, the last one or a later one."""
        if block != self._block:
            self._close()
            self._block = block
        return self._open

    def _close(self) -> None:
        if self._block >= 0:
            self._total = square_sum(self._open, self._total)
            self._block = -1
            self._open[:] = 0


def _float32(gradient: NDArray[np.generic]) -> NDArray[np.float32]:
    if gradient.dtype == np.uint16:
        return (gradient.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return gradient.astype(np.float32)
