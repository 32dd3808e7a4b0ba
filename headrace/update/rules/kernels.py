"""Numbers of the planes, element by element (split master, casts), and the compiled loops that need no rule: square sums.

Its users are `norm`, which checks its arguments, and `loops`, which combines these functions with a rule's arithmetic. Nothing
is checked here, and an index out of range would corrupt memory. Threads are not here: a loop runs on one core without the GIL;
`sites/host.py` runs several at once.

Invariant: every operation is one of IEEE's on fp32, rounded once, in the order written. So there is no `fastmath`, and no
contraction to fused multiply-add. The bits are those of `tensors`, however a range is cut and however wide the registers are.

The loops below and their callees stand in this one file. Numba's cache on disk notices a change only in the file of a loop.
Loops composed from several files have a digest of them in their key: see `loops`.

Legend: a gradient is uint16 (bfloat16 bits), int16 (float16 bits: the type alone distinguishes them) or float32.
"""

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from headrace.machine.jit import compiled, full_width
from headrace.terms.layout import UNIT_ALIGNMENT
from headrace.terms.split_master import QUIET_NAN_BITS

# Elements of a block of the square sum: the largest length that divides every chunk into which a unit can be cut.
BLOCK_ELEMENTS = UNIT_ALIGNMENT
# Independent fp64 accumulators of a block. It is fixed, and not the register width, so that the sum is the same on every
# machine. 64 of them hide the latency of an addition whose operand travels through the first-level cache.
LANES = 64


@intrinsic  # type: ignore[untyped-decorator]
def as_float(context: Any, bits: Any) -> Any:
    """Reinterpret uint32 as float32."""
    return types.float32(types.uint32), lambda ctx, builder, sig, args: builder.bitcast(args[0], ir.FloatType())


@intrinsic  # type: ignore[untyped-decorator]
def joined(context: Any, hi: Any, lo: Any) -> Any:
    """Return the float32 whose halves are `hi` and `lo`."""

    # Written in LLVM's language because numba widens every integer operation to 64 bits, which halves the vector width.
    def lower(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        word = ir.IntType(32)
        high = builder.bitcast(_lower_from_bfloat16(ctx, builder, sig, args), word)
        return builder.bitcast(builder.add(high, builder.sext(args[1], word)), ir.FloatType())

    return types.float32(types.uint16, types.int16), lower


@intrinsic  # type: ignore[untyped-decorator]
def upper_half(context: Any, value: Any) -> Any:
    """Return the bfloat16 bits of a float32, rounded half away from zero; `value` must not be NaN."""

    def lower(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        word = ir.IntType(32)
        rounded = builder.add(builder.bitcast(args[0], word), ir.Constant(word, 0x8000))
        return builder.trunc(builder.lshr(rounded, ir.Constant(word, 16)), ir.IntType(16))

    return types.uint16(types.float32), lower


@intrinsic  # type: ignore[untyped-decorator]
def lower_half(context: Any, value: Any) -> Any:
    """Return what `upper_half` leaves of a float32: the lower half of its bits, read as int16."""

    def lower(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.trunc(builder.bitcast(args[0], ir.IntType(32)), ir.IntType(16))

    return types.int16(types.float32), lower


def _lower_from_bfloat16(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
    """Emit the float32 that bfloat16 bits stand for."""
    word = ir.IntType(32)
    return builder.bitcast(builder.shl(builder.zext(args[0], word), ir.Constant(word, 16)), ir.FloatType())


def _lower_from_float16(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
    """Emit the float32 that float16 bits stand for.

    It uses integer operations and one exact multiplication. LLVM's own conversion calls a C library function, which numba
    lacks, on processors without the instruction.
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
def narrowed_float16(context: Any, value: Any) -> Any:
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
def widened(context: Any, element: Any) -> Any:
    """Return an element of `gradient` as float32, by its type: see the legend."""
    if element == types.uint16:
        return types.float32(element), _lower_from_bfloat16
    if element == types.int16:
        return types.float32(element), _lower_from_float16
    return types.float32(types.float32), lambda ctx, builder, sig, args: args[0]


@intrinsic  # type: ignore[untyped-decorator]
def not_nan(context: Any, value: Any) -> Any:
    """Return `value`, or the quiet NaN in place of any NaN: a larger payload would round to minus zero in bfloat16."""

    def lower(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        quiet = builder.bitcast(ir.Constant(ir.IntType(32), QUIET_NAN_BITS), ir.FloatType())
        return builder.select(builder.fcmp_unordered("uno", args[0], args[0]), quiet, args[0])

    return types.float32(types.float32), lower


@compiled
def write_block_square_sums(gradient: Any, sums: Any) -> None:
    """Write the sum of squares of each block of `gradient` to `sums`, in fp64, where a square of an fp32 number is exact.

    Element `j` of a block is added to lane `j % LANES`; then the lanes are added in order.
    """
    full_width()
    lanes = np.empty(LANES, np.float64)
    for index in range(sums.size):
        block = gradient[index * BLOCK_ELEMENTS : (index + 1) * BLOCK_ELEMENTS]
        lanes[:] = 0.0
        for row in range((block.size + LANES - 1) // LANES):
            # A slice starts at index 0, which tells numba that no index is negative; sums of indices would not vectorise.
            part = block[row * LANES : (row + 1) * LANES]
            for lane in range(part.size):
                value = np.float64(widened(part[lane]))
                lanes[lane] += value * value
        total = 0.0
        for lane in range(LANES):
            total += lanes[lane]
        sums[index] = total


@compiled
def add_sums_in_order(sums: Any, carry: Any) -> Any:
    """Return `carry` plus all `sums`, added one after the other."""
    for i in range(sums.size):
        carry += sums[i]
    return carry
