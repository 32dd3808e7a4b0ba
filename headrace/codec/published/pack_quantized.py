"""compressed-tensors' `pack-quantized`: four bits a weight, a scale for each group of columns (`codec/int4.py` has the words).

Asymmetric codes also have a zero point for each group: four bits, packed along rows. Bits 4 k to 4 k + 3 of word i of a column
are the zero point of row 8 i + k. A weight is (code - zero point) times scale, rounded to the dtype of scales; without zero
points, they count as 8.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.codec.codec import Parts
from headrace.codec.grids import Int4Grid
from headrace.codec.int4 import pack, unpack
from headrace.codec.on_device import int4_to_bfloat16, triton_kernels
from headrace.codec.published.lines import SCALES, Lines
from headrace.codec.rounding import nearest
from headrace.codec.row_pieces import on_all_cores, piece_bytes, pieces, refuse_no_numbers
from headrace.machine.jit import compiled
from headrace.terms.coding import CodePart

_CODES_IN_A_WORD, _BITS, _ZERO = 8, 4, 8


@dataclass(frozen=True)
class PackQuantized:
    """`group` columns to a scale (0: the whole row) of dtype `scales`; with zero points, unless it is `symmetric`."""

    group: int
    scales: str = "bfloat16"
    symmetric: bool = True
    digest = None
    idempotent = False
    lossless = False

    @property
    def name(self) -> str:
        """The format and its parameters."""
        return f"pack-quantized:{self.group}:{self.scales}{'' if self.symmetric else ':zeros'}"

    def takes(self, rows: int, columns: int) -> bool:
        """Return whether the columns are whole groups, of an even number of columns each."""
        return columns % (self.group or columns) == 0 and (self.group or columns) % 2 == 0

    def places(self, rows: int, columns: int) -> tuple[CodePart, ...]:
        """Return words, scales, and words of zero points."""
        groups = columns // (self.group or columns)
        found = [
            CodePart("weight_packed", "int32", 4, (rows, -(-columns // _CODES_IN_A_WORD))),
            CodePart("weight_scale", self.scales, getattr(torch, self.scales).itemsize, (rows, groups)),
        ]
        if not self.symmetric:
            found.append(CodePart("weight_zero_point", "int32", 4, (-(-rows // _CODES_IN_A_WORD), groups)))
        return tuple(found)

    def encode(self, weights: Tensor) -> Parts:
        """Round to the nearest of sixteen steps around zero.

        Raises:
            ModelError: a weight is no finite number.
        """
        refuse_no_numbers(weights)
        dtype = getattr(torch, self.scales)
        rounded = nearest(weights.float()[None], Int4Grid(group=self.group or weights.shape[1], stored=dtype))
        scales = rounded.sides[0, :, :, 0].to(dtype)
        parts = {"weight_packed": pack(rounded.codes[0]), "weight_scale": scales}
        if not self.symmetric:
            zeros = torch.full((scales.shape[1], len(weights)), _ZERO, dtype=torch.uint8)
            parts["weight_zero_point"] = pack(zeros).T.contiguous()
        return parts

    def decode(self, parts: Parts, into: Tensor, rows: range) -> None:
        """Fill `into` with these rows."""
        words, scales = parts["weight_packed"], parts["weight_scale"]
        columns = into.shape[1]
        fast = into.dtype == scales.dtype == torch.bfloat16
        if fast and (kernels := triton_kernels(into.device)) is not None:
            int4_to_bfloat16(kernels, words, scales, parts.get("weight_zero_point"), into, rows)
            return
        if fast and into.device.type == "cpu":
            self._decode_on_host(parts, into, rows)
            return
        if into.device.type == "cpu" and (lines := self.lines(parts, columns)).decodes(into):
            lines.decode(into, rows.start)
            return
        for here, there in pieces(rows, columns):
            zeros = self._zeros(parts, here, scales)
            signed = unpack(words[here], columns).view(codes_shape(here, scales, columns)).to(torch.int8) - zeros[..., None]
            values = signed.to(scales.dtype) * scales[here][..., None]
            into[there].copy_(values.view(-1, columns))

    def _decode_on_host(self, parts: Parts, into: Tensor, rows: range) -> None:
        """Fill `into` with these rows, on all cores; weights and scales are bfloat16."""
        codes, out = parts["weight_packed"].view(torch.uint8).numpy(), into.view(torch.int16).numpy().view(np.uint16)
        scales = parts["weight_scale"]

        def decode(start: int, stop: int) -> None:
            for here, there in pieces(range(rows.start + start, rows.start + stop), into.shape[1]):
                zeros = self._zeros(parts, here, scales).numpy()
                place = out[start + there.start : start + there.stop]
                _decode_bfloat16(codes[here], scales[here].float().numpy(), zeros, place)

        on_all_cores(decode, len(rows), into.shape[1])

    def multiplies(self, rows: int, columns: int) -> bool:
        """Return whether loops multiply with such a matrix."""
        return columns % 2 == 0

    def lines(self, parts: Parts, columns: int) -> Lines:
        """Return what loops are told of a matrix on the host."""
        words, scales, group = parts["weight_packed"], parts["weight_scale"], self.group or columns
        sizes = (4 * words.shape[1], group, columns // group, SCALES[self.scales], int(not self.symmetric))
        given = (
            words.contiguous(),
            scales.contiguous(),
            *([] if self.symmetric else [parts["weight_zero_point"].contiguous()]),
        )
        return Lines("int4", len(words), columns, given, sizes, rounded=scales.dtype)

    def _zeros(self, parts: Parts, rows: slice, scales: Tensor) -> Tensor:
        """Return the zero points (rows, groups) int8 of these rows."""
        if self.symmetric:
            return torch.full((rows.stop - rows.start, scales.shape[1]), _ZERO, dtype=torch.int8, device=scales.device)
        index = torch.arange(rows.start, rows.stop, device=scales.device)
        words = parts["weight_zero_point"][index // _CODES_IN_A_WORD]
        return ((words >> (index % _CODES_IN_A_WORD * _BITS)[:, None]) & 0xF).to(torch.int8)

    def decoding_bytes(self, rows: int, columns: int, *, on_host: bool = True) -> int:
        """Return the bytes of a piece's codes, values and zero points."""
        return piece_bytes(rows, columns, 24)


def codes_shape(rows: slice, scales: Tensor, columns: int) -> tuple[int, int, int]:
    """Return the shape of the codes of some rows, group by group."""
    return rows.stop - rows.start, scales.shape[1], columns // scales.shape[1]


@compiled
def _decode_bfloat16(
    codes: NDArray[np.uint8], scales: NDArray[np.float32], zeros: NDArray[np.int8], out: NDArray[np.uint16]
) -> Any:
    """Multiply, and round to nearest even. `codes` have two in a byte, the lower half first."""
    rows, groups = scales.shape
    group = out.shape[1] // groups
    values = np.empty(group, np.float32)
    bits = values.view(np.uint32)
    for row in range(rows):
        for number in range(groups):
            scale, zero = scales[row, number], np.int32(zeros[row, number])
            start = number * group
            two = codes[row, start // 2 : (start + group) // 2]
            place = out[row, start : start + group]
            for index in range(group // 2):
                both = np.int32(two[index])
                values[2 * index] = np.float32((both & 15) - zero) * scale
                values[2 * index + 1] = np.float32((both >> 4) - zero) * scale
            for index in range(group):
                wide = bits[index]
                odd = (wide >> np.uint32(16)) & np.uint32(1)
                place[index] = np.uint16((wide + np.uint32(0x7FFF) + odd) >> np.uint32(16))
