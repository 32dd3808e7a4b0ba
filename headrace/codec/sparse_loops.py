"""The compiled loops of `sparse`: a bitmap and the numbers that it leaves, to the bits of weights.

`sparse` calls them and checks shapes and dtypes. Stored bytes may still be damaged: a loop stops at the first row whose bits
and numbers do not agree, and writes nowhere but into `out`. They run without the GIL on one core.
"""

from typing import Any

import numpy as np

from headrace.machine.jit import compiled

SPARE = 8  # numbers behind the last one, which are read and not used


@compiled
def decode_sparse_rows(bitmap: Any, offsets: Any, values: Any, lanes: Any, masks: Any, out: Any, first: Any) -> Any:
    """Fill `out` (rows, columns) uint16 with rows `first` and on; return the first damaged row, -1 if none is.

    Bit j of byte i stands for column 8 i + j. `lanes` (256 x 9) has for each byte how many bits are set below each place and
    in all, `masks` (256 x 8) all bits where a bit is set. So eight weights are made at once, and no branch depends on the bits.
    """
    rows, columns = out.shape
    whole = columns // 8
    rest = columns - 8 * whole
    for row in range(rows):
        start, stop = int(offsets[first + row]), int(offsets[first + row + 1])
        if start < 0 or stop < start or stop > values.size - SPARE:
            return first + row
        bits, room, numbers = bitmap[first + row], out[row], values[start : stop + SPARE]
        at, count = 0, stop - start
        for place in range(whole):
            byte = np.int64(bits[place])
            own, mask = lanes[9 * byte : 9 * byte + 9], masks[8 * byte : 8 * byte + 8]
            if at > count:
                return first + row
            source, into = numbers[at : at + 8], room[8 * place : 8 * place + 8]
            for lane in range(8):
                into[lane] = source[own[lane]] & mask[lane]
            at += own[8]
        if rest:
            byte = np.int64(bits[whole])
            if byte >> rest or at > count:
                return first + row
            for lane in range(rest):
                room[8 * whole + lane] = numbers[at + lanes[9 * byte + lane]] & masks[8 * byte + lane]
            at += lanes[9 * byte + 8]
        if at != count:
            return first + row
    return -1
