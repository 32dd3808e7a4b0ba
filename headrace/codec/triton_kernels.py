"""Kernels that decode on a GPU, in Triton: a dictionary's words to weights, four bits and `bf16x12` to bfloat16.

Weights decoded on the host would cross the link to a device whole; so coded bytes cross, and are decoded there. Only
`on_device` imports this module, and says where the kernels work. Nothing here multiplies matrices (`tl.dot`): products of two
numbers are rounded once, as on the host, so that decoded weights have the host's bits.

Invariant: whatever is stored, only the rows asked for are read and written. A row whose words do not yield it is noted in
`damaged`, one int32 that holds the least such row.
"""

import triton
import triton.language as tl


@triton.jit
def words_to_dense(codes, row_offsets, table, levels, out, damaged, num_words, first, columns, chunk: tl.constexpr):
    """Fill row `program` of `out` (rows, columns) with row `first` and on, `chunk` words at a time.

    `table` is the dictionary's, int32: two for each word, as published. `levels` are two for each row, in any floating dtype.
    """
    row = first + tl.program_id(0)
    begin, end = tl.load(row_offsets + row), tl.load(row_offsets + row + 1)
    sound = (begin >= 0) & (end >= begin) & (end <= num_words)
    end = tl.where(sound, end, begin)
    low = tl.load(levels + 2 * row.to(tl.int64)).to(out.dtype.element_ty)
    high = tl.load(levels + 2 * row.to(tl.int64) + 1).to(out.dtype.element_ty)
    zero = tl.zeros((1, 1), out.dtype.element_ty)
    place = out + tl.program_id(0).to(tl.int64) * columns
    lane = tl.arange(0, 32)[None, :]  # a word has at most 28 lanes, 14 in each half
    shift = 4 + 2 * (lane % 14)
    at, word = begin * 0, begin
    while word < end:
        index = word + tl.arange(0, chunk)
        code = tl.load(codes + index, mask=index < end, other=0).to(tl.int32) & 0xFFFF
        half = tl.load(table + 2 * code, mask=index < end, other=0)
        other_half = tl.load(table + 2 * code + 1, mask=index < end, other=0)
        length = 2 * (half & 15)
        column = (at + tl.cumsum(length, 0) - length)[:, None] + lane
        symbol = (tl.where(lane < 14, half[:, None], other_half[:, None]) >> shift) & 3
        value = tl.where(symbol == 1, low, tl.where(symbol == 2, high, zero))
        tl.store(place + column, value, mask=(lane < length[:, None]) & (column < columns))
        at += tl.sum(length, 0)
        word += chunk
    if (not sound) | ((at != columns) & (at != columns + columns % 2)):
        tl.atomic_min(damaged, row)


@triton.jit
def int4_to_bfloat16(
    words, scales, zeros, out, first, columns, words_of_row, groups, has_zeros: tl.constexpr, block: tl.constexpr
):
    """Fill row `program` of `out` (rows, columns) with the weights of `block` words of row `first` and on, as bfloat16's bits.

    `words` int32 have eight codes each; `scales` bfloat16 are (rows, groups). `zeros` int32 (rows / 8, groups) have the zero
    points of eight rows each. They are read only with `has_zeros`.
    """
    row = (first + tl.program_id(0)).to(tl.int64)
    index = tl.program_id(1) * block + tl.arange(0, block)
    packed = tl.load(words + row * words_of_row + index, mask=index < words_of_row, other=0)
    eight = tl.arange(0, 8)[None, :]
    column = 8 * index[:, None] + eight
    code = (packed[:, None] >> (4 * eight)) & 15
    group = column // (columns // groups)
    if has_zeros:
        zero = (tl.load(zeros + row // 8 * groups + group, mask=column < columns, other=0) >> (4 * (row % 8)).to(tl.int32)) & 15
    else:
        zero = 8
    scale = tl.load(scales + row * groups + group, mask=column < columns, other=0.0).to(tl.float32)
    wide = ((code - zero).to(tl.float32) * scale).to(tl.uint32, bitcast=True)
    bits = (wide + 0x7FFF + ((wide >> 16) & 1)) >> 16  # to nearest even
    tl.store(out + tl.program_id(0).to(tl.int64) * columns + column, bits.to(tl.uint16), mask=column < columns)


@triton.jit
def bf16x12_codes(low, high, bases, out, first, columns, half, block: tl.constexpr):
    """Fill `block` columns of row `program` of `out` (rows, columns), bfloat16's bits, as if no weight were an escape.

    `low` (rows, columns), `high` (rows, half) and `bases` (rows) are uint8.
    """
    row = (first + tl.program_id(0)).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < columns
    other = tl.load(low + row * columns + column, mask=inside, other=0).to(tl.int32)
    packed = tl.load(high + row * half + column % half, mask=inside, other=0).to(tl.int32)
    code = tl.where(column < half, packed & 15, packed >> 4)
    field = tl.where(code > 0, code + tl.load(bases + row).to(tl.int32), 0)
    bits = ((other & 128) << 8) | (field << 7) | (other & 127)
    tl.store(out + tl.program_id(0).to(tl.int64) * columns + column, bits.to(tl.int16), mask=inside)


@triton.jit
def bf16x12_escapes(
    low,
    bases,
    escape_offsets,
    escapes,
    out,
    damaged,
    known,
    first,
    columns,
    largest: tl.constexpr,
    block: tl.constexpr,
):
    """Put the escapes of row `program` over its weights in `out`. There are `known` escapes; `largest` is the largest base."""
    row = first + tl.program_id(0)
    origin = tl.load(escape_offsets)
    start, stop = tl.load(escape_offsets + row) - origin, tl.load(escape_offsets + row + 1) - origin
    sound = (start >= 0) & (stop >= start) & (stop <= known) & (tl.load(bases + row).to(tl.int32) <= largest)
    stop = tl.where(sound, stop, start)
    wrong = tl.where(sound, 0, 1)
    place = start
    while place < stop:
        index = place + tl.arange(0, block)
        within = index < stop
        each = tl.load(escapes + index, mask=within, other=0)
        column = each >> 8
        before = tl.load(escapes + index - 1, mask=within & (index > start), other=-1) >> 8
        allowed = within & (column >= 0) & (column < columns)
        wrong += tl.sum(tl.where(within & ((column >= columns) | (column <= before)), 1, 0), 0)
        other = tl.load(low + row.to(tl.int64) * columns + column, mask=allowed, other=0).to(tl.int32)
        bits = ((other & 128) << 8) | ((each & 255) << 7) | (other & 127)
        tl.store(out + tl.program_id(0).to(tl.int64) * columns + column, bits.to(tl.int16), mask=allowed)
        place += block
    if wrong > 0:
        tl.atomic_min(damaged, row)
