"""The order in which MARLIN's kernels want four-bit codes (Frantar et al. 2024), which libraries make from row-major codes.

This order is never stored. Tiles of 16 x 16 codes lie row after row; of four tiles in a row each thread of a warp takes
one 16-byte word, in the order in which a tensor core wants its operands.
"""

import numpy as np
from numpy.typing import NDArray

_TILE, _CODES_IN_A_WORD = 16, 8
_CHUNK = 4 * _TILE * _TILE
# Two codes 16 bits apart are one half2 after a mask: the kernel makes float16 from codes without conversions.
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def permutation() -> NDArray[np.int32]:
    """Return for each place of a chunk of four tiles which of their codes it has, (1024) int32."""
    found: list[int] = []
    for lane in range(32):
        column, pair = lane // 4, 2 * (lane % 4)
        rows = (pair, pair + 1, pair + 8, pair + 9)
        tile = [_TILE * row + column + 8 * block for block in (0, 1) for row in rows]
        found += [tile[at] + _TILE * _TILE * number for number in range(4) for at in _ORDER]
    return np.array(found, np.int32)


def pack(codes: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Return codes (inputs, outputs), 0 to 15, as MARLIN's words (inputs / 16, 2 outputs): multiples of 16 and of 64."""
    inputs, outputs = codes.shape
    tiles = codes.reshape(inputs // _TILE, _TILE, outputs // _TILE, _TILE).transpose(0, 2, 1, 3)
    chunks = tiles.reshape(-1, _CHUNK)[:, permutation()].reshape(inputs // _TILE, -1, _CODES_IN_A_WORD).astype(np.uint32)
    words: NDArray[np.uint32] = (chunks << (4 * np.arange(_CODES_IN_A_WORD, dtype=np.uint32))).sum(axis=2, dtype=np.uint32)
    return words.view(np.int32)


def unpack(words: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Inverse of `pack`."""
    rows, count = words.shape
    codes = (words.view(np.uint32)[:, :, None] >> (4 * np.arange(_CODES_IN_A_WORD, dtype=np.uint32))) & np.uint32(15)
    chunks = codes.astype(np.uint8).reshape(-1, _CHUNK)
    tiles = np.empty_like(chunks)
    tiles[:, permutation()] = chunks
    outputs = count // 2
    return tiles.reshape(rows, outputs // _TILE, _TILE, _TILE).transpose(0, 2, 1, 3).reshape(rows * _TILE, outputs)
