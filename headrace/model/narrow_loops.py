"""The compiled loops of narrow products: up to four rows of bfloat16 times the transpose of a matrix, read once.

Two neighbouring weights are read as 32 bits. A shift makes a float32 number of the first, a mask one of the second. Products
are added up in float32, in lanes whose number follows from the processor, and each sum is rounded once. Weights may lie at any
even address.

Invariant: a sum does not depend on where a thread begins. Threads take blocks of two outputs, cut at even places, and each of
a block's sums is made by the same instructions wherever the block lies.
"""

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from headrace.machine.jit import JIT_OPTIONS

# What `multiply` is told as 64-bit numbers. First come the addresses of inputs, weights, bias (or 0) and results. Then it is
# told how many rows, outputs and inputs there are. Outputs are taken so many (an even number) at a time; so many are taken.
_TAKEN, NUM_WORDS = 8, 9
_SUMS = {"reassoc", "contract", "nsz"}


@intrinsic  # type: ignore[untyped-decorator]
def _bits16(context: Any, address: Any) -> Any:
    """Return `address` as that of bits of bfloat16."""
    return types.CPointer(types.uint16)(types.int64), _to_pointer


@intrinsic  # type: ignore[untyped-decorator]
def _bits32(context: Any, address: Any) -> Any:
    """Return `address` as that of pairs of bfloat16."""
    return types.CPointer(types.uint32)(types.int64), _to_pointer


def _to_pointer(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
    return builder.inttoptr(args[0], ctx.get_value_type(sig.return_type))


@intrinsic  # type: ignore[untyped-decorator]
def _pair(context: Any, pairs: Any, index: Any) -> Any:
    """Return pair number `index`; `pairs` may lie at any even address."""

    def lower(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load(builder.gep(args[0], [args[1]]), align=2)

    return types.uint32(types.CPointer(types.uint32), types.int64), lower


@intrinsic  # type: ignore[untyped-decorator]
def _take(context: Any, words: Any, count: Any) -> Any:
    """Take so many outputs, as several threads do at once; return the first of them."""

    def lower(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        place = builder.gep(args[0], [ctx.get_constant(types.intp, _TAKEN)])
        return builder.atomic_rmw("add", place, args[1], "monotonic")

    return types.int64(types.CPointer(types.int64), types.int64), lower


@njit(**JIT_OPTIONS, inline="always")  # type: ignore[untyped-decorator]
def _first(pair: Any) -> Any:
    return np.uint32(pair << np.uint32(16)).view(np.float32)


@njit(**JIT_OPTIONS, inline="always")  # type: ignore[untyped-decorator]
def _second(pair: Any) -> Any:
    return np.uint32(pair & np.uint32(0xFFFF0000)).view(np.float32)


@njit(**JIT_OPTIONS)  # type: ignore[untyped-decorator]
def _rounded(total: Any, bias: Any, place: Any) -> Any:
    """Return the bits of the bfloat16 number nearest to `total` plus what `bias` has at `place`, ties to even."""
    if bias:
        total += _first(np.uint32(_bits16(bias)[place]))
    bits = np.float32(total).view(np.uint32)
    if (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
        return np.uint16(0x7FC0)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@njit(**JIT_OPTIONS, fastmath=_SUMS)  # type: ignore[untyped-decorator]
def _one(evens: Any, odds: Any, weights: Any, bias: Any, out: Any, half: Any, begin: Any, end: Any) -> Any:
    """Fill outputs from `begin` to `end` for one row, whose numbers at even and odd places are float32."""
    even, odd = evens[0][:half], odds[0][:half]
    for output in range(begin, end):
        line = _bits32(weights + 4 * half * output)
        first, second = np.float32(0), np.float32(0)
        for i in range(half):
            pair = _pair(line, i)
            first += _first(pair) * even[i]
            second += _second(pair) * odd[i]
        _bits16(out)[output] = _rounded(first + second, bias, output)


@njit(**JIT_OPTIONS, fastmath=_SUMS)  # type: ignore[untyped-decorator]
def _four(
    evens: Any, odds: Any, weights: Any, bias: Any, out: Any, half: Any, begin: Any, end: Any, rows: Any, outputs: Any
) -> Any:
    """Do as `_one` for two to four rows, two outputs at a time; `evens` and `odds` have four rows."""
    even0, even1, even2, even3 = evens[0][:half], evens[1][:half], evens[2][:half], evens[3][:half]
    odd0, odd1, odd2, odd3 = odds[0][:half], odds[1][:half], odds[2][:half], odds[3][:half]
    for output in range(begin, end, 2):
        other = min(output + 1, outputs - 1)
        upper, lower = _bits32(weights + 4 * half * output), _bits32(weights + 4 * half * other)
        up0, up1, up2, up3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        low0, low1, low2, low3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        for i in range(half):
            pair, below = _pair(upper, i), _pair(lower, i)
            left, right, left_below, right_below = _first(pair), _second(pair), _first(below), _second(below)
            up0 += left * even0[i] + right * odd0[i]
            low0 += left_below * even0[i] + right_below * odd0[i]
            up1 += left * even1[i] + right * odd1[i]
            low1 += left_below * even1[i] + right_below * odd1[i]
            up2 += left * even2[i] + right * odd2[i]
            low2 += left_below * even2[i] + right_below * odd2[i]
            up3 += left * even3[i] + right * odd3[i]
            low3 += left_below * even3[i] + right_below * odd3[i]
        ups, lows = (up0, up1, up2, up3), (low0, low1, low2, low3)
        for row in range(rows):
            line = _bits16(out + 2 * outputs * row)
            line[other] = _rounded(lows[row], bias, other)
            line[output] = _rounded(ups[row], bias, output)


def multiply(words: Any) -> None:
    """Compute outputs that no other thread has taken, until none is left; for a callback of C, which any thread may call."""
    inputs, weights, bias, out = words[0], words[1], words[2], words[3]
    rows, outputs, length, step = words[4], words[5], words[6], words[7]
    half, room = length // 2, 1 if rows == 1 else 4
    evens, odds = np.zeros((room, half), np.float32), np.zeros((room, half), np.float32)
    for row in range(rows):
        numbers = _bits16(inputs + 2 * length * row)
        for i in range(half):
            evens[row, i] = _first(np.uint32(numbers[2 * i]))
            odds[row, i] = _first(np.uint32(numbers[2 * i + 1]))
    begin = _take(words, step)
    while begin < outputs:
        end = min(begin + step, outputs)
        if rows == 1:
            _one(evens, odds, weights, bias, out, half, begin, end)
        else:
            _four(evens, odds, weights, bias, out, half, begin, end, rows, outputs)
        begin = _take(words, step)
