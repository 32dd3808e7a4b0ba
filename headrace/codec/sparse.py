"""Weights most of which are zero: a bit for each says whether it is, and the others are stored as they are (Endor).

The form is that of Joo et al. 2024 (Endor, section 3): bitmap and numbers, nothing of which needs the rows before. Invariant:
every number comes back bit for bit, minus zero too; zero alone is left out. Equal weights make equal parts.

A matrix (rows, columns) has these parts:

    bitmap   uint8 (rows, columns / 8 up)   bit j of byte i: column 8 i + j has a number
    offsets  int32 (rows + 1)               where each row's numbers begin, from the first
    values   bfloat16 (count + 8)           row by row, columns ascending; the last eight are none
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.codec.codec import Parts
from headrace.codec.row_pieces import on_all_cores, piece_bytes, pieces, refuse_no_numbers
from headrace.codec.sparse_loops import SPARE, decode_sparse_rows
from headrace.terms.coding import CodePart
from headrace.terms.errors import ModelError

_MOST_WEIGHTS = 1 << 31


def _tables() -> tuple[NDArray[np.int64], NDArray[np.uint16]]:
    """Return for each byte how many bits are set below each place and in all, and all bits where one is set."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    below = np.zeros((256, 9), np.int64)
    np.cumsum(bits, axis=1, out=below[:, 1:])
    return below.reshape(-1), (bits.astype(np.uint16) * np.uint16(0xFFFF)).reshape(-1)


_TABLES = _tables()


@dataclass(frozen=True)
class Sparse:
    """The code. `count` is the number of numbers of the one matrix that it is for, if that is encoded already."""

    count: int | None = None
    name = "sparse"
    digest = None
    idempotent = True
    lossless = False

    def takes(self, rows: int, columns: int) -> bool:
        """Return whether it is a matrix whose numbers can be counted in 31 bits."""
        return columns > 1 and 0 < rows * columns < _MOST_WEIGHTS

    def places(self, rows: int, columns: int) -> tuple[CodePart, ...]:
        """Return the places of all parts, with room for a matrix without zeros, or for the known number."""
        room = rows * columns if self.count is None else self.count
        return (
            CodePart("offsets", "int32", 4, (rows + 1,)),
            CodePart("values", "bfloat16", 2, (room + SPARE,)),
            CodePart("bitmap", "uint8", 1, (rows, -(-columns // 8))),
        )

    def encode(self, weights: Tensor) -> Parts:
        """Return the parts of `weights`, rounded to bfloat16; what becomes zero, or is zero without a sign, is left out."""
        refuse_no_numbers(weights)
        bits = weights.to(torch.bfloat16).contiguous().view(torch.int16).numpy()
        kept = bits != 0
        offsets = np.zeros(len(bits) + 1, np.int32)
        np.cumsum(kept.sum(axis=1), out=offsets[1:])
        values = torch.from_numpy(np.append(bits[kept], np.zeros(SPARE, np.int16))).view(torch.bfloat16)
        bitmap = np.packbits(kept, axis=1, bitorder="little")
        return {"offsets": torch.from_numpy(offsets), "values": values, "bitmap": torch.from_numpy(bitmap)}

    def decode(self, parts: Parts, into: Tensor, rows: range) -> None:
        """Fill `into` with these rows: on the host by a loop on all cores, elsewhere by torch operations."""
        _check(parts, into.shape[1])
        if into.dtype is torch.bfloat16 and into.device.type == "cpu":
            self._refuse(_on_host(parts, into, rows), parts, into)
            return
        for here, there in pieces(rows, into.shape[1]):
            if into.device.type == "cpu":
                piece = torch.empty(here.stop - here.start, into.shape[1], dtype=torch.bfloat16)
                self._refuse(_on_host(parts, piece, range(here.start, here.stop)), parts, into)
                into[there].copy_(piece)
            else:
                self._refuse(in_torch(parts, into[there], range(here.start, here.stop)), parts, into)

    def decoding_bytes(self, rows: int, columns: int, *, on_host: bool = True) -> int:
        """Return the bytes of pieces that are decoded first; on a device, of bits, places and numbers, too."""
        return piece_bytes(rows, columns, 4 if on_host else 40) + (0 if on_host else 64 * rows)

    def _refuse(self, damaged: int | None, parts: Parts, into: Tensor) -> None:
        if damaged is not None:
            raise ModelError(
                f"{self.name}: row {damaged} of {len(parts['bitmap'])} is damaged: its bits do not count its numbers, or lie "
                f"beyond {into.shape[1]} columns; fetch or make the file again"
            )


def _on_host(parts: Parts, into: Tensor, rows: range) -> int | None:
    """Decode to bfloat16, and return the first row that is damaged."""
    bitmap, offsets = parts["bitmap"].numpy(), parts["offsets"].numpy()
    values, out = (tensor.view(torch.int16).numpy().view(np.uint16) for tensor in (parts["values"], into))

    def decode(start: int, stop: int) -> int:
        return int(decode_sparse_rows(bitmap, offsets, values, *_TABLES, out[start:stop], rows.start + start))

    return min((row for row in on_all_cores(decode, *out.shape) if row >= 0), default=None) if len(rows) else None


def in_torch(parts: Parts, into: Tensor, rows: range) -> int | None:
    """Decode a few rows in torch operations on any device; return the first that is damaged."""
    if not len(rows):
        return None
    columns, device = into.shape[1], into.device
    bounds = parts["offsets"][rows.start : rows.stop + 1].long()
    packed = parts["bitmap"][rows.start : rows.stop].int()
    bits = (packed[:, :, None] >> torch.arange(8, device=device)) & 1
    bits = bits.flatten(1).bool()
    counts = bits.sum(dim=1)
    begins, ends = bounds[:-1], bounds[1:]
    wrong = (begins < 0) | (ends - begins != counts) | (ends > parts["values"].numel() - SPARE) | bits[:, columns:].any(dim=1)
    if bool(wrong.any()):
        return rows.start + int(wrong.nonzero()[0])
    kept = bits[:, :columns]
    places = kept.cumsum(dim=1) - 1 + begins[:, None]
    numbers = parts["values"][places.clamp_(min=0)].to(into.dtype)
    into.copy_(torch.where(kept, numbers, 0))
    return None


def _check(parts: Parts, columns: int) -> None:
    """Refuse parts that are not those of one matrix of so many columns; what their numbers say is checked row by row."""
    rows = len(parts["offsets"]) - 1
    expected = (rows, -(-columns // 8))
    if parts["bitmap"].shape != expected or len(parts["values"]) < SPARE:
        raise ModelError(
            f"sparse: the bitmap should be of {expected} for {rows} rows of {columns}, found is "
            f"{tuple(parts['bitmap'].shape)}; fetch or make the file again"
        )
