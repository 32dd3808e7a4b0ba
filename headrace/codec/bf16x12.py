"""Bfloat16 in twelve bits, every bit kept: a byte of sign and mantissa, and four bits of exponent from the row's base.

Exponents of a row's weights lie close together. Of the sixteen codes one stands for the exponent field 0 (zeros, denormal
numbers), the others for the fifteen fields above the row's base. Weights with other fields, NaN and infinity among them, are in
a list of *escapes* besides: column and field, row by row. Invariant: all 65,536 patterns of bfloat16 come back, wherever they
are; and equal weights make equal parts.

A matrix (rows, columns) has these parts:

    low             uint8 (rows, columns)              sign in bit 7, mantissa below
    high            uint8 (rows, columns / 2 up)       byte i: the codes of columns i (lower half) and columns / 2 up + i
    bases           uint8 (rows)                       code n > 0 is the exponent field base + n; at most 240
    escape_offsets  int32 (rows + 1)                   where each row's escapes begin, from the first number
    escapes         int32 (count + 1)                  column * 256 + field, columns ascending; the last number is no escape
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.codec.bf16x12_loops import decode_bf16x12_rows, encode_bf16x12_rows, escapes_by_row
from headrace.codec.codec import Parts
from headrace.codec.on_device import triton_kernels
from headrace.codec.row_pieces import on_all_cores, piece_bytes, pieces
from headrace.terms.coding import CodePart
from headrace.terms.errors import ModelError

# A column and a field lie in 31 bits; so does the place of an escape.
_MOST_COLUMNS, _MOST_WEIGHTS = 1 << 23, 1 << 31


@dataclass(frozen=True)
class Bf16x12:
    """The code. `escapes` is the number of escapes of the one matrix that it is for, if that is encoded already."""

    escapes: int | None = None
    name = "bf16x12"
    digest = None
    idempotent = True
    lossless = True

    def takes(self, rows: int, columns: int) -> bool:
        """Return whether rows, columns and escapes can be numbered in 31 bits."""
        return 0 < columns < _MOST_COLUMNS and 0 < rows * columns < _MOST_WEIGHTS

    def places(self, rows: int, columns: int) -> tuple[CodePart, ...]:
        """Return the places of all parts, with room for an escape for each weight, or for the known number."""
        room = rows * columns if self.escapes is None else self.escapes
        return (
            CodePart("escape_offsets", "int32", 4, (rows + 1,)),
            CodePart("escapes", "int32", 4, (room + 1,)),
            CodePart("low", "uint8", 1, (rows, columns)),
            CodePart("high", "uint8", 1, (rows, -(-columns // 2))),
            CodePart("bases", "uint8", 1, (rows,)),
        )

    def encode(self, weights: Tensor) -> Parts:
        """Return the parts of `weights`; those of another dtype are rounded to bfloat16."""
        rows, columns = weights.shape
        bits = _bits(weights.to(torch.bfloat16).contiguous())
        bases, counts = np.empty(rows, np.uint8), np.empty(rows, np.int64)
        on_all_cores(lambda start, stop: escapes_by_row(bits[start:stop], bases[start:stop], counts[start:stop]), rows, columns)
        offsets = np.zeros(rows + 1, np.int32)
        np.cumsum(counts, out=offsets[1:])
        low, high = np.empty((rows, columns), np.uint8), np.empty((rows, -(-columns // 2)), np.uint8)
        escapes = np.zeros(int(offsets[-1]) + 1, np.int32)

        def encode(start: int, stop: int) -> None:
            encode_bf16x12_rows(
                bits[start:stop], bases[start:stop], offsets[start:], low[start:stop], high[start:stop], escapes
            )

        on_all_cores(encode, rows, columns)
        parts = {"escape_offsets": offsets, "escapes": escapes, "low": low, "high": high, "bases": bases}
        return {name: torch.from_numpy(part) for name, part in parts.items()}

    def decode(self, parts: Parts, into: Tensor, rows: range) -> None:
        """Fill `into` with these rows, on all cores."""
        _check(parts, into.shape[1])
        if into.dtype is torch.bfloat16:
            self._decode(parts, into, rows)
            return
        for here, there in pieces(rows, into.shape[1]):
            piece = torch.empty(here.stop - here.start, into.shape[1], dtype=torch.bfloat16, device=into.device)
            self._decode(parts, piece, range(here.start, here.stop))
            into[there].copy_(piece)

    def _decode(self, parts: Parts, into: Tensor, rows: range) -> None:
        damaged = decode_on_device(parts, into, rows) if into.device.type != "cpu" else _decode_on_host(parts, into, rows)
        if damaged is not None:
            raise ModelError(
                f"{self.name}: row {damaged} of {len(parts['low'])} is damaged: its base or its escapes are no row's of "
                f"{into.shape[1]} weights; fetch or make the file again"
            )

    def decoding_bytes(self, rows: int, columns: int, *, on_host: bool = True) -> int:
        """Return the bytes of pieces that are decoded first; on a device without kernels, of their codes and fields, too."""
        return piece_bytes(rows, columns, 4 if on_host else 40) + (0 if on_host else 64 * rows)


def _decode_on_host(parts: Parts, into: Tensor, rows: range) -> int | None:
    """Decode, and return the first row that is damaged."""
    low, high, bases, offsets, escapes = (parts[name].numpy() for name in ("low", "high", "bases", "escape_offsets", "escapes"))
    out = _bits(into)

    def decode(start: int, stop: int) -> int:
        return int(decode_bf16x12_rows(low, high, bases, offsets, escapes, out[start:stop], rows.start + start))

    return min((row for row in on_all_cores(decode, *out.shape) if row >= 0), default=None)


def _check(parts: Parts, columns: int) -> None:
    """Refuse parts that are not those of one matrix of so many columns; what their numbers say is checked row by row."""
    rows = len(parts["low"])
    expected = {"low": (rows, columns), "high": (rows, -(-columns // 2)), "bases": (rows,), "escape_offsets": (rows + 1,)}
    for name, shape in expected.items():
        if parts[name].shape != shape:
            raise ModelError(
                f"bf16x12: part {name} should be of {shape} for {rows} rows of {columns}, found is "
                f"{tuple(parts[name].shape)}; fetch or make the file again"
            )


def _bits(weights: Tensor) -> Any:
    """Return the bits of bfloat16 numbers, which numpy does not know."""
    return weights.view(torch.int16).numpy().view(np.uint16)


_LARGEST_BASE = 240
_BLOCK = 256
_SOUND = (1 << 31) - 1


def decode_on_device(parts: Parts, into: Tensor, rows: range) -> int | None:
    """Fill `into` (len(rows), columns) bfloat16 with these rows; return the first row that is damaged, None if none is.

    On another device than the host: by Triton's kernels where they work, by torch operations elsewhere. Invariant: the result
    has the host's bits, and what the host refuses as damaged is refused here too.
    """
    if not len(rows):
        return None
    kernels = triton_kernels(into.device)
    return decode_in_torch(parts, into, rows) if kernels is None else by_kernels(kernels, parts, into, rows)


def by_kernels(kernels: Any, parts: Parts, into: Tensor, rows: range) -> int | None:
    """As `decode_on_device`, by the module of kernels: codes first, then the escapes over them."""
    low, high, bases, offsets, escapes = (
        parts[name].contiguous() for name in ("low", "high", "bases", "escape_offsets", "escapes")
    )
    damaged = torch.full((1,), _SOUND, dtype=torch.int32, device=into.device)
    bits, columns, half = into.view(torch.int16), into.shape[1], high.shape[1]
    kernels.bf16x12_codes[(len(rows), -(-columns // _BLOCK))](low, high, bases, bits, rows.start, columns, half, block=_BLOCK)
    known = escapes.numel() - 1
    kernels.bf16x12_escapes[len(rows),](
        low, bases, offsets, escapes, bits, damaged, known, rows.start, columns, largest=_LARGEST_BASE, block=_BLOCK
    )
    return None if (found := int(damaged)) == _SOUND else found


def decode_in_torch(parts: Parts, into: Tensor, rows: range) -> int | None:
    """As `decode_on_device`, in torch operations on any device."""
    columns, half = into.shape[1], parts["high"].shape[1]
    bounds = parts["escape_offsets"].long() - int(parts["escape_offsets"][0])
    known = parts["escapes"].numel() - 1
    for here, there in pieces(rows, columns):
        bases, starts, stops = parts["bases"][here].int(), bounds[here], bounds[here.start + 1 : here.stop + 1]
        wrong = (bases > _LARGEST_BASE) | (starts < 0) | (stops < starts) | (stops > known)
        if bool(wrong.any()):
            return int(here.start + wrong.nonzero()[0])
        packed, low = parts["high"][here].int(), parts["low"][here].int()
        codes = torch.cat([packed & 15, (packed >> 4)[:, : columns - half]], dim=1)
        fields = torch.where(codes > 0, codes + bases[:, None], 0)
        first, last = int(starts[0]), int(stops[-1])
        row = torch.repeat_interleave(torch.arange(len(bases), device=into.device), stops - starts)
        escapes = parts["escapes"][first:last].int()
        column = (escapes >> 8).long()
        wrong = (column < 0) | (column >= columns)
        wrong[1:] |= (column[1:] <= column[:-1]) & (row[1:] == row[:-1])
        if bool(wrong.any()):
            return int(here.start + row[wrong.nonzero()[0]])
        fields[row, column] = escapes & 255
        bits = ((low & 128) << 8) | (fields << 7) | (low & 127)
        into[there].view(torch.int16).copy_(bits.to(torch.int16))
    return None
