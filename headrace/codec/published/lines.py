"""What loops are told of a coded matrix (`loops.py`), and the two ways to use it: decoding lines, and multiplying by them.

A *line* has one number for each input of an output. It is a row of the matrix, but for MXFP4, whose matrices are transposed.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numba import types
from torch import Tensor

from headrace.codec.codec import Parts
from headrace.codec.published import loops
from headrace.codec.published.loops import NUM_PARTS, NUM_SIZES, PARTS
from headrace.codec.row_pieces import on_all_cores
from headrace.machine.jit import callback
from headrace.machine.team import run_in_team

# A thread takes so many weights at a time, at least, and up to so many times.
_LEAST_WEIGHTS, _PARTS_OF_A_THREAD = 1 << 15, 4
# Matrices of fewer weights are decoded by torch: loading a loop's machine code would take longer.
_LEAST_DECODED = 1 << 16
# What the loops know scales by.
SCALES = {
    "float32": loops.FLOAT32,
    "bfloat16": loops.BFLOAT16,
    "float16": loops.FLOAT16,
    "float8_e8m0fnu": loops.EXPONENTS,
}
_Words = ctypes.c_int64 * (PARTS + 2 * NUM_PARTS + NUM_SIZES)


@runtime_checkable
class HasLines(Protocol):
    """A code that has loops."""

    def multiplies(self, rows: int, columns: int) -> bool:
        """Return whether its loops multiply with matrices of this shape."""

    def lines(self, parts: Parts, columns: int) -> "Lines | None":
        """Return what loops are told of a matrix on the host; None where there are none."""


@dataclass(frozen=True, slots=True)
class Lines:
    """`count` lines of `columns` numbers for the loops of a `kind`, which know `parts` (contiguous, on the host) and `sizes`.

    Numbers are those of float32, rounded to the dtype `rounded` first, if there is one. `across`: lines are the columns of the
    matrix.
    """

    kind: str
    count: int
    columns: int
    parts: Sequence[Tensor] = field(repr=False)
    sizes: Sequence[int]
    rounded: torch.dtype | None = None
    across: bool = False

    def decodes(self, into: Tensor) -> bool:
        """Return whether loops fill `into`."""
        return (
            into.dtype in (torch.bfloat16, torch.float16)
            and self.rounded in (None, into.dtype)
            and self.count * self.columns >= _LEAST_DECODED
        )

    def decode(self, into: Tensor, first: int) -> None:
        """Fill `into` (lines, columns) with lines from `first` on, on all cores."""
        fill, words, half, out = _fill(self.kind).address, self._words(), into.dtype is torch.float16, _bits(into)
        at = ctypes.addressof(words)
        on_all_cores(lambda start, stop: loops.decode(fill, at, first + start, half, out[start:stop]), *out.shape)

    def decode_across(self, into: Tensor, line: int, first: int) -> None:
        """Fill `into` (numbers, lines), contiguous, with the numbers from `first` on of the lines from number `line` on."""
        fill, words, half, out = _fill(self.kind).address, self._words(), into.dtype is torch.float16, _bits(into)
        given, (rows, columns) = (fill, ctypes.addressof(words), line, first, half, out), out.shape
        on_all_cores(lambda start, stop: loops.decode_across(*given, start, stop), columns, rows)

    def times(self, rows: Tensor) -> Tensor:
        """Return `rows` (rows, columns), float32 and contiguous, times the transpose of the lines: (rows, lines) float32."""
        out, words = torch.empty(len(rows), self.count, dtype=torch.float32), self._words()
        parts = torch.get_num_threads() * _PARTS_OF_A_THREAD
        step = max(self.count // parts, -(-_LEAST_WEIGHTS // self.columns), 1)
        addresses = rows.data_ptr(), out.data_ptr()
        words[:7] = (*addresses, len(rows), self.count, self.columns, step, _fill(self.kind).address)
        run_in_team(_product(), words, -(-self.count // step))
        return out

    def _words(self) -> Any:
        words, sizes = _Words(), PARTS + 2 * NUM_PARTS
        for place, part in enumerate(self.parts, PARTS):
            words[place], words[place + NUM_PARTS] = part.data_ptr(), part.nbytes
        words[sizes : sizes + len(self.sizes)] = [*self.sizes]
        return words


def _bits(into: Tensor) -> Any:
    return into.view(torch.int16).numpy().view(np.uint16)


@cache
def _fill(kind: str) -> Any:
    module = loops if hasattr(loops, f"fill_{kind}") else import_module("headrace.codec.published.gguf_loops")
    return callback(getattr(module, f"fill_{kind}"), *loops.FILL_ARGUMENTS)


@cache
def _product() -> Any:
    return callback(loops.multiply_lines, types.CPointer(types.int64))


@cache
def byte_pairs(upper_first: bool) -> Tensor:
    """Return the two codes (256, 2) of four bits in each byte."""
    every = torch.arange(256, dtype=torch.int64)
    return torch.stack([every >> 4, every & 15] if upper_first else [every & 15, every >> 4], dim=1)
