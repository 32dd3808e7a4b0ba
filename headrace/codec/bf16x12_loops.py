"""The compiled loops of `bf16x12`: bits of bfloat16 to its parts, and back.

`bf16x12` calls them and checks shapes and dtypes. Stored numbers may still be damaged: a loop stops at the first row whose base
or escapes are no row's, and writes nowhere but into `out`. They run without the GIL on one core.

Legend: `bits` and `out` are bfloat16's bits, uint16 (rows, columns); the other arrays are the parts by their names.
"""

from typing import Any

import numpy as np

from headrace.machine.jit import compiled

_FIELDS = 256
_ABOVE = 15  # fields above a base that have a code
_LARGEST_BASE = _FIELDS - 1 - _ABOVE


@compiled
def escapes_by_row(bits: Any, bases: Any, counts: Any) -> Any:
    """Fill `bases` with the base of each row under which the fewest weights escape (the lowest of several), and `counts`."""
    rows, columns = bits.shape
    seen = np.empty(_FIELDS, np.int64)
    for row in range(rows):
        seen[:] = 0
        for column in range(columns):
            seen[(bits[row, column] >> 7) & 255] += 1
        within = 0
        for field in range(1, _ABOVE + 1):
            within += seen[field]
        most, best = within, 0
        for base in range(1, _LARGEST_BASE + 1):
            within += seen[base + _ABOVE] - seen[base]
            if within > most:
                most, best = within, base
        bases[row] = best
        counts[row] = columns - seen[0] - most


@compiled
def encode_bf16x12_rows(bits: Any, bases: Any, escape_offsets: Any, low: Any, high: Any, escapes: Any) -> Any:
    """Fill `low`, `high` and `escapes`; an escape has code 0, and so has the last half byte of an odd width."""
    rows, columns = bits.shape
    half = high.shape[1]
    for row in range(rows):
        base, place = int(bases[row]), int(escape_offsets[row])
        for index in range(half):
            high[row, index] = 0
        for column in range(columns):
            each = int(bits[row, column])
            low[row, column] = ((each >> 8) & 128) | (each & 127)
            field = (each >> 7) & 255
            code = field - base
            if field == 0:
                code = 0
            elif code < 1 or code > _ABOVE:
                escapes[place] = (column << 8) | field
                place += 1
                code = 0
            if column < half:
                high[row, column] = code
            else:
                high[row, column - half] |= code << 4


@compiled
def decode_bf16x12_rows(low: Any, high: Any, bases: Any, escape_offsets: Any, escapes: Any, out: Any, first: Any) -> Any:
    """Fill `out` with rows `first` and on; return the first damaged row, -1 if none is."""
    rows, columns = out.shape
    half = high.shape[1]
    origin, known = np.int64(escape_offsets[0]), np.int64(escapes.size - 1)
    for row in range(rows):
        here = first + row
        base = np.uint16(bases[here])
        start, stop = np.int64(escape_offsets[here]) - origin, np.int64(escape_offsets[here + 1]) - origin
        if base > _LARGEST_BASE or start < 0 or stop < start or stop > known:
            return here
        codes, left, right = high[here], low[here, :half], low[here, half:]
        into, beyond = out[row, :half], out[row, half:]
        for index in range(half):
            code, other = np.uint16(codes[index] & 15), np.uint16(left[index])
            field = np.uint16((code + base) & -np.uint16(code != 0))
            into[index] = ((other & np.uint16(128)) << np.uint16(8)) | (field << np.uint16(7)) | (other & np.uint16(127))
        for index in range(columns - half):
            code, other = np.uint16(codes[index] >> 4), np.uint16(right[index])
            field = np.uint16((code + base) & -np.uint16(code != 0))
            beyond[index] = ((other & np.uint16(128)) << np.uint16(8)) | (field << np.uint16(7)) | (other & np.uint16(127))
        before = np.int64(-1)
        for place in range(start, stop):
            column = np.int64(escapes[place]) >> 8
            if column <= before or column >= columns:
                return here
            before = column
            other = np.uint16(low[here, column])
            out[row, column] = (
                ((other & np.uint16(128)) << np.uint16(8))
                | (np.uint16(escapes[place] & 255) << np.uint16(7))
                | (other & np.uint16(127))
            )
    return -1
