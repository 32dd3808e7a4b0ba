"""Four-bit weights that stay coded on a GPU: few rows are multiplied by Triton's kernels, more rows with a decoded matrix.

The layout of codes is made once, when a matrix comes to stay: words int32 (tiles, 16, outputs). A tile has 128 inputs; bits
4 j to 4 j + 3 of word (t, i, o) are the code of output o and input 128 t + 16 j + i. So neighbours in memory are neighbouring
outputs, and 16 inputs of a step come by one shift. Scales lie as (groups, outputs), zero
points as (groups, outputs / 8), eight to an int32. But for inputs that end within a tile, it takes the bytes of the files.
"""

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.codec import Parts
from headrace.codec.published import Mxfp4, PackQuantized

MOST_ROWS = 64
_TILE, _STEP = 128, 16
_BLOCK_OUTPUTS, _SUM_BLOCK = 64, 256
_PROGRAMS = 512  # enough for the multiprocessors of any card of one user; splits come from it, not from the card at hand
_TILES_OF_A_SPLIT = 4  # at least
_GROUPS = (32, 64, 128, 256)


@dataclass(frozen=True)
class CodedShape:
    """What the kernels need to know of a matrix: sizes and how its codes are read."""

    inputs: int
    outputs: int
    group: int
    microscaled: bool
    has_zeros: bool
    bfloat_scales: bool

    @property
    def tiles(self) -> int:
        """Tiles of inputs; the last may be short."""
        return -(-self.inputs // _TILE)

    @property
    def tiles_of_split(self) -> int:
        """Tiles whose sums one program adds up, whatever the number of rows."""
        blocks = -(-self.outputs // _BLOCK_OUTPUTS)
        return max(_TILES_OF_A_SPLIT, -(-self.tiles // max(1, _PROGRAMS // blocks)))

    @property
    def splits(self) -> int:
        """Partial sums of each number."""
        return -(-self.tiles // self.tiles_of_split)

    def kept_bytes(self) -> int:
        """Return the bytes that stay on the device."""
        groups = -(-self.inputs // self.group)
        sides = self.outputs * (1 if self.microscaled else 2) + (self.outputs // 2 if self.has_zeros else 0)
        return self.outputs * self.tiles * _STEP * 4 + groups * sides

    def workspace_bytes(self, rows: int) -> int:
        """Return the bytes of a product besides: partial sums of few rows, or the decoded matrix."""
        return 4 * self.splits * rows * self.outputs if rows <= MOST_ROWS else 2 * self.inputs * self.outputs


def shape_of(codec: object, rows: int, columns: int) -> CodedShape | None:
    """Return the shape of a coded matrix (rows, columns), None if the kernels do not read its code."""
    if isinstance(codec, Mxfp4) and rows == codec.inputs:  # a row has one input of all outputs
        return CodedShape(rows, columns, 32, microscaled=True, has_zeros=False, bfloat_scales=False)
    if isinstance(codec, PackQuantized) and codec.scales in ("bfloat16", "float16"):
        group = codec.group or columns
        if group in _GROUPS and columns % group == 0 and rows % 8 == 0:
            return CodedShape(columns, rows, group, False, not codec.symmetric, codec.scales == "bfloat16")
    return None


class DeviceMatrix:
    """A coded matrix on a device, in the kernels' layout. Its `parts` there are used up: it lies in their memory if it can."""

    def __init__(self, shape: CodedShape, parts: Parts, kernels: Any = None) -> None:
        self.shape = shape
        self._kernels = kernels or importlib.import_module("headrace.model.kernels.triton_products")
        if shape.microscaled:
            blocks, stored = parts["blocks"].view(shape.outputs, -1), parts["scales"].view(shape.outputs, -1)
            codes = blocks.contiguous().view(torch.int32)
        else:
            codes, stored = parts["weight_packed"].contiguous(), parts["weight_scale"]
        words = torch.empty((shape.tiles, _STEP, shape.outputs), dtype=torch.int32, device=codes.device)
        sizes = shape.outputs, codes.shape[1]
        grid = (-(-shape.outputs // _BLOCK_OUTPUTS), shape.tiles)
        self._kernels.words_in_tiles[grid](codes, words, *sizes, block_outputs=_BLOCK_OUTPUTS)
        self._words, self._scales = _in_place(codes, words), _in_place(stored, stored.T)
        points = parts.get("weight_zero_point")
        self._zeros = self._words if points is None else _in_place(points, points.T)  # any tensor: without points none is read

    @property
    def num_bytes(self) -> int:
        """Bytes that stay on the device."""
        return self._words.nbytes + self._scales.nbytes + (self._zeros.nbytes if self.shape.has_zeros else 0)

    def rows_times(self, rows: Tensor) -> Tensor:
        """Return `rows` (rows, inputs), bfloat16 or float16 and at most `MOST_ROWS`, times the matrix: (rows, outputs).

        Weights are rounded as the host decodes them, and sums are in float32, in an order that follows from the shape.
        """
        shape, count = self.shape, len(rows)
        partial = rows.new_empty((shape.splits, count, shape.outputs), dtype=torch.float32)
        out = rows.new_empty((count, shape.outputs))
        bfloat = rows.dtype == torch.bfloat16
        self._kernels.rows_times_coded[(-(-shape.outputs // _BLOCK_OUTPUTS), shape.splits)](
            _plain(rows.contiguous()),
            self._words,
            _plain(self._scales),
            self._zeros,
            partial,
            count,
            shape.inputs,
            shape.outputs,
            shape.tiles_of_split,
            **self._constants(bfloat=bfloat),
            native=rows.device.type != "cpu",
            block_rows=max(16, 1 << (count - 1).bit_length()),
            block_outputs=_BLOCK_OUTPUTS,
        )
        sizes = out.numel(), shape.splits
        constants = {"bfloat": bfloat, "block": _SUM_BLOCK, "enable_fp_fusion": False}
        self._kernels.sum_of_splits[(-(-sizes[0] // _SUM_BLOCK),)](partial, _plain(out), *sizes, **constants)
        return out

    def decode(self, into: Tensor, *, by_input: bool) -> None:
        """Fill `into`, (inputs, outputs) with `by_input` and (outputs, inputs) without, with the host's bits."""
        shape = self.shape
        self._kernels.coded_to_dense[(-(-shape.outputs // _BLOCK_OUTPUTS), shape.tiles)](
            self._words,
            _plain(self._scales),
            self._zeros,
            _plain(into),
            shape.inputs,
            shape.outputs,
            **self._constants(bfloat=into.dtype == torch.bfloat16),
            by_input=by_input,
            block_outputs=_BLOCK_OUTPUTS,
        )

    def _constants(self, *, bfloat: bool) -> dict[str, Any]:
        shape = self.shape
        return {
            "group": shape.group,
            "microscaled": shape.microscaled,
            "has_zeros": shape.has_zeros,
            "bfloat_scales": shape.bfloat_scales,
            "bfloat": bfloat,
            "enable_fp_fusion": False,
        }


def _in_place(old: Tensor, new: Tensor) -> Tensor:
    """Return `new`, contiguous, in the memory of `old` if they are of one size."""
    if old.nbytes != new.nbytes or not old.is_contiguous():
        return new.contiguous()
    found = old.view(-1).view(new.dtype).view(new.shape)
    return found.copy_(new.clone(memory_format=torch.contiguous_format))


def _plain(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
