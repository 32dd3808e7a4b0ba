"""FP8 with a scale for each block of 128 rows and 128 columns (DeepSeek-V3; `quant_method: fp8` with `weight_block_size`).

A matrix has two parts: `weight` float8_e4m3fn (rows, columns) and `weight_scale_inv` float32 (row blocks, column blocks). A
weight is *multiplied* by the latter, in spite of its name.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.codec.codec import Parts
from headrace.codec.published.lines import SCALES, Lines
from headrace.codec.row_pieces import piece_bytes, pieces, refuse_no_numbers
from headrace.terms.coding import CodePart

_LARGEST = 448.0


@dataclass(frozen=True)
class Fp8Blocks:
    """Blocks of `block_rows` by `block_columns`, whose scales have the dtype `scales`."""

    block_rows: int = 128
    block_columns: int = 128
    scales: str = "float32"
    digest = None
    idempotent = False
    lossless = False

    @property
    def name(self) -> str:
        """The format and the sizes of its blocks."""
        return f"fp8:{self.block_rows}x{self.block_columns}:{self.scales}"

    def takes(self, rows: int, columns: int) -> bool:
        """Return whether it is a matrix at all: the last blocks may be smaller."""
        return rows > 0 and columns > 0

    def places(self, rows: int, columns: int) -> tuple[CodePart, ...]:
        """Return codes and scales."""
        blocks = -(-rows // self.block_rows), -(-columns // self.block_columns)
        size = getattr(torch, self.scales).itemsize
        return CodePart("weight", "float8_e4m3fn", 1, (rows, columns)), CodePart("weight_scale_inv", self.scales, size, blocks)

    def encode(self, weights: Tensor) -> Parts:
        """Scale each block so that its largest weight becomes the largest number of the code, and round.

        Raises:
            ModelError: a weight is no finite number.
        """
        refuse_no_numbers(weights)
        rows, columns = weights.shape
        filled = torch.nn.functional.pad(weights.float(), (0, -columns % self.block_columns, 0, -rows % self.block_rows))
        blocks = filled.view(-(-rows // self.block_rows), self.block_rows, -1, self.block_columns)
        largest = blocks.abs().amax(dim=(1, 3))
        scales = torch.where(largest > 0, largest / _LARGEST, 1.0).to(getattr(torch, self.scales))
        scales = torch.where(scales > 0, scales, torch.finfo(scales.dtype).tiny)
        codes = (blocks / scales.float()[:, None, :, None]).clamp(-_LARGEST, _LARGEST).view(filled.shape)[:rows, :columns]
        return {"weight": codes.contiguous().to(torch.float8_e4m3fn), "weight_scale_inv": scales}

    def decode(self, parts: Parts, into: Tensor, rows: range) -> None:
        """Fill `into` with these rows: products in float32, rounded once."""
        codes, scales = parts["weight"], parts["weight_scale_inv"]
        if into.device.type == "cpu" and (lines := self.lines(parts, into.shape[1])).decodes(into):
            lines.decode(into, rows.start)
            return
        for here, there in pieces(rows, into.shape[1]):
            index = torch.arange(here.start, here.stop, device=into.device) // self.block_rows
            wide = scales[index].float().repeat_interleave(self.block_columns, dim=1)[:, : into.shape[1]]
            into[there].copy_(codes[here].float() * wide)

    def multiplies(self, rows: int, columns: int) -> bool:
        """Return whether loops multiply with such a matrix."""
        return rows > 0 and columns > 0

    def lines(self, parts: Parts, columns: int) -> Lines:
        """Return what loops are told of a matrix on the host."""
        codes, scales = parts["weight"].contiguous(), parts["weight_scale_inv"].contiguous()
        sizes = columns, self.block_rows, self.block_columns, scales.shape[1], SCALES[self.scales]
        return Lines("fp8", len(codes), columns, (codes, scales), sizes)

    def decoding_bytes(self, rows: int, columns: int, *, on_host: bool = True) -> int:
        """Return the bytes of a piece's codes, scales and products in float32."""
        return piece_bytes(rows, columns + self.block_columns, 24)
