"""Lines of JSON that are too long to be read whole: only the beginning of a long string is kept.

Invariant: what comes out is the same JSON, but that strings of more than so many bytes end early, at the end of a character.
"""

import json
import re
from collections.abc import Iterable

# The inside of a string as far as it is there, without a backslash whose character is not.
_INSIDE = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
# The longest end of a string that may be part of one character: two escapes that are one, the second not whole.
_LONGEST_CHARACTER_BYTES = 12
# So much there may be beside the long strings, and of them together.
_MOST_STRINGS = 4


def cut_strings(pieces: Iterable[bytes], most_bytes: int) -> tuple[bytes, int]:
    """Return the line that `pieces` are, with at most `most_bytes` of each string, and how many bytes were left out.

    Raises:
        ValueError: it is longer than four such strings all the same.
    """
    line, string = bytearray(), bytearray()
    is_inside, rest, left_out = False, b"", 0
    for piece in pieces:
        piece, at, rest = rest + piece, 0, b""
        while at < len(piece):
            if not is_inside:
                quote = piece.find(b'"', at)
                stop = len(piece) if quote < 0 else quote + 1
                line += piece[at:stop]
                is_inside, at = quote >= 0, stop
                continue
            found = _INSIDE.match(piece, at)
            stop = found.end() if found else at
            string += piece[at : min(stop, at + most_bytes + 1 - len(string))]
            left_out += max(0, stop - at)
            at = stop
            if at < len(piece) and piece[at : at + 1] == b'"':
                kept = bytes(string) if len(string) <= most_bytes else _whole_characters(bytes(string[:most_bytes]))
                left_out -= len(kept)
                line += kept + b'"'
                string.clear()
                is_inside, at = False, at + 1
            elif at < len(piece):
                rest, at = piece[at:], len(piece)
        if len(line) > _MOST_STRINGS * most_bytes:
            raise ValueError(f"more than {_MOST_STRINGS * most_bytes} bytes in one sample; cut it into several")
    return bytes(line + string + rest), left_out


def _whole_characters(string: bytes) -> bytes:
    """Return the inside of a string without a character that was cut."""
    for less in range(_LONGEST_CHARACTER_BYTES):
        kept = string[: len(string) - less]
        try:
            value = json.loads(b'"' + kept + b'"')
        except ValueError:
            continue
        if not ("\ud800" <= value[-1:] <= "\udbff"):
            return kept
    return string  # it is no JSON, which whoever reads the line will say
