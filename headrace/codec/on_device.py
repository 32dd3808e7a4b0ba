"""Decoding on another device than the host: by Triton's kernels where they work, by torch operations elsewhere.

Invariant: the result has the host's bits, and what the host refuses as damaged is refused here too. For that the host waits for
the device once for each matrix.
"""

import functools
import importlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from headrace.codec.codec import Parts
from headrace.codec.dictionary import MOST_PAIRS, Dictionary
from headrace.codec.row_pieces import pieces
from headrace.terms.errors import ModelError

# Words that torch operations expand at once, and the bytes that each takes for its 28 lanes: places, symbols, values, masks.
_PIECE_WORDS = 1 << 12
_WORD_BYTES = 2048
_TABLE_BYTES = 1 << 20
_WEIGHTS_OF_A_WORD = 2 * MOST_PAIRS
_CHUNK, _INT4_BLOCK = 64, 128
_SOUND = (1 << 31) - 1

Kernels = Any


@functools.cache
def triton_kernels(device: torch.device) -> Kernels | None:
    """Return the module of kernels if Triton compiles for `device` and the result computes correctly; None otherwise.

    Triton may be missing, may not know the device, or may lack a C compiler for its launcher: trying it finds all of that.
    """
    if device.type != "cuda":
        return None
    try:
        kernels = importlib.import_module("headrace.codec.triton_kernels")
        words = torch.tensor([[0x76543210]], dtype=torch.int32, device=device)
        into = torch.zeros(1, 8, dtype=torch.bfloat16, device=device)
        int4_to_bfloat16(kernels, words, torch.ones(1, 1, dtype=torch.bfloat16, device=device), None, into, range(1))
        return kernels if into.tolist() == [[float(code - 8) for code in range(8)]] else None
    except Exception:  # whatever an incomplete compiler may raise
        return None


def words_to_dense(kernels: Kernels, dictionary: Dictionary, parts: Parts, into: Tensor, rows: range) -> None:
    """Fill `into` (len(rows), columns) with these rows of a `WordsCodec`'s parts, by a kernel.

    Raises:
        ModelError: a row's words do not make it.
    """
    if not len(rows):
        return
    damaged = torch.full((1,), _SOUND, dtype=torch.int32, device=into.device)
    arguments = _word_arguments(dictionary, parts, into.device)
    codes = parts["codes"].numel()
    kernels.words_to_dense[len(rows),](*arguments, into, damaged, codes, rows.start, into.shape[1], chunk=_CHUNK)
    _refuse_damaged(int(damaged), parts, into.shape[1])


def int4_to_bfloat16(kernels: Kernels, words: Tensor, scales: Tensor, zeros: Tensor | None, into: Tensor, rows: range) -> None:
    """Fill `into` (len(rows), columns) bfloat16 with these rows of `pack-quantized` words, bfloat16 scales and zero points."""
    if not len(rows):
        return
    grid = (len(rows), -(-words.shape[1] // _INT4_BLOCK))
    sizes = rows.start, into.shape[1], words.shape[1], scales.shape[1]
    others = words if zeros is None else zeros.contiguous()  # where there are none, any tensor: it is not read
    bits = into.view(torch.int16)
    kernels.int4_to_bfloat16[grid](
        words.contiguous(), scales.contiguous(), others, bits, *sizes, has_zeros=zeros is not None, block=_INT4_BLOCK
    )


def words_in_torch(dictionary: Dictionary, parts: Parts, into: Tensor, rows: range) -> None:
    """As `words_to_dense`, in torch operations on any device.

    Raises:
        ModelError: a row's words do not make it.
    """
    columns, device = into.shape[1], into.device
    offsets = parts["row_offsets"][rows.start : rows.stop + 1].long()
    known = offsets.tolist()
    for number, (begin, end) in enumerate(itertools.pairwise(known)):
        if not 0 <= begin <= end <= parts["codes"].numel():
            _refuse_damaged(rows.start + number, parts, columns)
    table = dictionary.on(device).view(-1, 2)
    lane = torch.arange(_WEIGHTS_OF_A_WORD, dtype=torch.int32, device=device)
    shift = 4 + 2 * (lane % MOST_PAIRS)
    for start, stop in _pieces_of_words(known):
        own = offsets[start : stop + 1] - offsets[start]
        words = parts["codes"].view(torch.int16)[known[start] : known[stop]].int() & 0xFFFF
        halves = table[words]
        length = 2 * (halves[:, 0] & 15)
        after = torch.nn.functional.pad(length.cumsum(0), (1, 0))
        made = after[own[1:]] - after[own[:-1]]
        wrong = (made != columns) & (made != columns + columns % 2)
        if bool(wrong.any()):
            _refuse_damaged(rows.start + start + int(wrong.nonzero()[0]), parts, columns)
        row = torch.repeat_interleave(torch.arange(stop - start, device=device), own.diff())
        column = (after[:-1] - after[own[:-1]][row])[:, None] + lane
        inside = (lane < length[:, None]) & (column < columns)
        symbol = (halves.repeat_interleave(MOST_PAIRS, dim=1) >> shift) & 3
        levels = parts["levels"][rows.start + start : rows.start + stop].to(into.dtype)
        low, high = (levels[:, side][row][:, None] for side in (0, 1))
        values = torch.where(symbol == 1, low, torch.where(symbol == 2, high, 0))
        into[start:stop].view(-1)[(row[:, None] * columns + column)[inside]] = values[inside]


def trits_in_torch(table: Tensor, parts: Parts, into: Tensor, rows: range) -> None:
    """Fill `into` with these rows of a `TritsCodec`'s parts: `table` (243, 5) has the digits of each byte.

    Raises:
        ModelError: a byte does not stand for five digits.
    """
    table, columns = table.to(into.device), into.shape[1]
    for here, there in pieces(rows, columns):
        trits = parts["trits"][here].int()
        wrong = (trits >= len(table)).any(dim=1)
        if bool(wrong.any()):
            _refuse_damaged(here.start + int(wrong.nonzero()[0]), parts, columns)
        symbols = table[trits].flatten(1)[:, :columns]
        low, high = (parts["levels"][here, side].to(into.dtype)[:, None] for side in (0, 1))
        into[there].copy_(torch.where(symbols == 1, low, torch.where(symbols == 2, high, 0)))


def words_bytes(rows: int, columns: int) -> int:
    """Return the most bytes that decoding words allocates on a device, with the dictionary's table, which stays there."""
    longest = -(-columns // 2)
    return _TABLE_BYTES + min(rows * longest, max(_PIECE_WORDS, longest)) * _WORD_BYTES + 32 * rows + 4096


def refuse_damaged(row: int, rows: int, columns: int) -> None:
    """Raise the error for a row whose code does not yield its columns.

    Raises:
        ModelError: always.
    """
    raise ModelError(
        f"ternary weights: row {row} of {rows} is damaged, its code does not make {columns} weights; fetch or make the file "
        "again"
    )


def _refuse_damaged(row: int, parts: Parts, columns: int) -> None:
    if row != _SOUND:
        refuse_damaged(row, len(parts["levels"]), columns)


def _word_arguments(dictionary: Dictionary, parts: Parts, device: torch.device) -> tuple[Tensor, ...]:
    codes, offsets, levels = (parts[name].contiguous() for name in ("codes", "row_offsets", "levels"))
    return codes.view(torch.int16), offsets, dictionary.on(device), levels


def _pieces_of_words(offsets: list[int]) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows of `_PIECE_WORDS` words at most, or of one row."""
    start = 0
    for stop in range(1, len(offsets)):
        if stop == len(offsets) - 1 or offsets[stop + 1] - offsets[start] > _PIECE_WORDS:
            yield start, stop
            start = stop
