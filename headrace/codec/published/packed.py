"""Products of few rows with four-bit weights that stay packed: torch's kernel reads a quarter of the bytes of bfloat16.

Packing takes less time than decoding, or than reading packed weights from a drive would. So it is done once, for weights that
stay in memory, and packed ones are never stored. Their layout depends on torch's kernel and on the processor's instructions.
The loop that packs (`packed_loops.py`) is first compared with torch's own packing, which takes twenty times as
long. Where they differ, torch packs.

Invariant: the way of a product follows from the plan and from its shape alone. It has other bits than the product with decoded
weights, for the kernel adds up in another order.
"""

from functools import cache

import numpy as np
import torch

from headrace.codec.codec import Codec, Parts
from headrace.codec.int4 import unpack
from headrace.codec.published.pack_quantized import PackQuantized
from headrace.codec.published.packed_loops import pack_blocks
from headrace.codec.row_pieces import on_all_cores

_aten = torch.ops.aten
_GROUPS = (32, 64, 128, 256)
_ROWS_MULTIPLE = 16  # the kernel takes outputs in such multiples
# The kernel takes so many outputs at a time, by the processor's instructions. Pieces of the most give the bytes of the whole.
_BLOCKS = (64, 32)
_BLOCK_ROWS = max(_BLOCKS)
_PIECE_ELEMENTS = 1 << 18
_INNER_TILES = 2  # the kernel for CPUs takes this argument of the one for GPUs, and ignores it


class PackedMatrix:
    """A matrix (outputs, inputs), packed for the kernel from its `parts` (`codec/published/pack_quantized.py`)."""

    def __init__(self, parts: Parts, group: int) -> None:
        words, scales = parts["weight_packed"], parts["weight_scale"]
        self.outputs, self.inputs, self.group = outputs, inputs, _ = len(words), scales.shape[1] * group, group
        self._packed = torch.empty((outputs, inputs // 2), dtype=torch.uint8)
        if block := _block_of_loop():
            _pack_by_loop(words, block, self._packed)
        else:
            _pack_by_torch(words, self._packed)
        # A code stands for (code - 8) * scale + zero. Torch's own copy would wait for its threads, which others use.
        sides = np.zeros((scales.shape[1], outputs, 2), np.int16)
        sides[:, :, 0] = scales.view(torch.int16).numpy().T
        self._sides = torch.from_numpy(sides).view(torch.bfloat16)

    @property
    def num_bytes(self) -> int:
        """Bytes that stay in memory."""
        return self._packed.nbytes + self._sides.nbytes

    def multiply(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return `inputs` (rows, inputs) bfloat16 times the transposed matrix: (rows, outputs)."""
        found: torch.Tensor = _aten._weight_int4pack_mm_for_cpu(inputs.contiguous(), self._packed, self.group, self._sides)
        return found


def is_packable(codec: Codec, rows: int, columns: int, dtype: torch.dtype) -> bool:
    """Return whether the kernel takes such a matrix: symmetric, with scales and values in bfloat16."""
    fits = isinstance(codec, PackQuantized) and codec.symmetric and codec.scales == "bfloat16" and dtype is torch.bfloat16
    group = codec.group or columns if isinstance(codec, PackQuantized) else 0
    return fits and group in _GROUPS and rows % _ROWS_MULTIPLE == 0 and has_packed_kernel()


def packed_bytes(rows: int, columns: int, group: int) -> int:
    """Return the bytes of a packed matrix."""
    return rows * columns // 2 + 4 * rows * (columns // (group or columns))


@cache
def has_packed_kernel() -> bool:
    """Return whether torch has a fast kernel for this processor: without AVX2 its own is a loop over single numbers."""
    names = ("_convert_weight_to_int4pack_for_cpu", "_weight_int4pack_mm_for_cpu")
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") and all(hasattr(_aten, name) for name in names)


@cache
def _block_of_loop() -> int:
    """Return the outputs that torch's kernel takes at a time here; 0 where the loop does not pack as torch does."""
    rows = _BLOCK_ROWS + 16  # whole blocks, then 16, 32 or 48 outputs
    for block in _BLOCKS:
        found = []
        for outputs in (rows, rows + 16, rows + 32):
            words = torch.randint(-(1 << 31), 1 << 31, (outputs, 20), generator=torch.Generator().manual_seed(outputs)).int()
            ways = torch.empty((2, outputs, 80), dtype=torch.uint8)
            _pack_by_torch(words, ways[0])
            _pack_by_loop(words, block, ways[1])
            found.append(torch.equal(*ways))
        if all(found):
            return block
    return 0


def _pack_by_torch(words: torch.Tensor, into: torch.Tensor) -> None:
    """Pack codes (`codec/int4.py`) into a matrix (outputs, inputs / 2) uint8, by torch's own function."""
    inputs = 2 * into.shape[1]
    step = _rows_of_a_piece(inputs)
    for start in range(0, len(words), step):
        codes = unpack(words[start : start + step], inputs).to(torch.int32)
        into[start : start + step] = _aten._convert_weight_to_int4pack_for_cpu(codes, _INNER_TILES)


def _pack_by_loop(words: torch.Tensor, block: int, into: torch.Tensor) -> None:
    """Pack likewise by the loop, on all cores."""
    codes, out = words.contiguous().view(torch.uint8).numpy(), into.view(-1).numpy().view(np.uint64)
    outputs, width = into.shape
    on_all_cores(lambda first, last: pack_blocks(codes, block, first, last, out), -(-outputs // block), 2 * width * block)


def _rows_of_a_piece(columns: int) -> int:
    return max(1, _PIECE_ELEMENTS // (_BLOCK_ROWS * columns)) * _BLOCK_ROWS
