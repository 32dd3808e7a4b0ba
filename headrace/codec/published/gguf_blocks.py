"""The blocks of GGUF, in which llama.cpp's models are published: Q8_0, Q4_0 to Q5_1, Q2_K to Q6_K, IQ4_NL.

A matrix has one part: `blocks` uint8 (rows, bytes of a row), block after block as in the file. Some files have rows in another
order than the model; then `order` int32 (rows) says which row of the file is which row of the model. Numbers of 16 and 32 bits
are blocks of one number, for such files alone.

Values are those of the package `gguf` in float32, bit for bit: the operations are the same, in the same order.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.codec.codec import Parts
from headrace.codec.published.lines import Lines
from headrace.codec.row_pieces import piece_bytes, pieces, refuse_no_numbers
from headrace.terms.coding import CodePart
from headrace.terms.errors import ModelError

_BYTES_OF_AN_ELEMENT = 32


@dataclass(frozen=True)
class GgufBlocks:
    """Blocks of type `kind`; `ordered`: rows of the file have another order."""

    kind: str
    ordered: bool = False
    digest = None
    idempotent = False
    lossless = False

    @property
    def name(self) -> str:
        """The format and the type of its blocks."""
        return f"gguf:{self.kind}{':ordered' if self.ordered else ''}"

    def takes(self, rows: int, columns: int) -> bool:
        """Return whether rows are whole blocks."""
        return columns % BLOCKS[self.kind].numbers == 0

    def places(self, rows: int, columns: int) -> tuple[CodePart, ...]:
        """Return the blocks, and the order of rows."""
        block = BLOCKS[self.kind]
        blocks = CodePart("blocks", "uint8", 1, (rows, columns // block.numbers * block.num_bytes))
        return (blocks, CodePart("order", "int32", 4, (rows,))) if self.ordered else (blocks,)

    def encode(self, weights: Tensor) -> Parts:
        """Round as the package `gguf` does.

        Raises:
            ModelError: a weight is no finite number, or files of this type are only read.
        """
        refuse_no_numbers(weights)
        parts = {"blocks": _to_q8_0(weights) if self.kind == "Q8_0" else self._by_package(weights)}
        return parts | {"order": torch.arange(len(weights), dtype=torch.int32)} if self.ordered else parts

    def _by_package(self, weights: Tensor) -> Tensor:
        from gguf import GGMLQuantizationType, quants  # late: an extra

        try:
            blocks = quants.quantize(weights.float().numpy(), GGMLQuantizationType[self.kind])
        except NotImplementedError as error:
            raise ModelError(f"{self.name} is only read: the package gguf does not write it") from error
        return torch.from_numpy(np.ascontiguousarray(blocks).view(np.uint8))

    def decode(self, parts: Parts, into: Tensor, rows: range) -> None:
        """Fill `into` with these rows: float32, rounded once."""
        block = BLOCKS[self.kind]
        lines = self.lines(parts, into.shape[1]) if into.device.type == "cpu" else None
        if lines is not None and lines.decodes(into):
            lines.decode(into, rows.start)
            return
        for here, there in pieces(rows, into.shape[1]):
            found = parts["blocks"][parts["order"][here].long()] if self.ordered else parts["blocks"][here]
            into[there].copy_(block.values(found.reshape(-1, block.num_bytes)).view(-1, into.shape[1]))

    def multiplies(self, rows: int, columns: int) -> bool:
        """Return whether loops multiply with such a matrix."""
        return rows > 1 and self.kind in RUNS

    def lines(self, parts: Parts, columns: int) -> Lines | None:
        """Return what loops are told of a matrix on the host; None for blocks of one number, which have no loops."""
        if self.kind not in RUNS:
            return None
        blocks = parts["blocks"].contiguous()
        given = (blocks, parts["order"].contiguous()) if self.ordered else (blocks,)
        return Lines(self.kind.lower(), len(blocks), columns, given, (blocks.shape[1], int(self.ordered), RUNS[self.kind]))

    def decoding_bytes(self, rows: int, columns: int, *, on_host: bool = True) -> int:
        """Return the bytes of a piece's blocks, codes and values."""
        return piece_bytes(rows, columns, _BYTES_OF_AN_ELEMENT) + 4096


def _half(blocks: Tensor) -> Tensor:
    """Return two bytes of each block as float32 (blocks, 1)."""
    return blocks.contiguous().view(torch.float16).float()


def _nibbles(codes: Tensor, apart: int) -> Tensor:
    """Return the lower halves of each `apart` bytes, then the upper ones: (blocks, numbers)."""
    lines = codes.reshape(len(codes), -1, 1, apart)
    return torch.cat([lines & 15, lines >> 4], dim=2).flatten(1)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float() * _half(blocks[:, :2])


# What the codes of IQ4_NL stand for.
_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _to_q8_0(weights: Tensor) -> Tensor:
    """Return the bytes (rows, bytes of a row) of weights; codes are rounded to the nearest, of two away from zero."""
    blocks = weights.float().reshape(-1, 32)
    scale = blocks.abs().amax(dim=1, keepdim=True) / 127
    scaled = blocks * torch.where(scale == 0, 0.0, 1 / scale)
    size = scaled.abs()
    codes = scaled.sign() * (size.floor() + (2 * (size - size.floor())).floor())
    return torch.cat([scale.half().view(torch.uint8), codes.to(torch.int8).view(torch.uint8)], dim=1).view(len(weights), -1)


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks[:, :2]) * (_nibbles(blocks[:, 2:], 16).to(torch.int8) - 8).float()


def _scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eight scales and minima, six bits each, that 12 bytes hold, as float32 (blocks, 8)."""
    scale, least, upper = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([scale & 0x3F, (upper & 0x0F) | ((scale >> 2) & 0x30)], dim=1)
    minima = torch.cat([least & 0x3F, (upper >> 4) | ((least >> 2) & 0x30)], dim=1)
    return scales.float(), minima.float()


def _with_minima(blocks: Tensor, codes: Tensor) -> Tensor:
    scales, minima = _scales(blocks[:, 4:16])
    scale, least = _half(blocks[:, :2]) * scales, _half(blocks[:, 2:4]) * minima
    return (scale[:, :, None] * codes.float().view(len(blocks), 8, 32) - least[:, :, None]).flatten(1)


def _q4_k(blocks: Tensor) -> Tensor:
    return _with_minima(blocks, _nibbles(blocks[:, 16:], 32))


def _q5_k(blocks: Tensor) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)[None, :, None]
    upper = (blocks[:, None, 16:48] >> shifts & 1).flatten(1)
    return _with_minima(blocks, _nibbles(blocks[:, 48:], 32) | upper << 4)


def _q6_k(blocks: Tensor) -> Tensor:
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[None, None, :, None]
    upper = (blocks[:, 128:192].reshape(len(blocks), 2, 1, 32) >> shifts & 3).flatten(1)
    codes = (_nibbles(blocks[:, :128], 64) | upper << 4).to(torch.int8) - 32
    scales = _half(blocks[:, 208:]) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    return (scales[:, :, None] * codes.float().view(len(blocks), 16, 16)).flatten(1)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks[:, :2]) * _nibbles(blocks[:, 4:], 16).float() + _half(blocks[:, 2:4])


def _fives(blocks: Tensor, upper_at: int) -> Tensor:
    """Return codes of five bits, uint8 (blocks, 32): the upper bit of each lies in four bytes at `upper_at`."""
    upper = _bits(blocks[:, upper_at : upper_at + 4, None], 1).flatten(1)
    return _nibbles(blocks[:, upper_at + 4 :], 16) | upper << 4


def _q5_0(blocks: Tensor) -> Tensor:
    return _half(blocks[:, :2]) * (_fives(blocks, 2).to(torch.int8) - 16).float()


def _q5_1(blocks: Tensor) -> Tensor:
    return _half(blocks[:, :2]) * _fives(blocks, 4).float() + _half(blocks[:, 2:4])


def _iq4_nl(blocks: Tensor) -> Tensor:
    table = torch.tensor(_LEVELS, dtype=torch.float32, device=blocks.device)
    return _half(blocks[:, :2]) * table[_nibbles(blocks[:, 2:], 16).to(torch.int32)]


def _q2_k(blocks: Tensor) -> Tensor:
    sides = _half(blocks[:, 80:82]) * (blocks[:, :16] & 15).float(), _half(blocks[:, 82:84]) * (blocks[:, :16] >> 4).float()
    codes = _bits(blocks[:, 16:80].reshape(-1, 2, 1, 32), 2, dim=2).view(-1, 16, 16).float()
    return (sides[0][..., None] * codes - sides[1][..., None]).flatten(1)


def _q3_k(blocks: Tensor) -> Tensor:
    lower = _bits(blocks[:, None, 96:104], 4, dim=1).flatten(1)
    scales = (lower | _bits(blocks[:, None, 104:108], 2, dim=1).flatten(1) << 4).to(torch.int8) - 32
    upper = _bits(blocks[:, None, :32], 1, dim=1).flatten(1) ^ 1  # a bit that is set takes nothing away
    codes = _bits(blocks[:, 32:96].reshape(-1, 2, 1, 32), 2, dim=2).flatten(1).to(torch.int8) - (upper << 2).to(torch.int8)
    return ((_half(blocks[:, 108:]) * scales.float())[..., None] * codes.view(-1, 16, 16).float()).flatten(1)


def _bits(numbers: Tensor, width: int, dim: int = -1) -> Tensor:
    """Return the parts of `width` bits of bytes, the lowest first, along dimension `dim`, which has the size one."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=numbers.device)
    shape = [1] * numbers.dim()
    shape[dim] = -1
    return numbers >> shifts.view(shape) & ((1 << width) - 1)


def _bf16(blocks: Tensor) -> Tensor:
    return blocks.contiguous().view(torch.bfloat16).float()


def _f32(blocks: Tensor) -> Tensor:
    return blocks.contiguous().view(torch.float32)


@dataclass(frozen=True)
class BlockFormat:
    """So many numbers in so many bytes. `values` gives those of blocks (blocks, bytes) uint8, as float32 (blocks, numbers)."""

    numbers: int
    num_bytes: int
    values: Callable[[Tensor], Tensor]


# Numbers that loops make at once; told to them, or the compiler would not use vectors for so few.
RUNS = {"Q8_0": 32, "Q4_0": 16, "Q4_K": 32, "Q5_K": 32, "Q6_K": 16}
BLOCKS = {
    "Q8_0": BlockFormat(32, 34, _q8_0),
    "Q4_0": BlockFormat(32, 18, _q4_0),
    "Q4_K": BlockFormat(256, 144, _q4_k),
    "Q5_K": BlockFormat(256, 176, _q5_k),
    "Q6_K": BlockFormat(256, 210, _q6_k),
    "Q4_1": BlockFormat(32, 20, _q4_1),
    "Q5_0": BlockFormat(32, 22, _q5_0),
    "Q5_1": BlockFormat(32, 24, _q5_1),
    "IQ4_NL": BlockFormat(32, 18, _iq4_nl),
    "Q2_K": BlockFormat(256, 84, _q2_k),
    "Q3_K": BlockFormat(256, 110, _q3_k),
    "F16": BlockFormat(1, 2, _half),
    "BF16": BlockFormat(1, 2, _bf16),
    "F32": BlockFormat(1, 4, _f32),
}
