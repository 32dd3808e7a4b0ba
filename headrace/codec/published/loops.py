"""The compiled loops of published codes: a line of a matrix becomes float32 numbers, which are rounded, or multiplied by rows.

Each code has one function, a callback of C, that fills a `place` with `count` numbers of a `line` from number `first` on: whole
blocks, but for a line's end. `words` have its parts and sizes (`lines.py`). Decoding and products call it, so a product has the
very weights of decoding, but for their rounding.

Invariants: values are those of the codes' torch operations, bit for bit; only a NaN may be another one. A sum is made by the
same instructions, in the same order, whichever thread makes it, and however many rows there are.
"""

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, njit, types
from numba.extending import intrinsic

from headrace.machine.jit import JIT_OPTIONS, compiled, full_width
from headrace.machine.team import take_team

CHUNK = 2048  # numbers of a line in the nearest cache, whole blocks of each code
# What scales are.
FLOAT32, BFLOAT16, FLOAT16, EXPONENTS = range(4)
# What loops are told as 64-bit numbers. Eight are for a product alone. Of these the first are the addresses of rows and results
# (float32), and the numbers of rows, outputs and inputs. Others say how many outputs a thread takes at a time, what fills, and
# how many outputs are taken. Then come the addresses of parts, their bytes, and sizes.
NUM_PARTS, NUM_SIZES = 5, 5
_FILL, _TAKEN, PARTS = 6, 7, 8
_BYTES, _SIZES = PARTS + NUM_PARTS, PARTS + 2 * NUM_PARTS
_GROUP = 32  # numbers of MXFP4 that have one scale
_TILE, _ACROSS = 32, 1024  # lines that are decoded together where the matrix is transposed, and numbers of each
_SUMS = {"reassoc", "contract", "nsz"}


def _pointer(kind: Any) -> Any:
    """Return a function for loops: an address as one of numbers of a `kind` of numba's."""

    @intrinsic  # type: ignore[untyped-decorator]
    def pointer(context: Any, address: Any) -> Any:
        def lower(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], ctx.get_value_type(sig.return_type))

        return types.CPointer(kind)(types.int64), lower

    return pointer


# Of a callback that fills: what it is told, line, first number, how many, and where to.
FILL_ARGUMENTS = (types.CPointer(types.int64), types.int64, types.int64, types.int64, types.CPointer(types.float32))
_uint8, _int64, _float32 = map(_pointer, (types.uint8, types.int64, types.float32))


@intrinsic  # type: ignore[untyped-decorator]
def _call(context: Any, fill: Any, words: Any, line: Any, first: Any, count: Any, place: Any) -> Any:
    """Call the function at the address `fill` with the other arguments."""

    def lower(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [each.type for each in args[1:]])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return ctx.get_dummy_value()

    return types.void(types.int64, *FILL_ARGUMENTS), lower


@njit(**JIT_OPTIONS, inline="always")  # type: ignore[untyped-decorator]
def stored_part(words: Any, number: Any) -> Any:
    """Return the bytes of a part."""
    return carray(_uint8(words[PARTS + number]), words[_BYTES + number])


@njit(**JIT_OPTIONS, inline="always")  # type: ignore[untyped-decorator]
def words_sizes(words: Any) -> Any:
    """Return the sizes that a code is told."""
    return words[_SIZES], words[_SIZES + 1], words[_SIZES + 2], words[_SIZES + 3], words[_SIZES + 4]


@njit(**JIT_OPTIONS, inline="always")  # type: ignore[untyped-decorator]
def half_number(bits: Any) -> Any:
    """Return the number of which these are the bits in float16."""
    size = np.uint32(bits) & np.uint32(0x7FFF)
    if size < 0x400:
        value = np.float32(np.int32(size)) * np.float32(2.0**-24)
    else:
        above = np.uint32(0x7F800000) if size >= 0x7C00 else np.uint32(0)
        value = np.uint32(((size << np.uint32(13)) + np.uint32(112 << 23)) | above).view(np.float32)
    return -value if bits & 0x8000 else value


@njit(**JIT_OPTIONS, inline="always")  # type: ignore[untyped-decorator]
def _power(exponent: Any) -> Any:
    """Return two to the power of `exponent`, below 255, less 127."""
    bits = np.uint32(exponent) << np.uint32(23) if exponent else np.uint32(1 << 22)
    return np.uint32(bits).view(np.float32)


@njit(**JIT_OPTIONS, inline="always")  # type: ignore[untyped-decorator]
def _scale(part: Any, index: Any, kind: Any) -> Any:
    if kind == FLOAT32:
        return part.view(np.float32)[index]
    if kind == BFLOAT16:
        return np.uint32(np.uint32(part.view(np.uint16)[index]) << np.uint32(16)).view(np.float32)
    if kind == FLOAT16:
        return half_number(part.view(np.uint16)[index])
    return np.float32(np.nan) if part[index] == 255 else _power(part[index])


@njit(**JIT_OPTIONS)  # type: ignore[untyped-decorator]
def _pairs(codes: Any, table: Any, into: Any) -> None:
    """Fill `into` with the two numbers that `table` (256 times two float32) has for each byte."""
    pairs, out = table.view(np.uint64), into.view(np.uint64)
    for i in range(out.size):
        out[i] = pairs[np.intp(codes[i])]


@njit(**JIT_OPTIONS, inline="always")  # type: ignore[untyped-decorator]
def _times(numbers: Any, scale: Any) -> None:
    for i in range(numbers.size):
        numbers[i] *= scale


def fill_int4(words: Any, line: Any, first: Any, count: Any, place: Any) -> None:
    """Fill a part of a line; see above."""
    full_width()
    into, sizes = carray(place, count), words_sizes(words)
    width, group, groups, kind, zeros = sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]
    number, at = first // group, 0
    row, shift = line // 8 * groups, np.int32(line % 8 * 4)
    while at < into.size:
        size, zero = min((number + 1) * group - first, into.size) - at, np.int32(8)
        if zeros:
            zero = np.int32((stored_part(words, 2).view(np.int32)[row + number] >> shift) & 15)
        scale, start = _scale(stored_part(words, 1), line * groups + number, kind), line * width + (first + at) // 2
        codes, room = stored_part(words, 0)[start : start + size // 2], into[at : at + size]
        for i in range(size // 2):
            both = np.int32(codes[i])
            room[2 * i] = np.float32((both & 15) - zero) * scale
            room[2 * i + 1] = np.float32((both >> 4) - zero) * scale
        number, at = number + 1, at + size


def fill_fp8(words: Any, line: Any, first: Any, count: Any, place: Any) -> None:
    """Fill a part of a line; see above."""
    full_width()
    into, sizes = carray(place, count), words_sizes(words)
    columns, block_rows, block, blocks, kind = sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]
    start, row, number, at = line * columns + first, line // block_rows * blocks, first // block, 0
    codes = stored_part(words, 0)[start : start + into.size]
    while at < into.size:
        stop = min((number + 1) * block - first, into.size)
        scale = _scale(stored_part(words, 1), row + number, kind)
        some, room = codes[at:stop], into[at:stop]
        for i in range(room.size):
            code = np.uint32(some[i])
            size = np.uint32(code & np.uint32(127))
            small = np.float32(np.float32(np.int32(size)) * np.float32(2.0**-9)).view(np.uint32)
            bits = small if size < 8 else np.uint32((size << np.uint32(20)) + np.uint32(120 << 23))
            bits = np.uint32(0x7FC00000) if size == 127 else bits
            room[i] = np.uint32(bits | (code & np.uint32(128)) << np.uint32(24)).view(np.float32) * scale
        number, at = number + 1, stop


def fill_mxfp4(words: Any, line: Any, first: Any, count: Any, place: Any) -> None:
    """Fill a part of a line; see above."""
    full_width()
    into, sizes = carray(place, count), words_sizes(words)
    place = line * sizes[0] + first // 32
    _pairs(stored_part(words, 0)[16 * place : 16 * place + into.size // 2], stored_part(words, 2), into)
    for number in range(into.size // 32):
        some, exponent = into[32 * number : 32 * number + 32], stored_part(words, 1)[place + number]
        _times(some, _power(exponent - (exponent == 255)))
        if exponent == 255:  # twice the power before, which float32 does not have
            _times(some, np.float32(2))


def fill_nf4(words: Any, line: Any, first: Any, count: Any, place: Any) -> None:
    """Fill a part of a line; see above."""
    full_width()
    into, sizes = carray(place, count), words_sizes(words)
    columns, block, nested, base = sizes[0], sizes[1], sizes[2], sizes[3]
    start, at = line * columns + first, 0
    number = start // block
    outer = number // max(1, nested)
    _pairs(stored_part(words, 0)[start // 2 : (start + into.size) // 2], stored_part(words, 2), into)
    while at < into.size:
        stop = min((number + 1) * block - start, into.size)
        if nested:
            tables = stored_part(words, 3).view(np.float32)
            outer += number == (outer + 1) * nested
            share = tables[stored_part(words, 1)[number]] * stored_part(words, 4).view(np.float32)[outer]
            scale = share + tables[base]
        else:
            scale = stored_part(words, 1).view(np.float32)[number]
        _times(into[at:stop], scale)
        number, at = number + 1, stop


@njit(**JIT_OPTIONS)  # type: ignore[untyped-decorator]
def _round(numbers: Any, half: Any, out: Any) -> None:
    """Fill `out` with the bits of the nearest numbers of bfloat16, or of float16 (`half`), ties to even."""
    full_width()
    bits = numbers.view(np.uint32)
    if not half:
        for i in range(out.size):
            wide = bits[i]
            near = np.uint32(wide + np.uint32(0x7FFF) + ((wide >> np.uint32(16)) & np.uint32(1)))
            near = near if np.uint32(wide & np.uint32(0x7FFFFFFF)) <= np.uint32(0x7F800000) else np.uint32(0x7FC00000)
            out[i] = np.uint16(near >> np.uint32(16))
        return
    for i in range(out.size):
        sign, size = (bits[i] >> np.uint32(16)) & np.uint32(0x8000), np.uint32(bits[i] & np.uint32(0x7FFFFFFF))
        near = np.uint32(
            size - np.uint32(112 << 23) + np.uint32(0xFFF) + ((size >> np.uint32(13)) & np.uint32(1))
        ) >> np.uint32(13)
        # Below the normal numbers of float16: 0.5 has the last place 2^-24, to which this sum is rounded.
        low = np.float32(np.uint32(size).view(np.float32) + np.float32(0.5)).view(np.uint32) - np.uint32(0x3F000000)
        near = low if size < np.uint32(113 << 23) else near
        near = np.uint32(0x7C00) if size >= np.uint32(0x477FF000) else near
        near = np.uint32(0x7E00) if size > np.uint32(0x7F800000) else near
        out[i] = np.uint16(sign | near)


@compiled
def decode(fill: Any, address: Any, first: Any, half: Any, out: Any) -> None:
    """Fill `out` (rows, columns) with the bits of bfloat16, or of float16 (`half`), of lines `first` and on.

    `fill` and `address` are those of the code's callback and of what it is told.
    """
    rows, columns = out.shape
    words, room = _int64(address), np.empty(min(columns, CHUNK), np.float32)
    for row in range(rows):
        for start in range(0, columns, CHUNK):
            numbers = room[: min(CHUNK, columns - start)]
            _call(fill, words, first + row, start, numbers.size, _float32(numbers.ctypes.data))
            _round(numbers, half, out[row, start : start + numbers.size])


@compiled
def decode_across(fill: Any, address: Any, matrix: Any, first: Any, half: Any, out: Any, begin: Any, end: Any) -> None:
    """Fill columns `begin` to `end` of `out` (rows, columns): numbers `first` and on of the lines from `matrix` on."""
    stop, words = first + out.shape[0], _int64(address)
    numbers, bits = np.empty(_ACROSS, np.float32), np.empty((_TILE, _ACROSS + _TILE), np.uint16)
    for column in range(begin, end, _TILE):
        lines = min(_TILE, end - column)
        for start in range(first // _ACROSS * _ACROSS, stop, _ACROSS):
            count = min(_ACROSS, -(-stop // _GROUP) * _GROUP - start)
            for line in range(lines):
                _call(fill, words, matrix + column + line, start, count, _float32(numbers.ctypes.data))
                _round(numbers[:count], half, bits[line, :count])
            for row in range(max(first, start), min(stop, start + count)):
                place, own = out[row - first, column : column + lines], bits[:lines, row - start]
                for line in range(lines):
                    place[line] = own[line]


@njit(**JIT_OPTIONS, fastmath=_SUMS)  # type: ignore[untyped-decorator]
def _sum(numbers: Any, others: Any) -> Any:
    full_width()
    total = np.float32(0)
    for i in range(numbers.size):
        total += numbers[i] * others[i]
    return total


def multiply_lines(words: Any) -> None:
    """Compute outputs that no other thread has taken, until none is left: rows times lines. A callback of C."""
    rows, outputs, columns, step = words[2], words[3], words[4], words[5]
    inputs, out = carray(_float32(words[0]), (rows, columns)), carray(_float32(words[1]), (rows, outputs))
    room = np.empty(min(columns, CHUNK), np.float32)
    begin = take_team(words, _TAKEN, step)
    while begin < outputs:
        for line in range(begin, min(begin + step, outputs)):
            for start in range(0, columns, CHUNK):
                numbers = room[: min(CHUNK, columns - start)]
                _call(words[_FILL], words, line, start, numbers.size, _float32(numbers.ctypes.data))
                for row in range(rows):
                    total = _sum(numbers, inputs[row, start : start + numbers.size])
                    out[row, line] = out[row, line] + total if start else total
        begin = take_team(words, _TAKEN, step)
