"""The compiled loops of the ternary codes: words and trits to the bits of weights, and symbols to words.

`ternary` calls them and checks shapes and dtypes. Stored bytes may still be damaged: a loop stops at the first row whose words
do not yield it, and writes nowhere but into `out`. All loops stand in this one file, because numba notices changes of a
function's own file only. They run without the GIL on one core.

Legend: `levels` and `out` are the bits of weights, uint16 or uint32. `levels` (rows, 2) are the least and the largest value of
each row; `out` (rows, columns) is filled. Symbols are 0 for zero, 1 and 2 for the first and the second level.
"""

from typing import Any

import numpy as np

from headrace.machine.jit import compiled

PADDED_LANES = 32
_LENGTH_LANE = 31
_TRITS = 5


@compiled
def _row_with_room(words: Any, lanes: Any, room: Any, least: Any, most: Any, columns: Any) -> Any:
    """Write a row's words to `room`, all lanes of each; return the number of its weights, -1 for damage."""
    kind = room.dtype.type
    at = 0
    for place in range(words.size):
        if at >= columns:
            return -1
        symbols = lanes[np.int64(words[place]) * PADDED_LANES :][:PADDED_LANES]
        for lane in range(PADDED_LANES):
            symbol = kind(symbols[lane])
            room[at + lane] = (least & kind(-(symbol & 1))) | (most & kind(-((symbol >> 1) & 1)))
        at += symbols[_LENGTH_LANE]
    return at


@compiled
def decode_words(words: Any, row_offsets: Any, lanes: Any, levels: Any, out: Any, first: Any) -> Any:
    """Fill the rows of `out` that have room behind them with rows `first` and on; return the first damaged row, -1 if none is.

    `lanes` are a dictionary's, one after the other; lane 31 of a word is its length. All 32 are written, whatever the length:
    the next word, or the next row, overwrites the surplus. The last rows are left to `decode_last_words`: with both in one
    function, LLVM's code takes half as long again.
    """
    rows, columns = out.shape
    flat = out.reshape(rows * columns)
    for row in range(rows):
        # A slice tells numba that no index is negative; with tests of both ends the loop would not vectorise.
        room = flat[row * columns :]
        if room.size < columns + PADDED_LANES:
            break
        start, stop = row_offsets[first + row], row_offsets[first + row + 1]
        if start < 0 or stop < start or stop > words.size:
            return first + row
        at = _row_with_room(words[start:stop], lanes, room, levels[first + row, 0], levels[first + row, 1], columns)
        if at != columns and not (at == columns + 1 and columns % 2 == 1):
            return first + row
    return -1


@compiled
def decode_last_words(words: Any, row_offsets: Any, lanes: Any, levels: Any, out: Any, first: Any) -> Any:
    """As `decode_words`, for all rows of `out`: each goes by way of a row beside `out`, so that nothing else is written to."""
    rows, columns = out.shape
    room = np.empty(columns + PADDED_LANES, out.dtype)
    for row in range(rows):
        start, stop = row_offsets[first + row], row_offsets[first + row + 1]
        if start < 0 or stop < start or stop > words.size:
            return first + row
        at = _row_with_room(words[start:stop], lanes, room, levels[first + row, 0], levels[first + row, 1], columns)
        if at != columns and not (at == columns + 1 and columns % 2 == 1):
            return first + row
        out[row] = room[:columns]
    return -1


@compiled
def encode_words(symbols: Any, children: Any, words: Any, row_offsets: Any) -> Any:
    """Write the words of `symbols` (rows, columns) uint8 by the greedy parse, and where each row begins; return their number.

    `words` has room for one word for each pair. If the width is odd, a zero completes the last pair.
    """
    rows, columns = symbols.shape
    root = children.shape[0] - 1
    count = 0
    row_offsets[0] = 0
    for row in range(rows):
        node = root
        for column in range(0, columns, 2):
            second = np.int64(symbols[row, column + 1]) if column + 1 < columns else np.int64(0)
            pair = np.int64(symbols[row, column]) + 3 * second
            longer = children[node, pair]
            if longer < 0:
                words[count] = node
                count += 1
                longer = children[root, pair]
            node = longer
        if node != root:
            words[count] = node
            count += 1
        row_offsets[row + 1] = count
    return count


@compiled
def decode_trits(trits: Any, table: Any, levels: Any, out: Any, first: Any) -> Any:
    """Fill `out` with rows `first` and on, five weights from each byte; return the row that is damaged, -1 if none is."""
    rows, columns = out.shape
    kind = out.dtype.type
    whole = columns // _TRITS
    for row in range(rows):
        least, most, stored, into = levels[first + row, 0], levels[first + row, 1], trits[first + row], out[row]
        largest = np.uint8(0)
        for byte in range(stored.size):
            largest = max(largest, stored[byte])
        if largest >= table.shape[0]:
            return first + row
        for byte in range(whole):
            symbols = table[stored[byte]]
            for lane in range(_TRITS):
                symbol = symbols[lane]
                into[byte * _TRITS + lane] = (least & kind(-(symbol & 1))) | (most & kind(-(symbol >> 1)))
        for column in range(whole * _TRITS, columns):
            symbol = table[stored[whole], column - whole * _TRITS]
            into[column] = (least & kind(-(symbol & 1))) | (most & kind(-(symbol >> 1)))
    return -1
