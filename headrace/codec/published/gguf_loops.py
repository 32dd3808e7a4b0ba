"""The compiled loops of GGUF's blocks: they call functions of `loops.py`. Who changes those changes this file, too."""

from typing import Any

import numpy as np
from numba import carray, njit

from headrace.codec.published.loops import half_number, stored_part, words_sizes
from headrace.machine.jit import JIT_OPTIONS, full_width


@njit(**JIT_OPTIONS, inline="always")  # type: ignore[untyped-decorator]
def _block(words: Any, line: Any, first: Any, numbers: Any, num_bytes: Any) -> Any:
    """Return the bytes of a line from a block of GGUF on; `sizes` have the bytes of a line, and whether lines are ordered."""
    sizes = words_sizes(words)
    own = np.int64(stored_part(words, 1).view(np.int32)[line]) if sizes[1] else line
    start = own * sizes[0] + first // numbers * num_bytes
    return stored_part(words, 0)[start : (own + 1) * sizes[0]]


@njit(**JIT_OPTIONS, inline="always")  # type: ignore[untyped-decorator]
def _half_at(block: Any, place: Any) -> Any:
    return half_number(np.uint32(block[place]) | np.uint32(block[place + 1]) << np.uint32(8))


def fill_q8_0(words: Any, line: Any, first: Any, count: Any, place: Any) -> None:
    """See `loops.fill_int4`."""
    full_width()
    into = carray(place, count)
    blocks = _block(words, line, first, 32, 34)
    for number in range(into.size // 32):
        block, room = blocks[34 * number : 34 * number + 34], into[32 * number : 32 * number + 32]
        scale, codes = _half_at(block, 0), block[2:34].view(np.int8)
        for i in range(words_sizes(words)[2]):
            room[i] = np.float32(codes[i]) * scale


def fill_q4_0(words: Any, line: Any, first: Any, count: Any, place: Any) -> None:
    """See `loops.fill_int4`."""
    full_width()
    into = carray(place, count)
    blocks = _block(words, line, first, 32, 18)
    for number in range(into.size // 32):
        block, room = blocks[18 * number : 18 * number + 18], into[32 * number : 32 * number + 32]
        scale, codes, low, high = _half_at(block, 0), block[2:18], room[:16], room[16:]
        for i in range(words_sizes(words)[2]):
            low[i] = scale * np.float32(np.int32(codes[i] & np.uint8(15)) - np.int32(8))
            high[i] = scale * np.float32(np.int32(codes[i] >> np.uint8(4)) - np.int32(8))


@njit(**JIT_OPTIONS, inline="always")  # type: ignore[untyped-decorator]
def _with_minima(blocks: Any, num_bytes: Any, codes_at: Any, upper_at: Any, into: Any, run: Any) -> None:
    """Fill `into` from blocks of Q4_K, or with the fifth bits at `upper_at` of Q5_K."""
    for number in range(into.size // 256):
        block, room = blocks[num_bytes * number : num_bytes * (number + 1)], into[256 * number : 256 * number + 256]
        whole, least, packed = _half_at(block, 0), _half_at(block, 2), block[4:16]
        for each in range(8):
            if each < 4:
                steps, lower = packed[each] & np.uint8(63), packed[each + 4] & np.uint8(63)
            else:
                both = packed[each + 4]
                steps = both & np.uint8(15) | (packed[each - 4] >> np.uint8(2)) & np.uint8(48)
                lower = both >> np.uint8(4) | (packed[each] >> np.uint8(2)) & np.uint8(48)
            scale, minimum = whole * np.float32(steps), least * np.float32(lower)
            codes, some = block[codes_at + each // 2 * 32 : codes_at + each // 2 * 32 + 32], room[32 * each : 32 * each + 32]
            shift, place = np.uint8(each % 2 * 4), np.uint8(each)
            if upper_at:
                upper = block[upper_at : upper_at + 32]
                for i in range(run):
                    fifth = ((upper[i] >> place) & np.uint8(1)) << np.uint8(4)
                    some[i] = scale * np.float32((codes[i] >> shift) & np.uint8(15) | fifth) - minimum
            else:
                for i in range(run):
                    some[i] = scale * np.float32((codes[i] >> shift) & np.uint8(15)) - minimum


def fill_q4_k(words: Any, line: Any, first: Any, count: Any, place: Any) -> None:
    """See `loops.fill_int4`."""
    full_width()
    into = carray(place, count)
    _with_minima(_block(words, line, first, 256, 144), 144, 16, 0, into, words_sizes(words)[2])


def fill_q5_k(words: Any, line: Any, first: Any, count: Any, place: Any) -> None:
    """See `loops.fill_int4`."""
    full_width()
    into = carray(place, count)
    _with_minima(_block(words, line, first, 256, 176), 176, 48, 16, into, words_sizes(words)[2])


def fill_q6_k(words: Any, line: Any, first: Any, count: Any, place: Any) -> None:
    """See `loops.fill_int4`."""
    full_width()
    into = carray(place, count)
    blocks = _block(words, line, first, 256, 210)
    for number in range(into.size // 256):
        block, room = blocks[210 * number : 210 * number + 210], into[256 * number : 256 * number + 256]
        whole, scales = _half_at(block, 208), block[192:208].view(np.int8)
        for each in range(16):
            scale = whole * np.float32(scales[each])
            half, quarter, begin = each // 8, each % 8 // 2, each % 2 * 16
            start = half * 64 + quarter % 2 * 32 + begin
            low, upper = block[start : start + 16], block[128 + half * 32 + begin : 128 + half * 32 + begin + 16]
            some, shift, place = room[16 * each : 16 * each + 16], np.uint8(quarter // 2 * 4), np.uint8(2 * quarter)
            for i in range(words_sizes(words)[2]):
                code = (low[i] >> shift) & np.uint8(15) | ((upper[i] >> place) & np.uint8(3)) << np.uint8(4)
                some[i] = scale * np.float32(np.int32(code) - np.int32(32))
