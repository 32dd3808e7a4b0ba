"""How numbers travel between learners and their node: in bfloat16, or in 8 bits with one scale for each block.

With 8 bits what rounding leaves is added to what is sent next (error feedback), so nothing is lost for good.
Invariant: decoding takes the same operations everywhere, so all who receive the same bytes hold the same numbers.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.update.rules.tensors import as_tensor

_BLOCK = 512  # numbers that share a float32 scale
_MOST = 127.0


class Travel:
    """Numbers as the bits of bfloat16. `dtype` is the NumPy type in which they travel.

    `feeds_back`: whoever sends keeps what rounding leaves, and adds it the next time.
    """

    name = "bfloat16"
    dtype = "uint16"
    feeds_back = False

    def sizes(self, counts: Sequence[int]) -> tuple[int, ...]:
        """Return how many values of `dtype` travel for so many numbers of each unit."""
        return tuple(counts)

    def encode(self, numbers: torch.Tensor) -> NDArray[np.generic]:
        """Return what travels for float32 numbers."""
        bits: NDArray[np.generic] = numbers.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        return bits

    def decode(self, values: NDArray[np.generic], count: int) -> torch.Tensor:
        """Return `count` numbers that travelled, as float32."""
        return as_tensor(values, bfloat16=True).float()


class Int8Travel(Travel):
    """Numbers in 8 bits: blocks of them, then a float32 scale for each block."""

    name = "int8"
    dtype = "uint8"
    feeds_back = True

    def sizes(self, counts: Sequence[int]) -> tuple[int, ...]:
        """Return the bytes of each unit."""
        return tuple(count + 4 * _blocks(count) for count in counts)

    def encode(self, numbers: torch.Tensor) -> NDArray[np.generic]:
        """Return bytes: each number is rounded to the nearest multiple of its block's scale."""
        count, blocks = numbers.numel(), _blocks(numbers.numel())
        padded = torch.zeros(blocks * _BLOCK, dtype=torch.float32)
        padded[:count] = numbers
        rows = padded.view(blocks, _BLOCK)
        scales = rows.abs().amax(dim=1, keepdim=True) / _MOST
        steps = (rows / scales.clamp(min=torch.finfo(torch.float32).tiny)).round().to(torch.int8)
        whole = np.concatenate([steps.view(-1)[:count].numpy().view(np.uint8), scales.view(-1).numpy().view(np.uint8)])
        return np.asarray(whole)

    def decode(self, values: NDArray[np.generic], count: int) -> torch.Tensor:
        """Return each number: its step times its block's scale."""
        scales = torch.from_numpy(values[count:].copy().view(np.float32)).repeat_interleave(_BLOCK)[:count]
        return torch.from_numpy(values[:count].view(np.int8)).float().mul_(scales)


TRAVELS = {each.name: each for each in (Travel(), Int8Travel())}


def _blocks(count: int) -> int:
    return -(-count // _BLOCK)
