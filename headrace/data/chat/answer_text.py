"""The text of an answer while it grows, token by token: what of it is certain, and where a text stops it.

Invariant: the pieces together are what the tokenizer decodes of the whole answer, without special tokens, up to the first text
that stops it. That one is looked for in the answer alone: as it is shown, and with its special tokens.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

# A window of so many tokens is decoded anew for each token; then all but the last of them are settled.
_WINDOW, _KEPT = 256, 32
# Tidying of blanks before punctuation changes no more than the last few characters.
_TIDIED = 8
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_HALF = "�"


class AnswerText:
    """Decodes one answer. `stops` are the texts that end it; they are no part of it. `special`: it shows special tokens."""

    def __init__(self, tokenizer: Any, stops: Sequence[str] = (), *, special: bool = False) -> None:
        self._tokenizer, self._stops, self._shows_special = tokenizer, tuple(stops), special
        self._ids: list[int] = []
        self._before, self._overlap = "", 0  # settled text, and how much of the window's text it has already
        self._text, self._certain, self._given = "", 0, 0
        self._marks: list[tuple[int, str]] = []  # special tokens, and the places in the text where they stood
        self._is_tidied = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
        self.count, self.stopped = 0, False

    @property
    def text(self) -> str:
        """The text of all tokens so far."""
        return self._text

    def add(self, tokens: Sequence[int]) -> None:
        """Take the next tokens, up to the one with which a text that stops the answer is there; the others are left out."""
        for some in ([token] for token in tokens) if self._stops else [list(tokens)]:
            if self.stopped or not some:
                return
            self.count += len(some)
            self._ids += some
            self._decode(some[-1])
            if self._stops:
                self._look_for_stops(some[0])

    def certain(self) -> str:
        """Return what has become certain since the last call: no token to come changes it, or makes it part of a stop."""
        end = self._certain
        if self._stops and not self.stopped:
            marks = [mark for mark in self._marks if mark[0] <= end]
            shown = self._text[:end]
            end = min(self._in_text(marks, before_part(_with(shown, marks), self._stops)), before_part(shown, self._stops))
        return self._taken(end)

    def rest(self) -> str:
        """Return what is left when the answer has ended."""
        return self._taken(len(self._text))

    def _taken(self, end: int) -> str:
        start, self._given = self._given, max(self._given, end)
        return self._text[start : self._given]

    def _decode(self, last: int) -> None:
        self._text = self._before + self._words(self._ids)[self._overlap :]
        tail = self._tokenizer.convert_ids_to_tokens(last)
        if isinstance(tail, str) and _BYTE.fullmatch(tail):
            return  # a run of bytes is decoded as a whole: one that is wrong spoils the others
        if not self._special(last):
            self._certain = len(self._text.rstrip(_HALF)) - (_TIDIED if self._is_tidied else 0)
        if len(self._ids) > _WINDOW and self._certain == len(self._text):
            self._ids = self._ids[-_KEPT:]
            self._before, self._overlap = self._text, len(self._words(self._ids))

    def _look_for_stops(self, token: int) -> None:
        if special := self._special(token):
            self._marks.append((len(self._text), special))
        whole = _with(self._text, self._marks)
        places = [self._in_text(self._marks, place) for stop in self._stops if (place := whole.find(stop)) >= 0]
        places += [place for stop in self._stops if self._marks and (place := self._text.find(stop)) >= 0]
        if places:
            self._text, self.stopped = self._text[: min(places)], True
            self._certain = len(self._text)

    def _special(self, token: int) -> str:
        """Return the text of a token that no answer shows; "" for any other."""
        hidden = not self._words([token])
        return str(self._tokenizer.decode([token], skip_special_tokens=False)) if hidden else ""

    def _words(self, ids: Iterable[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=not self._shows_special))

    @staticmethod
    def _in_text(marks: Sequence[tuple[int, str]], place: int) -> int:
        """Return the place in the text for one in the text with special tokens."""
        added = 0
        for start, special in marks:
            if place <= start + added:
                break
            if place < start + added + len(special):
                return start
            added += len(special)
        return place - added


def _with(text: str, marks: Sequence[tuple[int, str]]) -> str:
    """Return the text with its special tokens."""
    parts, last = [], 0
    for start, special in marks:
        parts += [text[last:start], special]
        last = start
    return "".join([*parts, text[last:]])


def before_part(text: str, stops: Sequence[str]) -> int:
    """Return where the end of `text` begins that may be the beginning of a stop; its length if there is none."""
    most = min(len(text), max(map(len, stops)) - 1)
    lengths = (length for length in range(most, 0, -1) if any(stop.startswith(text[len(text) - length :]) for stop in stops))
    return len(text) - next(lengths, 0)
