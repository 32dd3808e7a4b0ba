"""Every compiled loop of the update: AdamW over all plane sets, with checksums on the way, the split master, square sums.

For whom: `adamw`, `split` and `norm`, which check what they are given; nothing is checked here, and an index out of range would
corrupt memory. Not here: threads. A loop runs on one core without the GIL; `parallel` runs several at once.

Invariant: an element's new value depends on that element and the coefficients alone, by IEEE operations of fp32, each rounded
once, in the order written. So no `fastmath` and no contraction to fused multiply-add: the bits are those of `reference`,
however a range is cut and whatever the width of the registers. Where moments have fewer than 32 bits, the new value also
depends on the element's place in the model and the step, by `_noise`; with 8 bits on the block that the element lies in.

All loops are in this one file because numba's cache on disk notices a change only of the file that a loop stands in.

Legend: `gradient` is uint16 (bfloat16 bits), int16 (float16 bits: the type alone tells the two apart) or float32; `k` is the
float32 vector `Coefficients.vector()`; `key` and `first` place the first element among the random numbers (`base.noise_key`).
"""

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic, overload
from numba.np.arrayobj import make_array

from headrace.machine.jit import compiled
from headrace.terms.layout import MOMENT_BLOCK_ELEMENTS, UNIT_ALIGNMENT

# A block of the square sum: the largest length that divides every chunk a unit can be cut into.
BLOCK_ELEMENTS = UNIT_ALIGNMENT
# Independent fp64 accumulators of a block. Fixed, not the register width, so that the sum is the same on every machine;
# 64 hide the latency of an addition whose operand travels through the first-level cache.
LANES = 64

# Elements that are updated and then summed up for their checksums: 448 KiB with their gradient, for a second-level cache.
SUMMED_ELEMENTS = 32768
# The constants of `store.checksum`, whose loop is here once more: the sum must be compiled into the loops that need it.
CHECKSUM_ODD, CHECKSUM_MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)

# The loops of AdamW run over strips, a cache line of the narrowest plane, and ask for what they will need so far ahead: a
# processor's own prefetching ends with each page of each of the five arrays. Measured (LOG.md, 2026-11-22): 1.1 times as fast;
# 128 to 512 ahead are alike, 1024 is worse. Unsigned, for an index that may be negative would be tested for each element.
LINE_BYTES = 64
STRIP_ELEMENTS, AHEAD_ELEMENTS = np.uint64(32), np.uint64(256)

# The largest codes of 8-bit moments: a first moment is a sign and 7 bits, the root of a second one 8 bits.
LARGEST_M, LARGEST_V = 127, 255
# Elements whose moments are decoded at once. The blocks of 8-bit moments are tiles.
TILE_ELEMENTS = MOMENT_BLOCK_ELEMENTS
# Shift and factor of each round of the hash behind random rounding, and the shift after the last: see `_noise`.
NOISE_ROUNDS = ((16, 0x7FEB352D), (15, 0x846CA68B))
NOISE_LAST_SHIFT = 16
# A block whose first moments are all smaller than this is kept as zero: its unit would have no inverse in fp32. AdamW's steps
# for such moments are nothing beside any epsilon in use.
SMALLEST_M = 2.0**-100


@intrinsic  # type: ignore[untyped-decorator]
def _full_width(context: Any) -> Any:
    """Ask for the widest registers there are, in the function that calls this.

    LLVM keeps to half of them on several processors with AVX-512, for the sake of code that has few such loops. Measured on one
    (LOG.md, 2026-11-22): the update gets 0.88 to 0.95 of the stream instead of 0.70 to 0.90.
    """

    def lower(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        # llvmlite's own `add` takes attributes without a value only; what is in the set it writes as it stands.
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return ctx.get_dummy_value()

    return types.none(), lower


@intrinsic  # type: ignore[untyped-decorator]
def _as_float(context: Any, bits: Any) -> Any:
    """Reinterpret uint32 as float32."""
    return types.float32(types.uint32), lambda ctx, builder, sig, args: builder.bitcast(args[0], ir.FloatType())


@intrinsic  # type: ignore[untyped-decorator]
def _as_bits(context: Any, value: Any) -> Any:
    """Reinterpret float32 as uint32."""
    return types.uint32(types.float32), lambda ctx, builder, sig, args: builder.bitcast(args[0], ir.IntType(32))


@intrinsic  # type: ignore[untyped-decorator]
def _join(context: Any, hi: Any, lo: Any) -> Any:
    """Return the float32 whose bits are `(hi << 16) + lo`."""

    # Written in LLVM's language because numba widens every integer operation to 64 bits, which halves the vector width.
    def lower(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        word = ir.IntType(32)
        high = builder.shl(builder.zext(args[0], word), ir.Constant(word, 16))
        return builder.bitcast(builder.add(high, builder.sext(args[1], word)), ir.FloatType())

    return types.float32(types.uint16, types.int16), lower


@intrinsic  # type: ignore[untyped-decorator]
def _high(context: Any, value: Any) -> Any:
    """Return the bfloat16 bits of a float32, rounded half away from zero; `value` must not be NaN."""

    def lower(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        word = ir.IntType(32)
        rounded = builder.add(builder.bitcast(args[0], word), ir.Constant(word, 0x8000))
        return builder.trunc(builder.lshr(rounded, ir.Constant(word, 16)), ir.IntType(16))

    return types.uint16(types.float32), lower


@intrinsic  # type: ignore[untyped-decorator]
def _low(context: Any, value: Any) -> Any:
    """Return what `_high` leaves of a float32: `bits - (hi << 16)`, which is the lower half of its bits read as int16."""

    def lower(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.trunc(builder.bitcast(args[0], ir.IntType(32)), ir.IntType(16))

    return types.int16(types.float32), lower


def _lower_from_bfloat16(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
    """Emit the float32 that bfloat16 bits stand for."""
    word = ir.IntType(32)
    return builder.bitcast(builder.shl(builder.zext(args[0], word), ir.Constant(word, 16)), ir.FloatType())


def _lower_from_float16(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
    """Emit the float32 that float16 bits stand for.

    By integer operations and one exact multiplication, because LLVM's own conversion calls a C library function, which numba
    does not have, on processors without the instruction.
    """
    word, real = ir.IntType(32), ir.FloatType()
    # Widened with its sign and shifted, the sign lies at the top and the magnitude in place.
    moved = builder.shl(builder.sext(args[0], word), ir.Constant(word, 13))
    signed = builder.and_(moved, ir.Constant(word, 0x8FFFE000))
    # The exponent bias of float32 is greater by 112. A subnormal float16 is a subnormal float32 here; the product is normal.
    scaled = builder.bitcast(builder.fmul(builder.bitcast(signed, real), ir.Constant(real, 2.0**112)), word)
    magnitude = builder.and_(signed, ir.Constant(word, 0x7FFFFFFF))
    special = builder.icmp_unsigned(">=", magnitude, ir.Constant(word, 0x7C00 << 13))
    exponent = builder.select(special, ir.Constant(word, 0x7F800000), ir.Constant(word, 0))
    return builder.bitcast(builder.or_(scaled, exponent), real)


@intrinsic  # type: ignore[untyped-decorator]
def _narrow_float16(context: Any, value: Any) -> Any:
    """Return the float16 bits nearest to a float32, ties to even; beyond 65520 infinity; NaN becomes the quiet NaN 0x7E00."""

    def lower(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        word, real = ir.IntType(32), ir.FloatType()
        bits = builder.bitcast(args[0], word)
        magnitude = builder.and_(bits, ir.Constant(word, 0x7FFFFFFF))
        # Adding just less than half of the last place kept, plus that place's bit, rounds to nearest even.
        odd = builder.and_(builder.lshr(magnitude, ir.Constant(word, 13)), ir.Constant(word, 1))
        rebiased = builder.add(builder.sub(magnitude, ir.Constant(word, 112 << 23)), ir.Constant(word, 0xFFF))
        normal = builder.lshr(builder.add(rebiased, odd), ir.Constant(word, 13))
        # Below 2^-14 the last place is 2^-24, which is the last place of float32 at 0.5: the addition does the rounding.
        shifted = builder.fadd(builder.bitcast(magnitude, real), ir.Constant(real, 0.5))
        tiny = builder.sub(builder.bitcast(shifted, word), ir.Constant(word, 0x3F000000))
        finite = builder.select(builder.icmp_unsigned("<", magnitude, ir.Constant(word, 113 << 23)), tiny, normal)
        huge = builder.icmp_unsigned(">=", magnitude, ir.Constant(word, 0x47800000))
        nan = builder.icmp_unsigned(">", magnitude, ir.Constant(word, 0x7F800000))
        special = builder.select(nan, ir.Constant(word, 0x7E00), ir.Constant(word, 0x7C00))
        sign = builder.lshr(builder.and_(bits, ir.Constant(word, 0x80000000)), ir.Constant(word, 16))
        return builder.trunc(builder.or_(builder.select(huge, special, finite), sign), ir.IntType(16))

    return types.uint16(types.float32), lower


@intrinsic  # type: ignore[untyped-decorator]
def _widen(context: Any, element: Any) -> Any:
    """Return an element of `gradient` as float32, by its type: see the legend."""
    if element == types.uint16:
        return types.float32(element), _lower_from_bfloat16
    if element == types.int16:
        return types.float32(element), _lower_from_float16
    return types.float32(types.float32), lambda ctx, builder, sig, args: args[0]


@intrinsic  # type: ignore[untyped-decorator]
def _not_nan(context: Any, value: Any) -> Any:
    """Return `value`, or the quiet NaN 0x7FC00000 for any NaN: a larger payload would round to minus zero in bfloat16."""

    def lower(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        quiet = builder.bitcast(ir.Constant(ir.IntType(32), 0x7FC00000), ir.FloatType())
        return builder.select(builder.fcmp_unordered("uno", args[0], args[0]), quiet, args[0])

    return types.float32(types.float32), lower


@intrinsic  # type: ignore[untyped-decorator]
def _request(context: Any, arrays: Any, first: Any) -> Any:
    """Ask for elements `first` to `first + STRIP_ELEMENTS` of each array to be brought into the caches; there need be none."""

    def lower(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        word, address = ir.IntType(32), ir.IntType(8).as_pointer()
        signature = ir.FunctionType(ir.VoidType(), [address, word, word, word])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [address], signature)
        for place, array in enumerate(arrays):
            data = make_array(array)(ctx, builder, builder.extract_value(args[0], place)).data
            for element in range(0, int(STRIP_ELEMENTS), LINE_BYTES // (array.dtype.bitwidth // 8)):
                line = builder.gep(data, [builder.add(args[1], ir.Constant(args[1].type, element))])
                # To be read; into all levels of the caches; data.
                builder.call(prefetch, [builder.bitcast(line, address), word(0), word(3), word(1)])
        return ctx.get_dummy_value()

    return types.none(arrays, first), lower


def _update(i: Any, planes: Any, gradient: Any, coefficients: Any) -> None:
    """Update element `i` of `planes`, as their types ask for."""


@overload(_update)  # type: ignore[untyped-decorator]
def _update_of_types(i: Any, planes: Any, gradient: Any, coefficients: Any) -> Any:
    def bfloat16(i: Any, planes: Any, gradient: Any, coefficients: Any) -> None:
        hi, lo, m, v = planes
        p, m[i], v[i] = _updated(_join(hi[i], lo[i]), m[i], v[i], _widen(gradient[i]), coefficients)
        p = _not_nan(p)
        hi[i] = _high(p)
        lo[i] = _low(p)

    def float32(i: Any, planes: Any, gradient: Any, coefficients: Any) -> None:
        w, m, v = planes
        w[i], m[i], v[i] = _updated(w[i], m[i], v[i], _widen(gradient[i]), coefficients)

    def float16(i: Any, planes: Any, gradient: Any, coefficients: Any) -> None:
        w16, w, m, v = planes
        w[i], m[i], v[i] = _updated(w[i], m[i], v[i], _widen(gradient[i]), coefficients)
        w16[i] = _narrow_float16(w[i])

    if len(planes) == 3:
        return float32
    return bfloat16 if planes[1].dtype == types.int16 else float16


@compiled
def _updated(p: Any, m: Any, v: Any, g: Any, coefficients: Any) -> Any:
    """Return weight and moments of an element after an update by gradient `g`: the arithmetic of AdamW, for all planes."""
    scale, decay, toward, moment, keep, gain, rate, correction, eps = coefficients
    g = g * scale
    m_new = (g if toward != 0 else m) + (g - m) * moment
    v_new = v * keep + (g * gain) * g
    return p * decay - (m_new * rate) / (np.sqrt(v_new) * correction + eps), m_new, v_new


@compiled
def _adamw(planes: Any, gradient: Any, k: Any) -> None:
    _full_width()
    # Read once: for all that the compiler knows, they might lie where the loop writes.
    coefficients = k[0], k[1], k[2], k[3], k[4], k[5], k[6], k[7], k[8]
    num_elements = np.uint64(gradient.size)
    whole = num_elements // STRIP_ELEMENTS * STRIP_ELEMENTS
    for start in range(np.uint64(0), whole, STRIP_ELEMENTS):
        _request((*planes, gradient), start + AHEAD_ELEMENTS)
        for j in range(STRIP_ELEMENTS):
            _update(start + j, planes, gradient, coefficients)
    for i in range(whole, num_elements):
        _update(i, planes, gradient, coefficients)


@compiled
def adamw_bfloat16(hi: Any, lo: Any, m: Any, v: Any, gradient: Any, k: Any) -> None:
    """AdamW on the split master, in place: 26 bytes of memory traffic per element with a bfloat16 gradient."""
    _adamw((hi, lo, m, v), gradient, k)


@compiled
def adamw_float32(w: Any, m: Any, v: Any, gradient: Any, k: Any) -> None:
    """AdamW on fp32 weights, in place."""
    _adamw((w, m, v), gradient, k)


@compiled
def adamw_float16(w16: Any, w: Any, m: Any, v: Any, gradient: Any, k: Any) -> None:
    """AdamW on the fp32 master `w`, in place; `w16` (uint16, float16 bits) becomes its nearest float16."""
    _adamw((w16, w, m, v), gradient, k)


# The same with checksums of what will be written, tile by tile: a pass of its own would read from memory again what the caches
# hold now, at a quarter of the speed. `words` are all planes as uint64, weights first; `firsts` the index of each one's first
# word in what is written; `sums` (uint64) are added to: of the weights, and of all states together.


@compiled
def add_words(words: Any, first: Any, total: Any) -> Any:
    """Return `total` plus what words `first, first + 1, ...` of a buffer add to its checksum."""
    _full_width()
    weight = (np.uint64(2) * np.uint64(first) + np.uint64(1)) * CHECKSUM_ODD
    step = CHECKSUM_ODD + CHECKSUM_ODD  # wraps, as everything here
    for i in range(words.size):
        mixed = words[i] * CHECKSUM_MIX
        total += (mixed ^ (mixed >> np.uint64(32))) * weight
        weight += step
    return total


@compiled
def _add_tile(words: Any, firsts: Any, sums: Any, start: Any, stop: Any, num_elements: Any) -> None:
    _full_width()
    for plane in range(len(words)):
        begin, end = start * words[plane].size // num_elements, stop * words[plane].size // num_elements
        of = min(plane, 1)
        sums[of] = add_words(words[plane][begin:end], firsts[plane] + begin, sums[of])


@compiled
def adamw_bfloat16_summed(hi: Any, lo: Any, m: Any, v: Any, gradient: Any, k: Any, words: Any, firsts: Any, sums: Any) -> None:
    """`adamw_bfloat16` and checksums."""
    _full_width()
    for start in range(0, hi.size, SUMMED_ELEMENTS):
        stop = min(start + SUMMED_ELEMENTS, hi.size)
        adamw_bfloat16(hi[start:stop], lo[start:stop], m[start:stop], v[start:stop], gradient[start:stop], k)
        _add_tile(words, firsts, sums, start, stop, hi.size)


@compiled
def adamw_float32_summed(w: Any, m: Any, v: Any, gradient: Any, k: Any, words: Any, firsts: Any, sums: Any) -> None:
    """`adamw_float32` and checksums."""
    _full_width()
    for start in range(0, w.size, SUMMED_ELEMENTS):
        stop = min(start + SUMMED_ELEMENTS, w.size)
        adamw_float32(w[start:stop], m[start:stop], v[start:stop], gradient[start:stop], k)
        _add_tile(words, firsts, sums, start, stop, w.size)


@compiled
def adamw_float16_summed(w16: Any, w: Any, m: Any, v: Any, gradient: Any, k: Any, words: Any, firsts: Any, sums: Any) -> None:
    """`adamw_float16` and checksums."""
    _full_width()
    for start in range(0, w.size, SUMMED_ELEMENTS):
        stop = min(start + SUMMED_ELEMENTS, w.size)
        adamw_float16(w16[start:stop], w[start:stop], m[start:stop], v[start:stop], gradient[start:stop], k)
        _add_tile(words, firsts, sums, start, stop, w.size)


@intrinsic  # type: ignore[untyped-decorator]
def _noise(context: Any, element: Any, key: Any) -> Any:
    """Return 32 random bits (uint32) for an element: a hash of its number, of which the lower 32 bits count, and of `key`.

    A counter instead of a generator's state, so that the bits do not depend on who computes them, in which order
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
    """Return the intrinsic that reads 16 of 32 random bits as a number inside (0, 1): `(bits + 0.5) / 65536`, exactly."""

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
    """Return the bits of a float32 without its sign: as integers they are ordered like the magnitudes, NaN above all."""

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
    """Return the intrinsic that makes an 8-bit integer of a whole float32 in its range."""

    def lower(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.trunc(builder.fptosi(args[0], ir.IntType(32)), ir.IntType(8))

    @intrinsic  # type: ignore[untyped-decorator]
    def code(context: Any, value: Any) -> Any:
        return result(types.float32), lower

    return code


_signed_code, _unsigned_code = _code(types.int8), _code(types.uint8)


def _stochastic_bfloat16(upper: bool) -> Any:
    """Return the intrinsic that rounds a float32 to bfloat16 bits at random, up as often as it is nearer to the upper one.

    Random bits are added below the last place that is kept, and cut off with the rest: exactly unbiased. Not for NaN.
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


# Moments of fewer than 32 bits, a tile at a time: decoded into fp32 numbers that stay in the first-level cache, updated there
# by the loops above, encoded again. So the update is AdamW's to the bit; only what is kept until the next step is rounded, at
# random and without bias in `m` and `v`. Rounding to nearest would lose every change below half a place: with `beta2 = 0.999`
# a second moment falls by a thousandth per step at most, a bfloat16 place is four to eight thousandths, so it would never fall.


@compiled
def _decode_bfloat16(m: Any, v: Any, m_tile: Any, v_tile: Any) -> None:
    _full_width()
    for i in range(m.size):
        m_tile[i] = _widen(m[i])
        v_tile[i] = _widen(v[i])


@compiled
def _encode_bfloat16(m_tile: Any, v_tile: Any, m: Any, v: Any, first: Any, key: Any) -> None:
    _full_width()
    for i in range(m.size):
        bits = _noise(first + i, key)
        m[i] = _narrow_upper(_not_nan(m_tile[i]), bits)
        v[i] = _narrow_lower(_not_nan(v_tile[i]), bits)


@compiled
def _decode_int8(m: Any, v: Any, m_unit: Any, v_unit: Any, m_tile: Any, v_tile: Any) -> None:
    """Decode a block: a first moment is `code * |code|` units, the root of a second one `code^2` units.

    Codes that are roots have their places densest near zero: a moment a hundredth of its block's largest keeps an error of some
    percent, where evenly spaced codes would call it zero or one. Dettmers et al. 2022, "8-bit Optimizers via Block-wise
    Quantization", have the blocks, and a table of codes to the same end; roots need no table.
    """
    _full_width()
    for i in range(m.size):
        code = np.float32(m[i])
        m_tile[i] = (code * np.abs(code)) * m_unit
        code = np.float32(v[i])
        root = (code * code) * v_unit
        v_tile[i] = root * root


@compiled
def _encode_int8(m_tile: Any, v_tile: Any, m: Any, v: Any, m_unit: Any, v_unit: Any, first: Any, key: Any) -> None:
    """Encode a block; `m_unit` and `v_unit` are arrays of one. Overwrites `v_tile`.

    A second moment above zero never becomes zero, or its first moment would be divided by epsilon alone. A block with a number
    that is not finite decodes to NaN throughout.
    """
    _full_width()
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
    unit = _as_float(largest_m) * np.float32(1 / LARGEST_M**2)
    if _as_float(largest_m) < np.float32(SMALLEST_M):
        unit = np.float32(0)
    root_unit = _as_float(largest_root) * np.float32(1 / LARGEST_V**2)
    m_unit[0] = unit
    v_unit[0] = root_unit
    inverse = np.float32(1) / unit if unit > 0 else np.float32(0)
    root_inverse = np.float32(1) / root_unit if root_unit > 0 else np.float32(0)
    for i in range(m.size):
        bits = _noise(first + i, key)
        # Between the codes below and above, up as often as the value is nearer to the upper one's.
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
        gap = (above - below) * (above + below)  # in the second moment itself: the rounding is unbiased there
        code = code + np.float32(1) if _lower_half(bits) * gap < (root - below) * (root + below) else code
        v[i] = _unsigned_code(np.float32(1) if code == 0 and root > 0 else code)


@compiled
def adamw_bfloat16_bfloat16(hi: Any, lo: Any, m: Any, v: Any, gradient: Any, k: Any, first: Any, key: Any) -> None:
    """AdamW on the split master with bfloat16 moments, in place."""
    _full_width()
    m_tile, v_tile = np.empty(TILE_ELEMENTS, np.float32), np.empty(TILE_ELEMENTS, np.float32)
    for start in range(0, m.size, TILE_ELEMENTS):
        stop = min(start + TILE_ELEMENTS, m.size)
        m_now, v_now = m_tile[: stop - start], v_tile[: stop - start]
        _decode_bfloat16(m[start:stop], v[start:stop], m_now, v_now)
        adamw_bfloat16(hi[start:stop], lo[start:stop], m_now, v_now, gradient[start:stop], k)
        _encode_bfloat16(m_now, v_now, m[start:stop], v[start:stop], first + start, key)


@compiled
def adamw_float32_bfloat16(w: Any, m: Any, v: Any, gradient: Any, k: Any, first: Any, key: Any) -> None:
    """AdamW on fp32 weights with bfloat16 moments, in place."""
    _full_width()
    m_tile, v_tile = np.empty(TILE_ELEMENTS, np.float32), np.empty(TILE_ELEMENTS, np.float32)
    for start in range(0, m.size, TILE_ELEMENTS):
        stop = min(start + TILE_ELEMENTS, m.size)
        m_now, v_now = m_tile[: stop - start], v_tile[: stop - start]
        _decode_bfloat16(m[start:stop], v[start:stop], m_now, v_now)
        adamw_float32(w[start:stop], m_now, v_now, gradient[start:stop], k)
        _encode_bfloat16(m_now, v_now, m[start:stop], v[start:stop], first + start, key)


@compiled
def adamw_float16_bfloat16(w16: Any, w: Any, m: Any, v: Any, gradient: Any, k: Any, first: Any, key: Any) -> None:
    """AdamW on the fp32 master of float16 weights with bfloat16 moments, in place."""
    _full_width()
    m_tile, v_tile = np.empty(TILE_ELEMENTS, np.float32), np.empty(TILE_ELEMENTS, np.float32)
    for start in range(0, m.size, TILE_ELEMENTS):
        stop = min(start + TILE_ELEMENTS, m.size)
        m_now, v_now = m_tile[: stop - start], v_tile[: stop - start]
        _decode_bfloat16(m[start:stop], v[start:stop], m_now, v_now)
        adamw_float16(w16[start:stop], w[start:stop], m_now, v_now, gradient[start:stop], k)
        _encode_bfloat16(m_now, v_now, m[start:stop], v[start:stop], first + start, key)


@compiled
def adamw_bfloat16_int8(
    hi: Any, lo: Any, m: Any, v: Any, m_unit: Any, v_unit: Any, gradient: Any, k: Any, first: Any, key: Any
) -> None:
    """AdamW on the split master with 8-bit moments, in place: 14 bytes of memory traffic per element."""
    _full_width()
    m_tile, v_tile = np.empty(TILE_ELEMENTS, np.float32), np.empty(TILE_ELEMENTS, np.float32)
    for block in range(m_unit.size):
        start = block * TILE_ELEMENTS
        stop = min(start + TILE_ELEMENTS, m.size)
        m_now, v_now = m_tile[: stop - start], v_tile[: stop - start]
        _decode_int8(m[start:stop], v[start:stop], m_unit[block], v_unit[block], m_now, v_now)
        adamw_bfloat16(hi[start:stop], lo[start:stop], m_now, v_now, gradient[start:stop], k)
        units = m_unit[block : block + 1], v_unit[block : block + 1]
        _encode_int8(m_now, v_now, m[start:stop], v[start:stop], units[0], units[1], first + start, key)


@compiled
def adamw_float32_int8(w: Any, m: Any, v: Any, m_unit: Any, v_unit: Any, gradient: Any, k: Any, first: Any, key: Any) -> None:
    """AdamW on fp32 weights with 8-bit moments, in place."""
    _full_width()
    m_tile, v_tile = np.empty(TILE_ELEMENTS, np.float32), np.empty(TILE_ELEMENTS, np.float32)
    for block in range(m_unit.size):
        start = block * TILE_ELEMENTS
        stop = min(start + TILE_ELEMENTS, m.size)
        m_now, v_now = m_tile[: stop - start], v_tile[: stop - start]
        _decode_int8(m[start:stop], v[start:stop], m_unit[block], v_unit[block], m_now, v_now)
        adamw_float32(w[start:stop], m_now, v_now, gradient[start:stop], k)
        units = m_unit[block : block + 1], v_unit[block : block + 1]
        _encode_int8(m_now, v_now, m[start:stop], v[start:stop], units[0], units[1], first + start, key)


@compiled
def adamw_float16_int8(
    w16: Any, w: Any, m: Any, v: Any, m_unit: Any, v_unit: Any, gradient: Any, k: Any, first: Any, key: Any
) -> None:
    """AdamW on the fp32 master of float16 weights with 8-bit moments, in place."""
    _full_width()
    m_tile, v_tile = np.empty(TILE_ELEMENTS, np.float32), np.empty(TILE_ELEMENTS, np.float32)
    for block in range(m_unit.size):
        start = block * TILE_ELEMENTS
        stop = min(start + TILE_ELEMENTS, m.size)
        m_now, v_now = m_tile[: stop - start], v_tile[: stop - start]
        _decode_int8(m[start:stop], v[start:stop], m_unit[block], v_unit[block], m_now, v_now)
        adamw_float16(w16[start:stop], w[start:stop], m_now, v_now, gradient[start:stop], k)
        units = m_unit[block : block + 1], v_unit[block : block + 1]
        _encode_int8(m_now, v_now, m[start:stop], v[start:stop], units[0], units[1], first + start, key)


@compiled
def split(master: Any, hi: Any, lo: Any) -> None:
    """Write the two halves of float32 `master` to `hi` and `lo`."""
    _full_width()
    for i in range(master.size):
        value = _not_nan(master[i])
        hi[i] = _high(value)
        lo[i] = _low(value)


@compiled
def join(hi: Any, lo: Any, master: Any) -> None:
    """Write the float32 that `hi` and `lo` are the halves of to `master`."""
    _full_width()
    for i in range(master.size):
        master[i] = _join(hi[i], lo[i])


@compiled
def widen(bits: Any, values: Any) -> None:
    """Write what bfloat16 (uint16) or float16 (int16) `bits` stand for to float32 `values`."""
    _full_width()
    for i in range(values.size):
        values[i] = _widen(bits[i])


@compiled
def narrow_bfloat16(values: Any, bits: Any) -> None:
    """Write the bfloat16 nearest to each float32, ties to even, to uint16 `bits`."""
    _full_width()
    for i in range(bits.size):
        word = _as_bits(_not_nan(values[i]))
        bits[i] = np.uint16((word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@compiled
def block_square_sums(gradient: Any, sums: Any) -> None:
    """Write the sum of squares of each block of `gradient` to `sums`: in fp64, where a square of an fp32 number is exact.

    Element `j` of a block is added to lane `j % LANES`; then the lanes are added in order.
    """
    _full_width()
    lanes = np.empty(LANES, np.float64)
    for index in range(sums.size):
        block = gradient[index * BLOCK_ELEMENTS : (index + 1) * BLOCK_ELEMENTS]
        lanes[:] = 0.0
        for row in range((block.size + LANES - 1) // LANES):
            # A slice starts at index 0, so numba sees that no index is negative; sums of indices would not vectorise.
            part = block[row * LANES : (row + 1) * LANES]
            for lane in range(part.size):
                value = np.float64(_widen(part[lane]))
                lanes[lane] += value * value
        total = 0.0
        for lane in range(LANES):
            total += lanes[lane]
        sums[index] = total


@compiled
def add_in_order(sums: Any, carry: Any) -> Any:
    """Return `carry` plus all `sums`, added one after the other."""
    for i in range(sums.size):
        carry += sums[i]
    return carry
