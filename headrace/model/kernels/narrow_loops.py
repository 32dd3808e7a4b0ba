"""The compiled loops of narrow products: up to four rows of bfloat16 times the transpose of a matrix, read once.

Two neighbouring weights are read as 32 bits. A shift makes a float32 number of the first, a mask one of the second. Products
are added up in float32, in lanes whose number follows from the processor, and each sum is rounded once. Weights may lie at any
even address. Rows are taken in pairs; the second pair finds weights in the cache.

Invariant: a sum is made by the same instructions, in the same order, whichever thread makes it and wherever that thread begins.
"""

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from headrace.machine.jit import JIT_OPTIONS
from headrace.machine.team import take_team

# What `multiply` is told as 64-bit numbers. First come the addresses of inputs, weights, bias (or 0) and results. Then it is
# told how many rows, outputs and inputs there are, how many outputs a thread takes at a time, and how many are taken.
_TAKEN, NUM_WORDS = 8, 9
_APART = 16  # numbers of a cache line
_AT_ONCE = 16  # outputs, whose weights stay in a cache until all rows have met them
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
    bits: Any = np.float32(total).view(np.uint32)
    if (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
        return np.uint16(0x7FC0)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@njit(**JIT_OPTIONS, fastmath=_SUMS)  # type: ignore[untyped-decorator]
def _one(even: Any, odd: Any, weights: Any, bias: Any, out: Any, begin: Any, end: Any) -> Any:
    """Fill outputs from `begin` to `end` for a row, whose numbers at even and at odd places are float32."""
    half, found = even.size, _bits16(out)
    for output in range(begin, end):
        line = _bits32(weights + 4 * half * output)
        first, second = np.float32(0), np.float32(0)
        for i in range(half):
            pair = _pair(line, i)
            first += _first(pair) * even[i]
            second += _second(pair) * odd[i]
        found[output] = _rounded(first + second, bias, output)


@njit(**JIT_OPTIONS, fastmath=_SUMS)  # type: ignore[untyped-decorator]
def _two(
    even0: Any, odd0: Any, even1: Any, odd1: Any, weights: Any, bias: Any, out: Any, outputs: Any, begin: Any, end: Any
) -> Any:
    """Do as `_one` for two rows; results of a row are as many as `outputs`."""
    half, upper, lower = even0.size, _bits16(out), _bits16(out + 2 * outputs)
    for output in range(begin, end):
        line = _bits32(weights + 4 * half * output)
        first0, second0, first1, second1 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        for i in range(half):
            pair = _pair(line, i)
            left, right = _first(pair), _second(pair)
            first0 += left * even0[i]
            second0 += right * odd0[i]
            first1 += left * even1[i]
            second1 += right * odd1[i]
        upper[output] = _rounded(first0 + second0, bias, output)
        lower[output] = _rounded(first1 + second1, bias, output)


def multiply(words: Any) -> None:
    """Compute outputs that no other thread has taken, until none is left; for a callback of C, which any thread may call."""
    inputs, weights, bias, out = words[0], words[1], words[2], words[3]
    rows, outputs, length, step = words[4], words[5], words[6], words[7]
    half = length // 2
    # Rows whose distance is a power of two would share few places of the nearest cache.
    evens, odds = np.empty((rows, half + _APART), np.float32), np.empty((rows, half + _APART), np.float32)
    for row in range(rows):
        numbers = _bits16(inputs + 2 * length * row)
        for i in range(half):
            evens[row, i] = _first(np.uint32(numbers[2 * i]))
            odds[row, i] = _first(np.uint32(numbers[2 * i + 1]))
    begin = take_team(words, _TAKEN, step)
    while begin < outputs:
        last = min(begin + step, outputs)
        while begin < last:
            end = min(begin + _AT_ONCE, last)
            for row in range(0, rows, 2):
                place, even, odd = out + 2 * outputs * row, evens[row, :half], odds[row, :half]
                if row + 1 < rows:
                    more, odder = evens[row + 1, :half], odds[row + 1, :half]
                    _two(even, odd, more, odder, weights, bias, place, outputs, begin, end)
                else:
                    _one(even, odd, weights, bias, place, begin, end)
            begin = end
        begin = take_team(words, _TAKEN, step)
