"""Decoding `bf16x12` on another device than the host: by Triton's kernels where they work, by torch operations elsewhere.

Invariant: the result has the host's bits, and what the host refuses as damaged is refused here too.
"""

from typing import Any

import torch
from torch import Tensor

from headrace.codec.codec import Parts
from headrace.codec.on_device import triton_kernels
from headrace.codec.row_pieces import pieces

_LARGEST_BASE = 240
_BLOCK = 256
_SOUND = (1 << 31) - 1


def decode_on_device(parts: Parts, into: Tensor, rows: range) -> int | None:
    """Fill `into` (len(rows), columns) bfloat16 with these rows; return the first row that is damaged, None if none is."""
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
