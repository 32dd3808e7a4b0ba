"""The compiled loop that packs four-bit weights as torch's kernel for CPUs reads them.

The kernel takes `block` outputs at a time, 64 or 32 by its instructions. A byte has the codes of one input for two outputs half
a block apart, the earlier one in its lower half. A block has its inputs one after another, half as many bytes each. After the
last whole block, 16 to 48 outputs are left; of these a byte has two neighbours.
"""

from typing import Any

import numpy as np

from headrace.machine.jit import compiled, full_width

_AT_ONCE = 64  # bytes of a row, a cache line
_ROWS = 8  # bytes of a word


@compiled
def pack_blocks(codes: Any, block: Any, first: Any, last: Any, out: Any) -> None:
    """Pack blocks `first` up to `last` of `codes` (outputs, inputs / 2) uint8, whose lower halves are the earlier inputs.

    `out` has all packed bytes as uint64.
    """
    full_width()
    outputs, width = codes.shape
    even, odd = np.empty(_AT_ONCE, np.uint64), np.empty(_AT_ONCE, np.uint64)
    for start in range(first * block, min(last * block, outputs), block):
        count = min(block, outputs - start)
        step, apart = (1, block // 2) if count == block else (2, 1)
        words = count // (2 * _ROWS)  # of one input
        for left in range(0, width, _AT_ONCE):
            bytes_now = min(_AT_ONCE, width - left)
            for word in range(words):
                even[:], odd[:] = 0, 0
                for number in range(_ROWS):
                    row, shift = start + step * (_ROWS * word + number), np.uint64(8 * number)
                    low, high = codes[row, left : left + bytes_now], codes[row + apart, left : left + bytes_now]
                    for at in range(bytes_now):
                        one, other = np.uint64(low[at]), np.uint64(high[at])
                        even[at] |= (one & np.uint64(15) | (other & np.uint64(15)) << np.uint64(4)) << shift
                        odd[at] |= (one >> np.uint64(4) | other & np.uint64(240)) << shift
                place = start * width // _ROWS + 2 * left * words + word
                for at in range(bytes_now):
                    out[place + 2 * at * words] = even[at]
                    out[place + (2 * at + 1) * words] = odd[at]
