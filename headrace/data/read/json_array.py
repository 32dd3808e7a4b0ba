"""A JSON array of samples, one element after the other: memory depends on one sample, not on the file.

Invariant: the elements are what stands between the array's own commas, wherever pieces begin and end. Whoever parses an element
finds out whether it is JSON.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from headrace.data.read.long_lines import INSIDE, MOST_STRINGS, shortened_json
from headrace.terms.errors import DataError

# Whole strings, and characters that are no marks. Inside an element a comma is no mark, because token ids have many.
_STRING = b'"' + INSIDE.pattern + b'"'
_TO_COMMA = re.compile(rb'(?:[^"\[\]{},]++|' + _STRING + rb")*+", re.DOTALL)
_TO_BRACKET = re.compile(rb'(?:[^"\[\]{}]++|' + _STRING + rb")*+", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Element:
    """The text of one element; `left_out` bytes of its long strings are missing. It begins in `line`, counted from 1."""

    text: bytes
    left_out: int
    line: int


def elements(name: str, pieces: Iterable[bytes], most_bytes: int) -> Iterator[Element]:
    """Yield the elements of the array in `pieces`, with at most `most_bytes` of each string. `name` is for messages.

    Raises:
        DataError: the array has no end, something follows it, or an element is longer than four such strings.
    """
    index, depth, line = 0, 0, 1
    text, left_out = bytearray(), 0
    is_over = False
    for made, less in shortened_json(pieces, most_bytes):
        begin = at = 0
        while not is_over and (at := _next_mark(made, at, depth)) < len(made):
            mark, at = made[at : at + 1], at + 1
            if mark == b'"':  # a string has no end
                break
            if mark in b"[{":
                depth += 1
                if depth == 1:  # only blanks stand before it
                    line += (text + made[:at]).count(b"\n")
                    begin, text = at, bytearray()
            elif depth > 1:
                depth -= 1
            elif mark in b",]":  # another bracket is no JSON; parsing the element reports it
                text += made[begin : at - 1]
                begin, is_over = at, mark == b"]"
                if index or not is_over or text.strip():
                    yield Element(bytes(text), left_out, line)
                index, line = index + 1, line + text.count(b"\n")
                text, left_out = bytearray(), 0
        text += made[begin:]
        left_out += less
        if is_over and text.strip():
            raise DataError(f"{name}: not JSON: {bytes(text.strip()[:60])!r} follows the array; correct or remove it")
        if len(text) > MOST_STRINGS * most_bytes:
            raise DataError(f"{name}, element {index}: more than {MOST_STRINGS * most_bytes} bytes in it; cut it into several")
    if not is_over:
        if text.strip():
            yield Element(bytes(text), left_out, line)
        raise DataError(f"{name}: not JSON: the array has no end, {index} elements were read; write the file again")


def _next_mark(text: bytes, at: int, depth: int) -> int:
    found = (_TO_BRACKET if depth > 1 else _TO_COMMA).match(text, at)
    return found.end() if found else len(text)
