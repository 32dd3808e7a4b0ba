"""Products of few rows with four-bit weights on a GPU, in Triton: weights are decoded in registers and never stored.

After MARLIN (Frantar et al., 2024). Codes have a layout of their own, made once. Sums over inputs are cut in *splits*, whose
partial sums another kernel adds in order. `device_products` alone imports this module, and tells the layout.

Invariant: tiles and splits follow from shapes alone, and no sum is by atomic additions, so a repetition gives the same bits.
Triton's interpreter computes bfloat16 wrongly. So numbers are float32 here, rounded by hand, and become bfloat16 or float16
only as operands of `tl.dot` on a GPU (`native`).
"""

import triton
import triton.language as tl


@triton.jit
def _as_float32(stored, bfloat: tl.constexpr):
    """Return float32 of bfloat16's bits as int16, or of float16."""
    if bfloat:
        return (stored.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return stored.to(tl.float32)


@triton.jit
def _rounded(value, bfloat: tl.constexpr):
    """Return float32 rounded to the nearest bfloat16 or float16, ties to even."""
    if bfloat:
        bits = value.to(tl.uint32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return value.to(tl.float16).to(tl.float32)


@triton.jit
def _weights(code, scale, zero, microscaled: tl.constexpr, bfloat_scales: tl.constexpr, bfloat: tl.constexpr):
    """Return decoded weights as float32, with the bits that the host decodes to."""
    if microscaled:
        three = code & 7
        size = tl.where(three < 2, 0.5 * three, 0.25 * ((2 + (three & 1)) * (1 << (three >> 1))))
        return _rounded(tl.where(code > 7, -1.0, 1.0) * size * scale, bfloat)
    value = _rounded((code - zero).to(tl.float32) * scale, bfloat_scales)
    return value if bfloat_scales == bfloat else _rounded(value, bfloat)


@triton.jit
def _sides(
    scales, zeros, group, output, outputs, microscaled: tl.constexpr, has_zeros: tl.constexpr, bfloat_scales: tl.constexpr
):
    """Return the scales, float32, and zero points, int32, of one group of some outputs."""
    mask = output < outputs
    stored = tl.load(scales + group * outputs + output, mask=mask, other=0)
    if microscaled:
        power = stored.to(tl.int32)
        scale = tl.where(power > 0, power << 23, 1 << 22).to(tl.float32, bitcast=True)
    else:
        scale = _as_float32(stored, bfloat_scales)
    if has_zeros:
        word = tl.load(zeros + group * (outputs // 8) + output // 8, mask=mask, other=0)
        return scale, (word >> (4 * (output % 8))) & 15
    return scale, tl.full(scale.shape, 8, tl.int32)


@triton.jit
def rows_times_coded(
    rows,
    words,
    scales,
    zeros,
    partial,
    num_rows,
    inputs,
    outputs,
    tiles_of_split,
    group: tl.constexpr,
    microscaled: tl.constexpr,
    has_zeros: tl.constexpr,
    bfloat_scales: tl.constexpr,
    bfloat: tl.constexpr,
    native: tl.constexpr,
    block_rows: tl.constexpr,
    block_outputs: tl.constexpr,
):
    """Fill `partial` (splits, num_rows, outputs) float32: program (o, s) has a block of outputs, and the inputs of split s.

    `rows` (num_rows, inputs) are float16, or int16 with bfloat16's bits. `words` are (tiles, 16, outputs) int32, `scales`
    (groups, outputs), `zeros` (groups, outputs / 8) int32 with eight to a word. `microscaled` weights are MXFP4's, others
    (code - zero point) times scale.
    """
    output = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)
    row, lane = tl.arange(0, block_rows), tl.arange(0, 16)
    inside = output < outputs
    total = tl.zeros((block_rows, block_outputs), tl.float32)
    first = tl.program_id(1) * tiles_of_split
    last = tl.minimum(first + tiles_of_split, tl.cdiv(inputs, 128))
    for tile in range(first, last):
        place = (tile * 16 + lane).to(tl.int64)[:, None] * outputs + output[None, :]
        packed = tl.load(words + place, mask=inside[None, :], other=0)
        if group >= 128:
            scale, zero = _sides(scales, zeros, tile * 128 // group, output, outputs, microscaled, has_zeros, bfloat_scales)
        for step in tl.static_range(8):
            begin = tile * 128 + step * 16
            if group < 128:
                own = tl.minimum(begin, inputs - 1) // group
                scale, zero = _sides(scales, zeros, own, output, outputs, microscaled, has_zeros, bfloat_scales)
            code = (packed >> (4 * step)) & 15
            weights = _weights(code, scale[None, :], zero[None, :], microscaled, bfloat_scales, bfloat)
            column = begin + lane
            mask = (row < num_rows)[:, None] & (column < inputs)[None, :]
            stored = tl.load(rows + row[:, None] * inputs + column[None, :], mask=mask, other=0)
            left = _as_float32(stored, bfloat)
            if native and bfloat:
                total = tl.dot(left.to(tl.bfloat16), weights.to(tl.bfloat16), total)
            elif native:
                total = tl.dot(left.to(tl.float16), weights.to(tl.float16), total)
            else:
                total = tl.dot(left, weights, total, input_precision="ieee")
    line = (tl.program_id(1) * num_rows + row).to(tl.int64)[:, None] * outputs + output[None, :]
    tl.store(partial + line, total, mask=(row < num_rows)[:, None] & inside[None, :])


@triton.jit
def sum_of_splits(partial, out, numbers, splits, bfloat: tl.constexpr, block: tl.constexpr):
    """Fill `out` (numbers), float16 or bfloat16's bits, with sums of `partial` (splits, numbers), in the order of splits."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    total = tl.zeros((block,), tl.float32)
    for split in range(splits):
        total += tl.load(partial + split * numbers + at, mask=at < numbers, other=0.0)
    total = _rounded(total, bfloat)
    if bfloat:
        tl.store(out + at, (total.to(tl.uint32, bitcast=True) >> 16).to(tl.int16), mask=at < numbers)
    else:
        tl.store(out + at, total.to(tl.float16), mask=at < numbers)


@triton.jit
def coded_to_dense(
    words,
    scales,
    zeros,
    out,
    inputs,
    outputs,
    group: tl.constexpr,
    microscaled: tl.constexpr,
    has_zeros: tl.constexpr,
    bfloat_scales: tl.constexpr,
    bfloat: tl.constexpr,
    by_input: tl.constexpr,
    block_outputs: tl.constexpr,
):
    """Decode the codes of program (o, t): a block of outputs, the inputs of tile t. `out` has the host's bits.

    It is (inputs, outputs) with `by_input`, (outputs, inputs) without; float16, or int16 with bfloat16's bits.
    """
    output = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)
    lane, inside = tl.arange(0, 16), output < outputs
    place = (tl.program_id(1) * 16 + lane).to(tl.int64)[:, None] * outputs + output[None, :]
    packed = tl.load(words + place, mask=inside[None, :], other=0)
    for step in tl.static_range(8):
        begin = tl.program_id(1) * 128 + step * 16
        own = tl.minimum(begin, inputs - 1) // group
        scale, zero = _sides(scales, zeros, own, output, outputs, microscaled, has_zeros, bfloat_scales)
        weights = _weights((packed >> (4 * step)) & 15, scale[None, :], zero[None, :], microscaled, bfloat_scales, bfloat)
        column = (begin + lane).to(tl.int64)[:, None]
        there = column * outputs + output[None, :] if by_input else output[None, :].to(tl.int64) * inputs + column
        mask = inside[None, :] & (column < inputs)
        if bfloat:
            tl.store(out + there, (weights.to(tl.uint32, bitcast=True) >> 16).to(tl.int16), mask=mask)
        else:
            tl.store(out + there, weights.to(tl.float16), mask=mask)


@triton.jit
def words_in_tiles(stored, words, outputs, words_of_output, block_outputs: tl.constexpr):
    """Fill the words of program (o, t), a block of outputs in tile t, from `stored` (outputs, words_of_output).

    Code k of a stored word is that of its k-th input.
    """
    output = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)
    lane, inside = tl.arange(0, 16), output < outputs
    found = tl.zeros((16, block_outputs), tl.int32)
    for step in tl.static_range(8):
        at = tl.program_id(1) * 16 + 2 * step + lane // 8
        mask = inside[None, :] & (at < words_of_output)[:, None]
        place = output[None, :].to(tl.int64) * words_of_output + at[:, None]
        word = tl.load(stored + place, mask=mask, other=0)
        found |= ((word >> (4 * (lane % 8))[:, None]) & 15) << (4 * step)
    place = (tl.program_id(1) * 16 + lane).to(tl.int64)[:, None] * outputs + output[None, :]
    tl.store(words + place, found, mask=inside[None, :])
