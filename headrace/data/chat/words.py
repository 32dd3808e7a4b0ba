"""Where the words of each message stand in the text that a chat template makes of a conversation.

The conversation is rendered a second time, with a numbered mark before some words of each message. Where the marks alone tell
the two texts apart, each stands where its message's words do, however often these words occur. Otherwise the words are sought.
Invariant: a place is only told if its message is certain, or found in the order of the messages.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.data.values.messages import Message, Messages

# What a template may compare, look up or count: marks there would change more than words.
_NOT_SAID = frozenset({"role", "name", "tool_call_id", "id", "type"})
# A mark stands before a word that follows white space, so that no tag, flag or number is cut.
_FIRST_WORD = re.compile(r"(?<!\S)(?=\w)")
_LAST_WORD = re.compile(r".*(?<!\S)(?=\w)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Words:
    """Words of message `message`: from character `begin` up to, and without, `end`, with `place` between them. Of words that
    the template changes, only `place` is known.
    """

    message: int
    begin: int
    place: int
    end: int


@dataclass(frozen=True, slots=True)
class _Point:
    """A mark before character `at` of what a message says. `is_name`: of a function, which other messages may repeat."""

    message: int
    said: str
    at: int
    is_name: bool


def find_words(messages: Messages, text: str, render: Callable[[Messages], str | None]) -> list[Words]:
    """Return what is known of the words in `text`, the rendering of `messages`, by their places."""
    stem = "hq"
    while stem in text:
        stem += "q"
    marker = _Marker(stem)
    marked = render([marker.message(index, message) for index, message in enumerate(messages)])
    found = None if marked is None else _places(marked, text, stem, marker.points)
    return _searched(marker.points, text) if found is None else found


def _places(marked: str, text: str, stem: str, points: Sequence[_Point]) -> list[Words] | None:
    found: list[Words] = []
    pieces: list[str] = []
    named: set[int] = set()
    at = place = 0
    for mark in re.finditer(rf"{stem}(\d+)z", marked):
        pieces.append(marked[at : mark.start()])
        place += mark.start() - at
        at = mark.end()
        point = points[int(mark[1])]
        if point.is_name and int(mark[1]) in named:
            continue  # a result may repeat the name of the function
        named.add(int(mark[1]))
        before, after = point.said[: point.at].lstrip(), point.said[point.at :].rstrip()
        begin = place - len(before) if text.endswith(before, 0, place) else place
        end = place + len(after) if text.startswith(after, place) else place
        found.append(Words(point.message, begin, place, end))
    return found if "".join([*pieces, marked[at:]]) == text else None


def _searched(points: Sequence[_Point], text: str) -> list[Words]:
    """Return the words that stand in `text` in the order of the messages."""
    found: list[Words] = []
    message = start = done = 0
    for point in points:
        if point.message != message:
            message, start = point.message, done
        said = point.said.strip()
        place = text.find(said, start)
        if place >= 0:
            found.append(Words(message, place, place, place + len(said)))
            done = max(done, place + len(said))
    return sorted(found, key=lambda words: words.place)


class _Marker:
    """Puts marks into messages, numbered by `points`."""

    def __init__(self, stem: str) -> None:
        self.points: list[_Point] = []
        self._stem = stem

    def message(self, index: int, message: Message) -> Message:
        return {
            name: value if name in _NOT_SAID else self._value(index, value, is_call=name == "tool_calls")
            for name, value in message.items()
        }

    def _value(self, index: int, value: Any, *, is_call: bool) -> Any:
        if isinstance(value, str):
            return self._text(index, value)
        if isinstance(value, list):
            return [self._value(index, each, is_call=is_call) for each in value]
        if not isinstance(value, Mapping):
            return value
        return {name: self._field(index, name, each, is_call=is_call) for name, each in value.items()}

    def _field(self, index: int, name: str, value: Any, *, is_call: bool) -> Any:
        if is_call and name == "arguments":
            return self._value(index, value, is_call=False) if isinstance(value, str) else self._leaves(index, value)
        if is_call and name == "name" and isinstance(value, str):
            return self._text(index, value, is_name=True)
        return value if name in _NOT_SAID else self._value(index, value, is_call=is_call)

    def _leaves(self, index: int, value: Any) -> Any:
        if isinstance(value, str):
            return self._text(index, value)
        if isinstance(value, Mapping):
            return {name: self._leaves(index, each) for name, each in value.items()}
        return [self._leaves(index, each) for each in value] if isinstance(value, list) else value

    def _text(self, index: int, said: str, *, is_name: bool = False) -> str:
        marked, at = "", 0
        for point in _points(said):
            marked += f"{said[at:point]}{self._stem}{len(self.points)}z"
            self.points.append(_Point(index, said, point, is_name))
            at = point
        return marked + said[at:]


def _points(said: str) -> Iterator[int]:
    """Yield where marks go: before the first and the last word, or, without words, before what is no white space."""
    first = _FIRST_WORD.search(said)
    if first is not None:
        yield first.start()
        last = _LAST_WORD.match(said)
        if last is not None and last.end() > first.start():
            yield last.end()
    elif said.strip():
        yield len(said) - len(said.lstrip())
