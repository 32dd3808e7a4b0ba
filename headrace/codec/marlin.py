"""MARLIN's layout of four-bit weights, which its GPU kernels read (Frantar et al. 2024): made of stored codes, and back.

It is never what lies in a file: kernels differ by device, and `codec/int4.py` has what is published. Weights are here as
products want them, (inputs K, outputs N): 16 by 16 tiles, in rows; four tiles side by side, 1024 weights, are shuffled so that
a thread's 16-byte load holds what its tensor-core instructions take, nibbles in the order in which two bit operations widen
them. Invariant: `unmarlin(marlin(codes)) == codes`; K is a multiple of 16 (with groups, of theirs), N of 64.
"""

from functools import cache

import torch
from torch import Tensor

TILE = 16
_TILES_AT_ONCE, _LANES, _CODES_IN_A_WORD, _BITS = 4, 32, 8, 4
_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)


@cache
def permutation() -> Tensor:
    """Return where each of 1024 weights of four tiles comes from, int32."""
    found = []
    for lane in range(_LANES):
        rows, column = 2 * (lane % 4), lane // 4
        of_tile = [TILE * row + column + 8 * half for half in range(2) for row in (rows, rows + 1, rows + 8, rows + 9)]
        for tile in range(_TILES_AT_ONCE):
            found += [of_tile[nibble] + TILE * TILE * tile for nibble in _NIBBLES]
    return torch.tensor(found, dtype=torch.int32)


def marlin(codes: Tensor) -> Tensor:
    """Return codes (K, N) uint8, 0 to 15, as int32 (K / 16, 2 N)."""
    inputs, outputs = codes.shape
    tiles = codes.view(inputs // TILE, TILE, outputs // TILE, TILE).permute(0, 2, 1, 3).reshape(inputs // TILE, -1)
    shuffled = tiles.view(inputs // TILE, -1, len(permutation()))[..., permutation().long()]
    pairs = shuffled.reshape(inputs // TILE, -1, _CODES_IN_A_WORD // 2, 2)
    return (pairs[..., 0] | pairs[..., 1] << _BITS).contiguous().view(torch.int32).view(inputs // TILE, -1)


def unmarlin(words: Tensor) -> Tensor:
    """Return the codes (K, N) of `marlin`'s words."""
    rows = len(words)
    packed = words.contiguous().view(torch.uint8)
    shuffled = torch.stack([packed & 0xF, packed >> _BITS], dim=-1).view(rows, -1, len(permutation()))
    tiles = torch.empty_like(shuffled)
    tiles[..., permutation().long()] = shuffled
    outputs = words.shape[1] // 2
    return tiles.view(rows, outputs // TILE, TILE, TILE).permute(0, 2, 1, 3).reshape(rows * TILE, outputs)


def marlin_scales(scales: Tensor) -> Tensor:
    """Return scales (groups, N) in the kernel's order: of several groups in blocks of 64, of one in blocks of 32."""
    if len(scales) > 1:
        order = [column + 8 * block for column in range(8) for block in range(8)]
    else:
        order = [2 * lane + column for lane in range(4) for column in (0, 1, 8, 9, 16, 17, 24, 25)]
    return scales.view(len(scales), -1, len(order))[..., order].reshape(scales.shape)
