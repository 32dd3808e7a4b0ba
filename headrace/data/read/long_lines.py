"""Lines of JSON that are too long to be read whole: only the beginning of a long string is kept.

Invariant: the result is the same JSON, except that strings of more than so many bytes end early, at the end of a character.
"""

import json
import re
from collections.abc import Iterable, Iterator

# The inside of a string as far as it has been read, without a backslash whose character is missing.
INSIDE = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_NO_STRING = re.compile(rb'[^"]*+')
_STRINGS = re.compile(rb'(?:[^"]++|"' + INSIDE.pattern + rb'")*+', re.DOTALL)
# The longest end of a string that may be a part of one character: two escapes for one, of which the second is incomplete.
_LONGEST_CHARACTER_BYTES = 12
# A line may keep at most so many times the bytes that one string may keep.
MOST_STRINGS = 4


def cut_strings(pieces: Iterable[bytes], most_bytes: int) -> tuple[bytes, int]:
    """Return the line in `pieces`, with at most `most_bytes` of each string, and the number of bytes that were left out.

    Raises:
        ValueError: it is still longer than four such strings.
    """
    line, left_out = bytearray(), 0
    for made, less in shortened_json(pieces, most_bytes):
        line += made
        left_out += less
        if len(line) > MOST_STRINGS * most_bytes:
            raise ValueError(f"more than {MOST_STRINGS * most_bytes} bytes in one sample; cut it into several")
    return bytes(line), left_out


def shortened_json(pieces: Iterable[bytes], most_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Yield the JSON in `pieces`, with at most `most_bytes` of each string, and how many bytes of the last string were left
    out.

    Each part holds whole strings; only the last may hold one without an end.
    """
    made, string, string_bytes = bytearray(), bytearray(), 0
    is_inside, rest = False, b""
    for piece in pieces:
        piece, at, rest = rest + piece, 0, b""
        while at < len(piece):
            if not is_inside:
                # In a piece of so few bytes no whole string is too long, so these are passed over at once.
                found = (_STRINGS if len(piece) <= most_bytes else _NO_STRING).match(piece, at)
                stop = found.end() if found else at
                made += piece[at:stop]
                is_inside, at = stop < len(piece), stop + 1
                continue
            found = INSIDE.match(piece, at)
            stop = found.end() if found else at
            string += piece[at : min(stop, at + most_bytes + 1 - len(string))]
            string_bytes += stop - at
            at = stop
            if at < len(piece) and piece[at : at + 1] == b'"':
                kept = bytes(string) if len(string) <= most_bytes else _whole_characters(bytes(string[:most_bytes]))
                made += b'"' + kept + b'"'
                if string_bytes > len(kept):
                    yield bytes(made), string_bytes - len(kept)
                    made.clear()
                string.clear()
                is_inside, at, string_bytes = False, at + 1, 0
            elif at < len(piece):
                rest, at = piece[at:], len(piece)
        yield bytes(made), 0
        made.clear()
    if is_inside:
        yield b'"' + string + rest, 0


def _whole_characters(string: bytes) -> bytes:
    """Return the inside of a string without a character that was cut in two."""
    for less in range(_LONGEST_CHARACTER_BYTES):
        kept = string[: len(string) - less]
        try:
            value = json.loads(b'"' + kept + b'"')
        except ValueError:
            continue
        if not ("\ud800" <= value[-1:] <= "\udbff"):
            return kept
    return string  # it is no JSON; reading the line reports it
