"""The compiled loop that decodes keys and values (`cache_codes`): a token of a row at a time, without the GIL on one core."""

from typing import Any

import numpy as np

from headrace.machine.jit import compiled, full_width


@compiled
def decode_tokens(table: Any, rows: Any, count: Any, size: Any, bits: Any, out: Any, first: Any, last: Any) -> None:
    """Fill tokens `first` up to `last` of `out` (rows * heads, tokens, width): bits of float32 (uint32) or bfloat16 (uint16).

    A line of `table` (tokens, bytes) uint8 has for each row `count` groups of `size` numbers: steps and least values as
    float16, then codes of `bits` bits. Of four bits the lower halves are the first half of a group.
    """
    full_width()
    heads, width = out.shape[0] // rows, out.shape[2]
    half, wide = size // 2, out.itemsize == 4
    room = count * (4 + (size if bits == 8 else half))
    numbers, scratch = np.empty(count * size, np.float32), np.empty(2, np.uint32)
    pair, whole = scratch.view(np.float32), numbers.view(np.uint32)
    for token in range(first, last):
        for row in range(rows):
            line = table[token][row * room : (row + 1) * room]
            codes = line[4 * count : room]
            for group in range(count):
                for each in range(2):
                    at = 4 * group + 2 * each
                    found = np.uint32(line[at]) | np.uint32(line[at + 1]) << np.uint32(8)
                    # The exponent bias of float32 is greater by 112; NaN and infinity have the highest exponent of all.
                    scratch[each] = (found & np.uint32(0x7FFF)) << np.uint32(13)
                    pair[each] *= np.float32(2.0**112)
                    if found & np.uint32(0x7C00) == np.uint32(0x7C00):
                        scratch[each] |= np.uint32(0x7F800000)
                    scratch[each] |= (found & np.uint32(0x8000)) << np.uint32(16)
                step, least = pair[0], pair[1]
                into = numbers[group * size : (group + 1) * size]
                if bits == 8:
                    own = codes[group * size : (group + 1) * size]
                    for i in range(size):
                        into[i] = np.float32(np.int32(own[i])) * step + least
                else:
                    own = codes[group * half : (group + 1) * half]
                    low, high = into[:half], into[half:]
                    for i in range(half):
                        low[i] = np.float32(np.int32(own[i] & np.uint8(15))) * step + least
                    for i in range(half):
                        high[i] = np.float32(np.int32(own[i] >> np.uint8(4))) * step + least
            for head in range(heads):
                place, own_bits = out[row * heads + head, token], whole[head * width : (head + 1) * width]
                if wide:
                    for i in range(width):
                        place[i] = own_bits[i]
                    continue
                for i in range(width):  # to the nearest bfloat16, of two to the even one; NaN stays NaN
                    rounded = (own_bits[i] + np.uint32(0x7FFF) + (own_bits[i] >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
                    nan = own_bits[i] & np.uint32(0x7FFFFFFF) > np.uint32(0x7F800000)
                    place[i] = np.uint32(0x7FC0) if nan else rounded
