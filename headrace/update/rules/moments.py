"""Moments of 16 and 8 bits: how the two states of Adam-like rules are kept in fewer bits, here in compiled loops.

The update is exact; only what is kept until the next step is rounded, at random and without bias in `m` and `v`. Rounding to
nearest would lose every change below half a place. With `beta2 = 0.999` a second moment falls by at most a thousandth per step.
A bfloat16 place is four to eight thousandths, so the moment would never fall.

Codes of 8 bits are roots: a first moment is `code * |code|` units, the root of a second moment is `code^2` units. So places are
densest near zero. A moment of a hundredth of its block's largest keeps an error of some percent; evenly spaced codes would
round it to zero or one. Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization", have the blocks, and use a table
of codes to the same end; roots need no table.

Invariant: a rounding depends on the element's place in the model, the update and (with 8 bits) its block alone: `_noise`. On
tensors (`moment_tensors.py`) they are the same bits.
"""

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from headrace.machine.jit import full_width
from headrace.update.rules.kernels import as_float, not_nan, widened
from headrace.update.rules.loops import TILE_ELEMENTS, StateCode, inlined
from headrace.update.rules.moment_planes import (
    LARGEST_M,
    LARGEST_V,
    NOISE_LAST_SHIFT,
    NOISE_ROUNDS,
    SMALLEST_M,
)
from headrace.update.rules.moment_tensors import (
    decode_tensors_bfloat16,
    decode_tensors_int8,
    encode_tensors_bfloat16,
    encode_tensors_int8,
)


@intrinsic  # type: ignore[untyped-decorator]
def _noise(context: Any, element: Any, key: Any) -> Any:
    """Return 32 random bits (uint32) for an element: a hash of the lower 32 bits of its number, and of `key`.

    It is a counter instead of a generator's state. So the bits depend neither on the thread that computes them nor on the order
    (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). The mixing function is `lowbias32` of C. Wellons's hash
    prospector (2018, public domain): two rounds of multiply and xor-shift, of low bias in every output bit.
    """

    def lower(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        word = ir.IntType(32)
        value = builder.xor(builder.trunc(args[0], word), args[1])
        for shift, factor in NOISE_ROUNDS:
            value = builder.xor(value, builder.lshr(value, ir.Constant(word, shift)))
            value = builder.mul(value, ir.Constant(word, factor))
        return builder.xor(value, builder.lshr(value, ir.Constant(word, NOISE_LAST_SHIFT)))

    return types.uint32(types.int64, types.uint32), lower


def _half(upper: bool) -> Any:
    """Return the intrinsic that reads 16 of 32 random bits as a number inside (0, 1): `(bits + 0.5) / 65536`, exact."""

    def lower(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        word, real = ir.IntType(32), ir.FloatType()
        other = (builder.lshr(args[0], ir.Constant(word, 16)), builder.and_(args[0], ir.Constant(word, 0xFFFF)))
        value = builder.fadd(builder.sitofp(other[0] if upper else other[1], real), ir.Constant(real, 0.5))
        return builder.fmul(value, ir.Constant(real, 2.0**-16))

    @intrinsic  # type: ignore[untyped-decorator]
    def half(context: Any, bits: Any) -> Any:
        return types.float32(types.uint32), lower

    return half


_upper_half, _lower_half = _half(True), _half(False)


@intrinsic  # type: ignore[untyped-decorator]
def _magnitude(context: Any, value: Any) -> Any:
    """Return the bits of a float32 without its sign: as integers they have the order of the magnitudes, NaN above all."""

    def lower(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        word = ir.IntType(32)
        return builder.and_(builder.bitcast(args[0], word), ir.Constant(word, 0x7FFFFFFF))

    return types.uint32(types.float32), lower


@intrinsic  # type: ignore[untyped-decorator]
def _larger(context: Any, left: Any, right: Any) -> Any:
    """Return the larger of two uint32."""

    def lower(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.select(builder.icmp_unsigned(">", args[0], args[1]), args[0], args[1])

    return types.uint32(types.uint32, types.uint32), lower


@intrinsic  # type: ignore[untyped-decorator]
def _whole(context: Any, value: Any) -> Any:
    """Return a float32 in [0, 2^31) without its fraction."""

    def lower(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.sitofp(builder.fptosi(args[0], ir.IntType(32)), ir.FloatType())

    return types.float32(types.float32), lower


def _code(result: Any) -> Any:
    """Return the intrinsic that converts a whole float32 in its range to an 8-bit integer."""

    def lower(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.trunc(builder.fptosi(args[0], ir.IntType(32)), ir.IntType(8))

    @intrinsic  # type: ignore[untyped-decorator]
    def code(context: Any, value: Any) -> Any:
        return result(types.float32), lower

    return code


_signed_code, _unsigned_code = _code(types.int8), _code(types.uint8)


def _stochastic_bfloat16(upper: bool) -> Any:
    """Return the intrinsic that rounds a float32 to bfloat16 bits at random, so that the mean is the value.

    Random bits are added below the last place that is kept, and cut off with the rest: exactly unbiased. The value must be no
    NaN.
    """

    def lower(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        word = ir.IntType(32)
        other = (builder.lshr(args[1], ir.Constant(word, 16)), builder.and_(args[1], ir.Constant(word, 0xFFFF)))
        moved = builder.add(builder.bitcast(args[0], word), other[0] if upper else other[1])
        return builder.trunc(builder.lshr(moved, ir.Constant(word, 16)), ir.IntType(16))

    @intrinsic  # type: ignore[untyped-decorator]
    def narrow(context: Any, value: Any, bits: Any) -> Any:
        return types.uint16(types.float32, types.uint32), lower

    return narrow


_narrow_upper, _narrow_lower = _stochastic_bfloat16(True), _stochastic_bfloat16(False)


@inlined
def rounded_at_random(value: Any, element: Any, key: Any) -> Any:
    """Return a float32 as the bits of one of the two bfloat16 numbers that it lies between, unbiased, by `_noise`."""
    return _narrow_lower(not_nan(value), _noise(element, key))


@inlined
def _scratch() -> Any:
    return np.empty(TILE_ELEMENTS, np.float32), np.empty(TILE_ELEMENTS, np.float32)


@inlined
def _decode_bfloat16(planes: Any, start: Any, stop: Any, tiles: Any) -> None:
    full_width()
    m, v = planes[0][start:stop], planes[1][start:stop]
    m_tile, v_tile = tiles
    for i in range(m.size):
        m_tile[i] = widened(m[i])
        v_tile[i] = widened(v[i])


@inlined
def _encode_bfloat16(tiles: Any, planes: Any, start: Any, stop: Any, first: Any, key: Any) -> None:
    full_width()
    m, v = planes[0][start:stop], planes[1][start:stop]
    m_tile, v_tile = tiles
    for i in range(m.size):
        bits = _noise(first + i, key)
        m[i] = _narrow_upper(not_nan(m_tile[i]), bits)
        v[i] = _narrow_lower(not_nan(v_tile[i]), bits)


@inlined
def _decode_int8(planes: Any, start: Any, stop: Any, tiles: Any) -> None:
    full_width()
    m, v = planes[0][start:stop], planes[1][start:stop]
    m_unit, v_unit = planes[2][start // TILE_ELEMENTS], planes[3][start // TILE_ELEMENTS]
    m_tile, v_tile = tiles
    for i in range(m.size):
        code = np.float32(m[i])
        m_tile[i] = (code * np.abs(code)) * m_unit
        code = np.float32(v[i])
        root = (code * code) * v_unit
        v_tile[i] = root * root


@inlined
def _encode_int8(tiles: Any, planes: Any, start: Any, stop: Any, first: Any, key: Any) -> None:
    """Encode a block. The second tile is overwritten.

    A second moment above zero never becomes zero, because its first moment would then be divided by epsilon alone. A block that
    has a number that is not finite decodes to NaN throughout.
    """
    full_width()
    m, v = planes[0][start:stop], planes[1][start:stop]
    block = start // TILE_ELEMENTS
    m_unit, v_unit = planes[2][block : block + 1], planes[3][block : block + 1]
    m_tile, v_tile = tiles
    largest_m, largest_root = np.uint32(0), np.uint32(0)
    for i in range(m.size):
        root = np.sqrt(v_tile[i])
        v_tile[i] = root
        largest_m = _larger(largest_m, _magnitude(m_tile[i]))
        largest_root = _larger(largest_root, _magnitude(root))
    if largest_m >= np.uint32(0x7F800000) or largest_root >= np.uint32(0x7F800000):
        m[:] = 0
        v[:] = 0
        m_unit[0] = np.float32(np.nan)
        v_unit[0] = np.float32(np.nan)
        return
    unit = as_float(largest_m) * np.float32(1 / LARGEST_M**2)
    if as_float(largest_m) < np.float32(SMALLEST_M):
        unit = np.float32(0)
    root_unit = as_float(largest_root) * np.float32(1 / LARGEST_V**2)
    m_unit[0] = unit
    v_unit[0] = root_unit
    inverse = np.float32(1) / unit if unit > 0 else np.float32(0)
    root_inverse = np.float32(1) / root_unit if root_unit > 0 else np.float32(0)
    for i in range(m.size):
        bits = _noise(first + i, key)
        # Rounded at random to the code below or above, so that the mean is the value.
        value = np.abs(m_tile[i]) * inverse
        code = _whole(np.sqrt(value))
        code = code if code < np.float32(LARGEST_M - 1) else np.float32(LARGEST_M - 1)
        below = code * code
        above = (code + np.float32(1)) * (code + np.float32(1))
        code = code + np.float32(1) if _upper_half(bits) * (above - below) < value - below else code
        m[i] = _signed_code(code if m_tile[i] > 0 else -code)
        root = v_tile[i] * root_inverse
        code = _whole(np.sqrt(root))
        code = code if code < np.float32(LARGEST_V - 1) else np.float32(LARGEST_V - 1)
        below = code * code
        above = (code + np.float32(1)) * (code + np.float32(1))
        gap = (above - below) * (above + below)  # of the second moment itself, in which the rounding is unbiased
        code = code + np.float32(1) if _lower_half(bits) * gap < (root - below) * (root + below) else code
        v[i] = _unsigned_code(np.float32(1) if code == 0 and root > 0 else code)


# By the names of `MOMENTS`; None for moments that are kept without a code.
MOMENT_CODES: dict[str, StateCode | None] = {
    "float32": None,
    "bfloat16": StateCode(_scratch, _decode_bfloat16, _encode_bfloat16, decode_tensors_bfloat16, encode_tensors_bfloat16),
    "int8": StateCode(_scratch, _decode_int8, _encode_int8, decode_tensors_int8, encode_tensors_int8),
}
