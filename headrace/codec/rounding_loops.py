"""The compiled loops of rounding on a CPU: scales that are tried for a group, and columns that are rounded one after the other.

They have no temporaries, and a row at a time stays in the cache. `grids` and `rounding` say what they compute, have the same in
torch for devices, and check shapes and dtypes. They run without the GIL on one core. Inner loops count without a sign, or
numba would look for places that count from the end, and not vectorise.

Legend: float32 everywhere. `weights` and `block` are (rows, columns), `scales` (rows,), `levels` (rows, 2); `factor` is the
square of the factor of H's inverse for the block's columns. `narrow`: values are rounded to bfloat16.
"""

from typing import Any

import numpy as np

from headrace.machine.jit import compiled

_LANES = 16


@compiled
def best_scales(weights: Any, importance: Any, shrinks: Any, narrow: bool, least: float, scales: Any) -> None:
    """Fill `scales` with the one of each row that makes the sum of errors, by `importance` (columns,), smallest: the first.

    Tried are those of `shrinks` times what clips nothing, as they are stored; one where they fall below `least`. Sixteen sums
    stand side by side, so that their order is the same everywhere.
    """
    columns = np.uint64(weights.shape[1])
    bits, sums = np.empty(1, np.uint32), np.empty(_LANES, np.float32)
    number = bits.view(np.float32)
    low, high, one = np.float32(-8), np.float32(7), np.float32(1)
    for row in range(len(weights)):
        line = weights[row]
        largest = np.float32(0)
        for column in range(columns):
            largest = max(largest, abs(line[column]))
        largest /= high
        smallest = np.float32(np.inf)
        for each in range(len(shrinks)):
            number[0] = largest * shrinks[each]
            if narrow:
                bits[0] = (bits[0] + np.uint32(0x7FFF) + ((bits[0] >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
            scale = number[0] if number[0] >= least else one
            sums[:] = 0
            for start in range(np.uint64(0), columns, np.uint64(_LANES)):
                for lane in range(np.uint64(0), min(np.uint64(_LANES), columns - start)):
                    weight = line[start + lane]
                    error = min(max(np.rint(weight / scale), low), high) * scale - weight
                    sums[lane] += error * error * importance[start + lane]
            error = np.float32(0)
            for lane in range(_LANES):
                error += sums[lane]
            if error < smallest or each == 0:
                smallest = error
                scales[row] = scale


@compiled
def int4_columns(block: Any, first: int, last: int, scales: Any, narrow: bool, factor: Any, codes: Any, errors: Any) -> None:
    """Round columns `first` to `last` of a block into `codes` (rows, last - first), and correct those after each."""
    bits = np.empty(1, np.uint32)
    number = bits.view(np.float32)
    low, high = np.float32(-8), np.float32(7)
    for row in range(len(block)):
        line, scale = block[row], scales[row]
        for column in range(first, last):
            code = min(max(np.rint(line[column] / scale), low), high)
            codes[row, column - first] = np.uint8(code - low)
            number[0] = code * scale
            if narrow:
                bits[0] = (bits[0] + np.uint32(0x7FFF) + ((bits[0] >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
            own = factor[column]
            error = (line[column] - number[0]) / own[column]
            errors[row, column] = error
            for other in range(np.uint64(column), np.uint64(len(line))):
                line[other] -= error * own[other]


@compiled
def ternary_columns(block: Any, first: int, last: int, levels: Any, factor: Any, codes: Any, errors: Any) -> None:
    """Round columns `first` to `last` of a block to zero or one of a row's two levels, and correct those after each."""
    zero, half = np.float32(0), np.float32(0.5)
    for row in range(len(block)):
        line, least, largest = block[row], levels[row, 0], levels[row, 1]
        for column in range(first, last):
            weight = line[column]
            code, value = 0, zero
            if weight < least * half and least < zero:
                code, value = 1, least
            elif weight > largest * half and largest > zero:
                code, value = 2, largest
            codes[row, column - first] = code
            own = factor[column]
            error = (weight - value) / own[column]
            errors[row, column] = error
            for other in range(np.uint64(column), np.uint64(len(line))):
                line[other] -= error * own[other]
