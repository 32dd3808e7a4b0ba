"""The compiled loop of attention on the host: one query token of each row against all its keys and values, read once, in place.

For each row and head of keys all query heads of that group are computed together, piece by piece of the tokens. A running
maximum and a running sum are kept: the online softmax of Milakov and Gimelshein (2018, arXiv 1805.02867). Everything is
computed in float32, whatever the dtype of keys and values. It runs without the GIL on one core; sums are in the order of the
tokens and independent of how rows are divided among cores.
"""

from functools import partial
from typing import Any

import numpy as np

from headrace.machine import jit
from headrace.machine.jit import full_width

# What the bits of keys and values encode.
FLOAT32, BFLOAT16, FLOAT16 = range(3)
# Tokens whose keys and values are widened at a time: for heads of 128 they take 64 KiB, which fits into the caches of a core.
_PIECE = 64


@partial(jit.compiled, inline="always")
def _widen(line: Any, kind: Any, bits: Any, numbers: Any) -> None:
    """Fill `bits` with those of the float32 numbers for which `line` stands; `numbers` are the same memory."""
    if kind == BFLOAT16:
        for i in range(bits.size):
            bits[i] = np.uint32(line[i]) << np.uint32(16)
    elif kind == FLOAT32:
        for i in range(bits.size):
            bits[i] = np.uint32(line[i])
    else:
        # The exponent bias of float32 is greater by 112; the sign is put in front again.
        for i in range(bits.size):
            bits[i] = (np.uint32(line[i]) & np.uint32(0x7FFF)) << np.uint32(13)
        for i in range(bits.size):
            numbers[i] *= np.float32(2.0**112)
        for i in range(bits.size):
            bits[i] |= (np.uint32(line[i]) & np.uint32(0x8000)) << np.uint32(16)


@partial(jit.compiled, fastmath={"reassoc", "contract", "nsz", "arcp", "nnan"})
def attend(query: Any, table: Any, values_at: Any, kind: Any, mask: Any, sinks: Any, out: Any, first: Any, last: Any) -> Any:
    """Fill `out` for the pairs of a row and a head of keys from number `first` up to `last`.

    `query` (rows, heads of keys, group, width) and `out` (rows, heads of keys, group, width of values) are float32, the query
    times its scale. A line of `table` (tokens, numbers of a token) holds the numbers of a token, as bits of this `kind`. First
    come the keys (rows, heads, width), and from `values_at` on the values. `mask` (rows, tokens) is added to scores; without
    columns it is all zeros. `sinks` (heads of keys, group) are scores without a value, -inf if there are none. A row that sees
    nothing gets zeros.
    """
    full_width()
    heads, group, width = query.shape[1], query.shape[2], query.shape[3]
    tokens, deep = table.shape[0], out.shape[3]
    key_bits, value_bits = np.empty((_PIECE, width), np.uint32), np.empty((_PIECE, deep), np.uint32)
    keys, values = key_bits.view(np.float32), value_bits.view(np.float32)
    scores, power_bits = np.empty((group, _PIECE), np.float32), np.empty(_PIECE, np.int32)
    powers, sums = power_bits.view(np.float32), np.empty((group, deep), np.float32)
    top, total = np.empty(group, np.float32), np.empty(group, np.float32)
    for place in range(first, last):
        row, head = place // heads, place % heads
        sums[:] = 0
        for each in range(group):
            top[each] = sinks[head, each]
            total[each] = 0 if sinks[head, each] == -np.inf else 1
        for begin in range(0, tokens, _PIECE):
            count = min(_PIECE, tokens - begin)
            for token in range(count):
                # Slices tell numba that no index is negative, so that loops over them vectorise.
                start = place * width
                _widen(table[begin + token][start : start + width], kind, key_bits[token], keys[token])
                start = values_at + place * deep
                _widen(table[begin + token][start : start + deep], kind, value_bits[token], values[token])
            for each in range(group):
                asked, score, added = query[row, head, each], scores[each], sums[each]
                best = top[each]
                for token in range(count):
                    key, product = keys[token], np.float32(0)
                    for i in range(width):
                        product += asked[i] * key[i]
                    score[token] = product
                if mask.shape[1]:
                    shown = mask[row][begin : begin + count]
                    for token in range(count):
                        score[token] += shown[token]
                for token in range(count):
                    best = max(best, score[token])
                if best == -np.inf:
                    continue  # nothing is seen yet
                shrink = np.float32(np.exp(top[each] - best))
                top[each] = best
                # exp by a polynomial (error below 2e-7): a call of the C library's would not vectorise.
                for token in range(count):
                    power = max((score[token] - best) * np.float32(1.4426950408889634), np.float32(-126.0))
                    whole = np.int32(power - np.float32(0.5))
                    part = power - np.float32(whole)
                    found = np.float32(1.5403530e-4)
                    found = found * part + np.float32(1.3333558e-3)
                    found = found * part + np.float32(9.6181291e-3)
                    found = found * part + np.float32(5.5504109e-2)
                    found = found * part + np.float32(2.4022651e-1)
                    found = found * part + np.float32(6.9314718e-1)
                    score[token] = found * part + np.float32(1.0)
                    power_bits[token] = (whole + np.int32(127)) << np.int32(23)
                sum_of_piece = np.float32(0)
                for token in range(count):
                    score[token] *= powers[token]
                    sum_of_piece += score[token]
                total[each] = total[each] * shrink + sum_of_piece
                for i in range(deep):
                    added[i] *= shrink
                for token in range(count):
                    share, value = score[token], values[token]
                    for i in range(deep):
                        added[i] += share * value[i]
        for each in range(group):
            scale = np.float32(0 if total[each] == 0 else 1 / total[each])
            result, added = out[row, head, each], sums[each]
            for i in range(deep):
                result[i] = added[i] * scale
