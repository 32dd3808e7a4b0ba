"""Ternary weights: each row has three values (its least, zero, its largest), in less than a bit, or five to a byte.

There are two codes of the same weights (Frantar and Alistarh 2023, QMoE). `WordsCodec` has 16-bit words of a dictionary: 0.6 to
1.1 bits a weight if most are zero. `TritsCodec` has five weights in a byte, always 1.6 bits. Ternary weights are decoded
exactly: a row keeps both values as bfloat16. Encoding other weights rounds them: a weight beyond half of the row's least or
largest value becomes that value, others become zero.

Invariant: a weight is compared with zero first. A row without negative weights has a least value of zero, and its zeros are
still coded as zeros. QMoE's own packing takes them for the least value, so such a row loses its compression.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.codec.codec import Parts
from headrace.codec.dictionary import Dictionary
from headrace.codec.on_device import (
    refuse_damaged,
    triton_kernels,
    trits_in_torch,
    words_bytes,
    words_in_torch,
    words_to_dense,
)
from headrace.codec.row_pieces import piece_bytes
from headrace.codec.ternary_loops import PADDED_LANES, decode_last_words, decode_trits, decode_words, encode_words
from headrace.terms.coding import CodePart
from headrace.terms.errors import ModelError

TRITS = 5
_BITS: dict[int, Any] = {2: np.uint16, 4: np.uint32}


def symbols_of(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the symbols (rows, columns) uint8 of weights, and the levels (rows, 2) bfloat16: each row's least and largest.

    Raises:
        ModelError: a weight is no finite number, or beyond bfloat16.
    """
    least, most = weights.amin(dim=1).clamp(max=0), weights.amax(dim=1).clamp(min=0)
    levels = torch.stack([least, most], dim=1).to(torch.bfloat16)
    if not bool(torch.isfinite(levels).all()):
        raise ModelError("weights to be coded hold NaN or infinity, or numbers beyond bfloat16")
    halves = levels.to(weights.dtype) / 2
    low = (weights < halves[:, :1]) & (levels[:, :1] < 0)
    high = (weights > halves[:, 1:]) & (levels[:, 1:] > 0)
    return low.to(torch.uint8) | (high.to(torch.uint8) << 1), levels


class TernaryCodec:
    """What both codes share; subclasses turn `symbols` into parts of their own beside `levels`."""

    name: str
    digest: str | None = None
    idempotent = True
    lossless = False

    def takes(self, rows: int, columns: int) -> bool:
        """Return whether it is a matrix: a vector would be one row, of which only two values would remain."""
        return rows > 1 and columns > 1

    def encode(self, weights: Tensor) -> Parts:
        """Return the parts of `weights` rounded to each row's least and largest value, and zero."""
        return self.encode_symbols(*symbols_of(weights))

    def encode_symbols(self, symbols: Tensor, levels: Tensor) -> Parts:
        """Return the parts of symbols (rows, columns) uint8: 0 is zero, 1 and 2 the first and second of `levels` (rows, 2)."""
        raise NotImplementedError

    def decode(self, parts: Parts, into: Tensor, rows: range) -> None:
        """Fill `into` with the levels for which the symbols of these rows stand."""
        self._check(parts, into.shape[1])
        if into.device.type != "cpu":
            self._decode_on_device(parts, into, rows)
            return
        levels = _bits(parts["levels"].to(into.dtype))
        damaged = self._loop(parts)(levels, _bits(into), rows.start) if len(rows) else -1
        if damaged >= 0:
            refuse_damaged(int(damaged), len(parts["levels"]), into.shape[1])

    def decoding_bytes(self, rows: int, columns: int, *, on_host: bool = True) -> int:
        """Return the bytes of levels in another dtype; on the host, nothing else is allocated."""
        return 16 * rows + 4096 if on_host else self._device_bytes(rows, columns)

    def _device_bytes(self, rows: int, columns: int) -> int:
        raise NotImplementedError

    def _loop(self, parts: Parts) -> Callable[..., int]:
        raise NotImplementedError

    def _decode_on_device(self, parts: Parts, into: Tensor, rows: range) -> None:
        raise NotImplementedError

    def _check(self, parts: Parts, columns: int) -> None:
        raise NotImplementedError


class WordsCodec(TernaryCodec):
    """Words of 16 bits from a `dictionary`. Parts: `codes` uint16, all rows'; `row_offsets` int32 (rows + 1); `levels`."""

    def __init__(self, dictionary: Dictionary, num_words: int | None = None) -> None:
        """`num_words` is the number of words of the one matrix that it is for, if that is encoded already."""
        self.dictionary, self._num_words = dictionary, num_words
        self.name = f"ternary-{dictionary.zeros}-{dictionary.digest[:8]}"
        self.digest = dictionary.digest
        self._lanes = dictionary.lanes.reshape(-1)

    def places(self, rows: int, columns: int) -> tuple[CodePart, ...]:
        """Return room for a word for each pair, ten times what a matrix of mostly zeros takes; or for the known number."""
        room = rows * (-(-columns // 2)) if self._num_words is None else self._num_words
        return (
            CodePart("codes", "uint16", 2, (room,)),
            CodePart("row_offsets", "int32", 4, (rows + 1,)),
            CodePart("levels", "bfloat16", 2, (rows, 2)),
        )

    def encode_symbols(self, symbols: Tensor, levels: Tensor) -> Parts:
        """Parse each row greedily, which gives the fewest words.

        Raises:
            ModelError: more than 2^31 words.
        """
        rows, columns = symbols.shape
        room = rows * (-(-columns // 2))
        if room >= 1 << 31:
            raise ModelError(f"a matrix of {rows} x {columns} weights may take 2^31 words; code it in parts of fewer rows")
        words, offsets = np.empty(room, np.uint16), np.empty(rows + 1, np.int32)
        count = encode_words(symbols.numpy(), self.dictionary.children, words, offsets)
        codes = torch.from_numpy(words[:count].copy())
        return {"codes": codes, "row_offsets": torch.from_numpy(offsets), "levels": levels.to(torch.bfloat16)}

    def _loop(self, parts: Parts) -> Callable[..., int]:
        codes, offsets = parts["codes"].numpy(), parts["row_offsets"].numpy()

        def loop(levels: Any, out: Any, first: int) -> int:
            last = max(0, len(out) - -(-PADDED_LANES // out.shape[1]))  # the last rows have no room behind them
            damaged = decode_words(codes, offsets, self._lanes, levels, out, first)
            if damaged >= 0:
                return int(damaged)
            return int(decode_last_words(codes, offsets, self._lanes, levels, out[last:], first + last))

        return loop

    def _decode_on_device(self, parts: Parts, into: Tensor, rows: range) -> None:
        if (kernels := triton_kernels(into.device)) is not None:
            words_to_dense(kernels, self.dictionary, parts, into, rows)
        else:
            words_in_torch(self.dictionary, parts, into, rows)

    def _device_bytes(self, rows: int, columns: int) -> int:
        return words_bytes(rows, columns)

    def _check(self, parts: Parts, columns: int) -> None:
        if len(parts["row_offsets"]) != len(parts["levels"]) + 1:
            raise ModelError("ternary weights: row offsets and levels have different numbers of rows; make the file again")


class TritsCodec(TernaryCodec):
    """Five weights in a byte, the first the lowest digit of base 3. Parts: `trits` uint8 (rows, bytes), `levels`."""

    name = "trits"

    def __init__(self) -> None:
        self._table = np.arange(3**TRITS, dtype=np.uint8)[:, None] // (3 ** np.arange(TRITS)).astype(np.uint8) % 3

    def places(self, rows: int, columns: int) -> tuple[CodePart, ...]:
        """Return the places of bytes and levels."""
        return CodePart("trits", "uint8", 1, (rows, -(-columns // TRITS))), CodePart("levels", "bfloat16", 2, (rows, 2))

    def encode_symbols(self, symbols: Tensor, levels: Tensor) -> Parts:
        """Return digits of base 3; the last byte of a row is filled up with zeros."""
        rows, columns = symbols.shape
        filled = torch.nn.functional.pad(symbols, (0, -columns % TRITS)).view(rows, -1, TRITS)
        trits = (filled * torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8)).sum(dim=2, dtype=torch.uint8)
        return {"trits": trits, "levels": levels.to(torch.bfloat16)}

    def _loop(self, parts: Parts) -> Callable[..., int]:
        trits = parts["trits"].numpy()
        return lambda levels, out, first: decode_trits(trits, self._table, levels, out, first)

    def _decode_on_device(self, parts: Parts, into: Tensor, rows: range) -> None:
        trits_in_torch(torch.from_numpy(self._table), parts, into, rows)

    def _device_bytes(self, rows: int, columns: int) -> int:
        return piece_bytes(rows, columns, 24) + 16 * rows

    def _check(self, parts: Parts, columns: int) -> None:
        if parts["trits"].shape != (len(parts["levels"]), -(-columns // TRITS)):
            raise ModelError(
                f"ternary weights: {tuple(parts['trits'].shape)} bytes for {len(parts['levels'])} rows of {columns}; make the "
                "file again"
            )


def parts_bytes(parts: Parts) -> int:
    """Return the bytes of all parts."""
    return sum(part.numel() * part.element_size() for part in parts.values())


def share_of_zeros(symbols: Tensor) -> float:
    """Return the share of weights that are zero."""
    return 1.0 - float(torch.count_nonzero(symbols)) / max(1, symbols.numel())


def _bits(values: Tensor) -> NDArray[Any]:
    """Return the bits of values, whose dtype numpy may not know."""
    kind = _BITS[values.element_size()]
    return values.contiguous().view(torch.int16 if kind is np.uint16 else torch.int32).numpy().view(kind)
