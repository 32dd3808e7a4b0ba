"""Four bits a weight as in compressed-tensors (`pack-quantized`): eight codes in an int32, a scale for each group.

A matrix (rows, columns) has three parts. `weight_packed` int32 (rows, columns / 8, rounded up) has the code of column 8 i + k
in bits 4 k to 4 k + 3 of word i. The others are `weight_scale` (rows, groups) and `weight_shape` int64 (2). Code u stands for
(u - 8) times the scale of its group, rounded to the scale's dtype.
"""

import torch
from torch import Tensor

_CODES_IN_A_WORD = 8
_BITS = 4


def pack(codes: Tensor) -> Tensor:
    """Return codes (rows, columns) uint8, 0 to 15, as int32 words (rows, words). The last word is filled up with code 0."""
    missing = -codes.shape[-1] % _CODES_IN_A_WORD
    filled = torch.nn.functional.pad(codes, (0, missing)).view(codes.shape[0], -1, _CODES_IN_A_WORD // 2, 2)
    bytes_of_two = filled[..., 0] | (filled[..., 1] << _BITS)  # the lower half of a byte is the earlier column
    return bytes_of_two.reshape(codes.shape[0], -1).contiguous().view(torch.int32)


def unpack(words: Tensor, columns: int) -> Tensor:
    """Return the codes (rows, columns), uint8, that `words` (rows, words) int32 hold."""
    packed = words.reshape(-1).view(torch.uint8)
    return torch.stack([packed & 0xF, packed >> _BITS], dim=-1).view(words.shape[0], -1)[:, :columns]
