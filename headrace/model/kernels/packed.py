"""Products of few rows with four-bit weights that stay packed: torch's kernel reads a quarter of the bytes of bfloat16.

Packing takes less time than decoding, or than reading packed weights from a drive would. So it is done once, for weights that
stay in memory, and packed ones are never stored. Their layout depends on torch's kernel and on the processor's instructions.
The loop that packs (`model/kernels/packed_loops.py`) is first compared with torch's own packing, which takes twenty times as
long. Where they differ, torch packs.

Invariant: the way of a product follows from the plan and from its shape alone. It has other bits than the product with decoded
weights, for the kernel adds up in another order.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

from headrace.codec import Parts
from headrace.codec.int4 import unpack
from headrace.codec.published import PackQuantized
from headrace.codec.row_pieces import on_all_cores
from headrace.model.directory.in_place import StoredUnit
from headrace.model.kernels.own_linear import OwnLinear
from headrace.model.kernels.packed_loops import pack_blocks
from headrace.model.stored.decoding import Decoding

_aten = torch.ops.aten
_GROUPS = (32, 64, 128, 256)
_ROWS_MULTIPLE = 16  # the kernel takes outputs in such multiples
# The kernel takes so many outputs at a time, by the processor's instructions. Pieces of the most give the bytes of the whole.
_BLOCKS = (64, 32)
_BLOCK_ROWS = max(_BLOCKS)
_PIECE_ELEMENTS = 1 << 18
_PACKING_BYTES_OF_AN_ELEMENT = 10  # by torch: a code as int32, as uint8 twice while it is unpacked, and packed twice
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


class PackedBlocks:
    """The packed matrices of blocks whose slots stay where they are, by the address of the decoded matrix in its slot.

    Products of up to `rows` rows go to the kernel, others to the decoded matrix.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._matrices: dict[int, PackedMatrix] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all packed matrices."""
        return sum(matrix.num_bytes for matrix in self._matrices.values())

    def add(self, unit: StoredUnit, read: torch.Tensor, slot: torch.Tensor) -> None:
        """Pack what can be packed of the bytes `read` (uint8), from which `slot` was decoded."""
        for decoding in packable(unit):
            parts = {name: place.of(read) for name, place in decoding.parts.items()}
            matrix = PackedMatrix(parts, _group(decoding))
            self._matrices[slot.data_ptr() + decoding.start * slot.itemsize] = matrix

    def find(self, inputs: torch.Tensor, weights: torch.Tensor) -> PackedMatrix | None:
        """Return the packed matrix for `inputs` (..., inputs) times the transpose of `weights` (outputs, inputs).

        It is None if there are too many rows, or `weights` are not packed.
        """
        matrix = self._matrices.get(weights.data_ptr())
        if matrix is None or inputs.dtype != torch.bfloat16 or tuple(weights.shape) != (matrix.outputs, matrix.inputs):
            return None
        return matrix if inputs.numel() <= self._rows * matrix.inputs else None


class PackedProducts(OwnLinear):
    """While entered, `linear` with the weights of `blocks` is computed with packed ones."""

    def __init__(self, blocks: PackedBlocks) -> None:
        self._blocks = blocks

    def take(self, inputs: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        """See `OwnLinear.take`."""
        if (matrix := self._blocks.find(inputs, weights)) is None:
            return None
        found = matrix.multiply(inputs.reshape(-1, matrix.inputs)).view(*inputs.shape[:-1], matrix.outputs)
        return found if bias is None else found.add_(bias)


def packable(unit: StoredUnit) -> Sequence[Decoding]:
    """Return the matrices of a unit that the kernel takes: whole parameters, symmetric, with scales and values in bfloat16."""
    whole = {spec.offset: spec.shape for spec in unit.layout.parameters}
    return [
        each
        for each in unit.decodings
        if isinstance(each.codec, PackQuantized)
        and each.codec.symmetric
        and each.codec.scales == "bfloat16"
        and each.dtype == torch.bfloat16
        and _group(each) in _GROUPS
        and each.rows % _ROWS_MULTIPLE == 0
        and whole.get(each.start) == (each.rows, each.columns)
    ]


def packed_bytes(unit: StoredUnit, dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes of a unit's packed matrices, and the most that packing one takes besides, for a moment.

    They are 0 where nothing is packed: no kernel here, or compute in another dtype than bfloat16. The loop takes nothing more.
    """
    found = packable(unit) if dtype == torch.bfloat16 and has_packed_kernel() else ()
    kept = sum(each.rows * each.columns // 2 + 4 * each.rows * (each.columns // _group(each)) for each in found)
    pieces = () if not found or _block_of_loop() else found
    making = max((min(each.rows, _rows_of_a_piece(each.columns)) * each.columns for each in pieces), default=0)
    return kept, _PACKING_BYTES_OF_AN_ELEMENT * making


@cache
def has_packed_kernel() -> bool:
    """Return whether torch has a fast kernel for this processor: without AVX2 its own is a loop over single numbers."""
    names = ("_convert_weight_to_int4pack_for_cpu", "_weight_int4pack_mm_for_cpu")
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") and all(hasattr(_aten, name) for name in names)


def _group(decoding: Decoding) -> int:
    assert isinstance(decoding.codec, PackQuantized), "asked of these alone"
    return decoding.codec.group or decoding.columns


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
