"""bitsandbytes' NF4 (Dettmers et al. 2023, QLoRA): four bits that name one of sixteen quantiles, and a scale for each block.

A matrix, flattened row after row, has three parts. `weight` uint8 has two codes to a byte, the *upper* half first. `quant_map`
float32 (16) has the values of the codes; `absmax` has the scale of each block of 64. Doubly quantised scales are uint8, and
stand for `nested_quant_map[code] * nested_absmax[block of 256] + nested_offset`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.codec.codec import Parts
from headrace.codec.published.lines import Lines, byte_pairs
from headrace.codec.row_pieces import piece_bytes, pieces, refuse_no_numbers
from headrace.terms.coding import CodePart

# QLoRA, appendix E.
# fmt: off
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)
# fmt: on


@dataclass(frozen=True)
class Nf4:
    """Blocks of `block` weights; scales are `nested` in blocks of `nested_block`, or float32. Values are rounded to `dtype`."""

    block: int = 64
    nested: bool = True
    nested_block: int = 256
    dtype: str = "bfloat16"
    digest = None
    idempotent = False
    lossless = False

    @property
    def name(self) -> str:
        """The format and the sizes of its blocks."""
        return f"nf4:{self.block}:{self.nested_block if self.nested else 0}:{self.dtype}"

    def takes(self, rows: int, columns: int) -> bool:
        """Return whether the number of weights is even: two lie in a byte."""
        return rows * columns % 2 == 0

    def places(self, rows: int, columns: int) -> tuple[CodePart, ...]:
        """Return codes, scales and tables."""
        number = rows * columns
        blocks = -(-number // self.block)
        found = [CodePart("weight", "uint8", 1, (number // 2, 1)), CodePart("quant_map", "float32", 4, (16,))]
        if not self.nested:
            return (*found, CodePart("absmax", "float32", 4, (blocks,)))
        return (
            *found,
            CodePart("absmax", "uint8", 1, (blocks,)),
            CodePart("nested_quant_map", "float32", 4, (256,)),
            CodePart("nested_absmax", "float32", 4, (-(-blocks // self.nested_block),)),
            CodePart("nested_offset", "float32", 4, (1,)),
        )

    def encode(self, weights: Tensor) -> Parts:
        """Round to the nearest quantile of the block's largest weight; nested scales to the nearest of 256 even steps.

        Raises:
            ModelError: a weight is no finite number.
        """
        refuse_no_numbers(weights)
        flat = weights.float().flatten()
        number = len(flat)
        sizes = torch.nn.functional.pad(flat, (0, -number % self.block)).view(-1, self.block).abs().amax(dim=1)
        parts = {"quant_map": torch.tensor(NF4, dtype=torch.float32)}
        if not self.nested:
            parts["absmax"] = sizes
        else:
            offset = sizes.mean()
            blocks = torch.nn.functional.pad(sizes - offset, (0, -len(sizes) % self.nested_block)).view(-1, self.nested_block)
            nested, table = blocks.abs().amax(dim=1), torch.linspace(-1, 1, 256, dtype=torch.float32)
            shares = blocks / torch.where(nested > 0, nested, 1.0)[:, None]
            codes = ((shares + 1) * 127.5).round().to(torch.uint8).flatten()[: len(sizes)]
            parts |= {"absmax": codes, "nested_quant_map": table, "nested_absmax": nested, "nested_offset": offset[None]}
            sizes = self._sizes(parts, torch.arange(len(sizes)))
        wide = sizes.repeat_interleave(self.block)[:number]
        shares = torch.where(wide != 0, flat / wide, 0.0).clamp(-1, 1)
        borders = (parts["quant_map"][1:] + parts["quant_map"][:-1]) / 2
        codes = torch.bucketize(shares, borders).to(torch.uint8)
        return parts | {"weight": (codes[0::2] << 4 | codes[1::2])[:, None]}

    def decode(self, parts: Parts, into: Tensor, rows: range) -> None:
        """Fill `into` with these rows: products in float32, rounded to the dtype that the weights had."""
        columns, packed = into.shape[1], parts["weight"].flatten()
        if columns % 2 == 0 and into.device.type == "cpu" and (lines := self.lines(parts, columns)).decodes(into):
            lines.decode(into, rows.start)
            return
        for here, there in pieces(rows, columns):
            index = torch.arange(here.start * columns, here.stop * columns, device=into.device)
            codes = (packed[index // 2] >> ((1 - index % 2) * 4).to(torch.uint8)) & 0xF
            values = parts["quant_map"][codes.to(torch.int32)] * self._sizes(parts, index // self.block)
            into[there].copy_(values.to(getattr(torch, self.dtype)).view(-1, columns))

    def multiplies(self, rows: int, columns: int) -> bool:
        """Return whether loops multiply with such a matrix."""
        return columns % 2 == 0

    def lines(self, parts: Parts, columns: int) -> Lines:
        """Return what loops are told of a matrix on the host, with an even number of columns."""
        packed, pairs = parts["weight"].contiguous(), parts["quant_map"][byte_pairs(upper_first=True)]
        given, sizes = [packed, parts["absmax"].contiguous(), pairs], [columns, self.block]
        if self.nested:
            tables = torch.cat([parts["nested_quant_map"], parts["nested_offset"]])
            given += [tables, parts["nested_absmax"].contiguous()]
            sizes += [self.nested_block, len(tables) - 1]
        return Lines("nf4", 2 * len(packed) // columns, columns, given, sizes, rounded=getattr(torch, self.dtype))

    def _sizes(self, parts: Parts, blocks: Tensor) -> Tensor:
        """Return the scales of `blocks`, given by their numbers."""
        if not self.nested:
            return parts["absmax"][blocks]
        shares = parts["nested_quant_map"][parts["absmax"][blocks].to(torch.int32)]
        return shares * parts["nested_absmax"][blocks // self.nested_block] + parts["nested_offset"]

    def decoding_bytes(self, rows: int, columns: int, *, on_host: bool = True) -> int:
        """Return the bytes of a piece's indices, codes, scales and values."""
        return piece_bytes(rows, columns, 72)
