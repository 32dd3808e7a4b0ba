"""Moments of 16 and 8 bits: how the two states of Adam-like rules are kept in fewer bits, in compiled loops and on tensors.

The update is exact; only what is kept until the next step is rounded, at random and without bias in `m` and `v`. Rounding to
nearest would lose every change below half a place: with `beta2 = 0.999` a second moment falls by at most a thousandth per step,
and a bfloat16 place is four to eight thousandths, so it would never fall.

Codes of 8 bits are roots: a first moment is `code * |code|` units, the root of a second moment is `code^2` units. So places are
densest near zero: a moment of a hundredth of its block's largest keeps an error of some percent, where evenly spaced codes
would round it to zero or one. Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization", have the blocks, and use a
table of codes to the same end; roots need no table.

Invariant: a rounding depends on the element's place in the model, the update and (with 8 bits) its block alone: `_noise`. Both
forms give the same bits.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from headrace.machine.jit import full_width
from headrace.terms.layout import Plane
from headrace.update.kernels import as_float, not_nan, widened
from headrace.update.loops import TILE_ELEMENTS, StateCode, inlined
from headrace.update.tensors import Noise, root_of, rounded_bits

# Parameters that share one scale where moments have 8 bits (Dettmers et al. 2022, section 2: small blocks contain outliers).
MOMENT_BLOCK_ELEMENTS = TILE_ELEMENTS
# The planes by kind of moments. int8 has codes, and for each block the unit in which its codes count.
MOMENT_PLANES = {
    "float32": (Plane("m", "float32", 4), Plane("v", "float32", 4)),
    "bfloat16": (Plane("m", "uint16", 2), Plane("v", "uint16", 2)),
    "int8": (
        Plane("m", "int8", 1),
        Plane("v", "uint8", 1),
        Plane("m_unit", "float32", 4, MOMENT_BLOCK_ELEMENTS),
        Plane("v_unit", "float32", 4, MOMENT_BLOCK_ELEMENTS),
    ),
}
# How moments may be kept; the first is the default, and the only one that is exact. `OTHER_NAMES` are what people call them
# besides.
MOMENTS = tuple(MOMENT_PLANES)
OTHER_NAMES = {"bf16": "bfloat16", "fp32": "float32", "8bit": "int8", "uint8": "int8"}
# The largest codes of 8-bit moments: a first moment has a sign and 7 bits, the root of a second moment has 8 bits.
LARGEST_M, LARGEST_V = 127, 255
# Shift and factor of each round of the hash for random rounding, and the shift after the last round: see `_noise`.
NOISE_ROUNDS = ((16, 0x7FEB352D), (15, 0x846CA68B))
NOISE_LAST_SHIFT = 16
# A block whose first moments are all smaller than this is kept as zero: its unit would have no inverse in fp32. AdamW's steps
# for such moments vanish beside any epsilon in use.
SMALLEST_M = 2.0**-100


@intrinsic  # type: ignore[untyped-decorator]
def _noise(context: Any, element: Any, key: Any) -> Any:
    """Return 32 random bits (uint32) for an element: a hash of the lower 32 bits of its number, and of `key`.

    It is a counter instead of a generator's state, so that the bits do not depend on who computes them, in which order
    (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). The mixing function is `lowbias32` of C. Wellons's
    hash prospector (2018, public domain): two rounds of multiply and xor-shift, of low bias in every output bit.
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


def _decode_tensors_bfloat16(planes: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple((bits.view(torch.int16).to(torch.int32) << 16).view(torch.float32) for bits in planes)


def _encode_tensors_bfloat16(states: Sequence[Tensor], noise: Noise) -> tuple[Tensor, ...]:
    """Return bfloat16 bits (int16): 16 random bits are added below the last place, then cut off. NaN becomes the quiet NaN."""
    bits = _random_bits(noise, states[0])
    return tuple(_to_bfloat16(state, half) for state, half in zip(states, (_upper(bits), _lower(bits)), strict=True))


def tensor_rounded_at_random(values: Tensor, noise: Noise) -> Tensor:
    """Return bfloat16 bits (int16) of fp32 values: `rounded_at_random` of each."""
    return _to_bfloat16(values, _lower(_random_bits(noise, values)))


def _decode_tensors_int8(planes: Sequence[Tensor]) -> tuple[Tensor, ...]:
    m, v, *units = planes
    m_unit, v_unit = (_by_block(unit, m.numel()) for unit in units)
    code = m.to(torch.float32)
    root = v.to(torch.float32)
    root = (root * root) * v_unit
    return (code * code.abs()) * m_unit, root * root


def _encode_tensors_int8(states: Sequence[Tensor], noise: Noise) -> tuple[Tensor, ...]:
    m, root = states[0], root_of(states[1])
    bits, n = _random_bits(noise, m), m.numel()
    largest_m, largest_root = _largest_of_blocks(m), _largest_of_blocks(root)
    m_unit = (largest_m * _fp32(1 / LARGEST_M**2)).masked_fill(largest_m < SMALLEST_M, 0.0)
    v_unit = largest_root * _fp32(1 / LARGEST_V**2)
    broken = ~(largest_m.isfinite() & largest_root.isfinite())
    m_inverse, v_inverse = (
        # A tensor of ones, because torch turns the division of a number by a tensor into a product with the inverse.
        _by_block((torch.ones_like(unit) / unit).masked_fill((unit == 0) | broken, 0.0), n)
        for unit in (m_unit, v_unit)
    )
    zero = _by_block(broken, n)
    value = (m.abs() * m_inverse).masked_fill(zero, 0.0)
    low = root_of(value).floor().clamp_max(LARGEST_M - 1)
    below, above = low * low, (low + 1) * (low + 1)
    up = _as_fraction(_upper(bits)) * (above - below) < value - below
    code = low + up
    m_code = torch.where(m > 0, code, -code).to(torch.int8)
    value = (root * v_inverse).masked_fill(zero, 0.0)
    low = root_of(value).floor().clamp_max(LARGEST_V - 1)
    below, above = low * low, (low + 1) * (low + 1)
    up = _as_fraction(_lower(bits)) * ((above - below) * (above + below)) < (value - below) * (value + below)
    v_code = torch.maximum(low + up, (value > 0).to(torch.float32)).to(torch.uint8)
    return m_code, v_code, *(unit.masked_fill(broken, float("nan")) for unit in (m_unit, v_unit))


def _largest_of_blocks(values: Tensor) -> Tensor:
    """Return the largest magnitude of each block, NaN where the block has one."""
    padded = torch.nn.functional.pad(values.abs(), (0, -values.numel() % MOMENT_BLOCK_ELEMENTS))
    return padded.view(-1, MOMENT_BLOCK_ELEMENTS).amax(dim=1)


def _by_block(units: Tensor, num_elements: int) -> Tensor:
    """Return for each element its block's number."""
    return units.repeat_interleave(MOMENT_BLOCK_ELEMENTS)[:num_elements]


def _fp32(value: float) -> float:
    """Return `value` rounded to fp32 once."""
    return float(torch.tensor(value, dtype=torch.float32))


def _random_bits(noise: Noise, like: Tensor) -> Tensor:
    """Return 32 random bits for each element as int32, as `_noise` does: products wrap around in both."""
    value = torch.arange(like.numel(), dtype=torch.int32, device=like.device) + _signed(noise.first_element)
    value ^= _signed(noise.key)
    for shift, factor in NOISE_ROUNDS:
        value ^= _shifted(value, shift)
        value *= _signed(factor)
    return value ^ _shifted(value, NOISE_LAST_SHIFT)


def _signed(word: int) -> int:
    """Return the int32 that has the lower 32 bits of `word`."""
    return (word + (1 << 31)) % (1 << 32) - (1 << 31)


def _shifted(bits: Tensor, places: int) -> Tensor:
    """Return int32 `bits` shifted to the right, filled up with zeros."""
    return (bits >> places) & ((1 << (32 - places)) - 1)


def _upper(bits: Tensor) -> Tensor:
    return _shifted(bits, 16)


def _lower(bits: Tensor) -> Tensor:
    return bits & 0xFFFF


def _as_fraction(half: Tensor) -> Tensor:
    """Return 16 random bits as a number inside (0, 1)."""
    return (half.to(torch.float32) + 0.5) * 2.0**-16


def _to_bfloat16(values: Tensor, half: Tensor) -> Tensor:
    return ((rounded_bits(values) + half) >> 16).to(torch.int16)


# By the names of `MOMENTS`; None for moments that are kept without a code.
MOMENT_CODES: dict[str, StateCode | None] = {
    "float32": None,
    "bfloat16": StateCode(_scratch, _decode_bfloat16, _encode_bfloat16, _decode_tensors_bfloat16, _encode_tensors_bfloat16),
    "int8": StateCode(_scratch, _decode_int8, _encode_int8, _decode_tensors_int8, _encode_tensors_int8),
}
