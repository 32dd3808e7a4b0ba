"""An answer taken apart while it comes, by transformers' response parser: what is said, thought and called.

Invariant: the pieces of a stream, put together, are the whole answer. Whatever a model writes, nothing is raised: a call that
is cut or cannot be read is said as it was written.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from headrace.data.chat.answer_text import before_part
from headrace.serve.tools.dialect import CALLS, THOUGHTS, Json, as_json

_SAID, _THOUGHT = "content", "thought"


class Speech:
    """Takes one answer apart. `parser` makes a response parser of `template` that stands behind a prefix; `prefix` is what the
    prompt has of the turn. `marks` are the special tokens, which no content shows. `most_calls` None: as many as there are.
    """

    def __init__(
        self,
        parser: Callable[[str], Any],
        template: Mapping[str, Any],
        prefix: str,
        marks: Sequence[str],
        most_calls: int | None = None,
    ) -> None:
        self._new, self._parser = parser, parser(prefix)
        self._marks, self._held = tuple(marks), ""  # what may be the beginning of a mark is held back
        self._hidden = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))) or "(?!)")
        self._fields, self._most = template["fields"], most_calls
        events = self._parser.initial_events
        opened = events[-1]["field"] if events and events[-1]["type"] != "region_close" else ""
        self._field = opened if "open" in self._fields.get(opened, {}) else ""
        self._raw, self._at, self._begun = "", 0, 0  # `_raw` up to `_at` has been dealt with; a call began at `_begun`
        self._kind, self._blank, self._is_fresh = _THOUGHT if self.thinks else "", "", self.thinks
        self.calls = 0

    @property
    def thinks(self) -> bool:
        """Whether a thought is open."""
        return self._field in THOUGHTS

    def feed(self, text: str) -> list[Json]:
        """Return the deltas that the next piece of text makes."""
        text = self._held + text
        is_open = any(mark[0] in text for mark in self._marks)
        end = before_part(text, self._marks) if is_open else len(text)
        self._held = text[end:]
        return _joined(self._fed(text[:end]))

    def end(self) -> list[Json]:
        """Return the deltas that are left when the answer has ended."""
        return _joined([*self._fed(self._held), *self._ended()])

    def _fed(self, text: str) -> Iterable[Json]:
        for piece in self._pieces(text):
            self._raw += piece
            try:
                events = self._parser.feed(piece)
            except Exception:  # whatever transformers raises for a call that it cannot read
                yield from self._spoilt()
            else:
                yield from self._heard(events)

    def _pieces(self, text: str) -> Iterable[str]:
        """Yield single characters, so that each event has its place; and special tokens whole, to be taken out again."""
        at = 0
        for found in self._hidden.finditer(text):
            yield from text[at : found.start()]
            yield found[0]
            at = found.end()
        yield from text[at:]

    def _ended(self) -> Iterable[Json]:
        is_cut = self._field.startswith(CALLS) and not self._pattern("close").search(self._raw, self._at)
        try:
            events = [] if is_cut else self._parser.finalize()[1]
        except Exception:
            events, is_cut = [], True
        yield from self._heard(events)
        if is_cut:
            yield from self._say(_SAID, self._raw[self._begun if self._field.startswith(CALLS) else self._at :])
        if self._kind == _SAID and self._blank:
            yield {_SAID: self._blank}

    def _spoilt(self) -> Iterable[Json]:
        """Say a call that could not be read as it stands, and go on behind it."""
        found = self._pattern("close").search(self._raw, self._at) if self._field else None
        end = found.end() if found else len(self._raw)
        said, rest = self._raw[self._begun if self._field else self._at : end], self._raw[end:]
        self._parser, self._raw, self._at, self._field = self._new(""), "", 0, ""
        yield from self._say(_SAID, said)
        yield from self._fed(rest)

    def _heard(self, events: Iterable[Mapping[str, Any]]) -> Iterable[Json]:
        for event in events:
            name = event["field"]
            if event["type"] == "region_open":
                found = self._pattern("open", name).search(self._raw, self._at)
                if found and found.end() > found.start():
                    self._field, self._begun, self._at = name, found.start(), found.end()
            elif event["type"] == "region_chunk":
                self._at += len(event["text"])
                if not name.startswith(CALLS):
                    yield from self._say(_THOUGHT if name in THOUGHTS else _SAID, event["text"])
            elif name == self._field:
                found = self._pattern("close").search(self._raw, self._at)
                self._at, self._field = found.end() if found else self._at, ""
                if name.startswith(CALLS):
                    yield from self._called(event["value"])

    def _called(self, value: Any) -> Iterable[Json]:
        calls = [_call_of(each) for each in (value if isinstance(value, list) else [value])]
        if None in calls:
            yield from self._say(_SAID, self._raw[self._begun : self._at])
            return
        for name, arguments in filter(None, calls):
            if self._most is not None and self.calls >= self._most:
                return
            self._kind, self._blank, self._is_fresh = CALLS, "", True
            index, self.calls = self.calls, self.calls + 1
            function = {"name": name, "arguments": ""}
            yield {CALLS: [{"index": index, "id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}]}
            yield {CALLS: [{"index": index, "function": {"arguments": arguments}}]}

    def _say(self, kind: str, text: str) -> Iterable[Json]:
        """Yield the delta of a text, without blanks between one kind of speech and the next."""
        if kind != self._kind:
            self._is_fresh, self._kind, self._blank = bool(self._kind) or kind == _THOUGHT, kind, ""
        text = self._blank + self._hidden.sub("", text)
        text = text.lstrip() if self._is_fresh else text
        shown = text.rstrip()
        self._blank = text[len(shown) :]
        if shown:
            self._is_fresh = False
            yield {_SAID: shown} if kind == _SAID else dict.fromkeys(THOUGHTS[:2], shown)

    def _pattern(self, side: str, name: str | None = None) -> re.Pattern[str]:
        """Return what opens or closes a field; the empty pattern where nothing does."""
        field = self._fields[self._field if name is None else name]
        literals = field.get(side, [])
        escaped = "|".join(map(re.escape, [literals] if isinstance(literals, str) else literals))
        return re.compile(field.get(f"{side}_pattern", escaped), re.DOTALL)


def message_of(deltas: Iterable[Json]) -> Json:
    """Return the message that deltas make."""
    found: Json = {"role": "assistant", "content": None}
    for delta in deltas:
        for key, value in delta.items():
            if key != CALLS:
                found[key] = (found.get(key) or "") + value
                continue
            (piece,) = value
            if "id" in piece:
                found.setdefault(CALLS, []).append({"id": piece["id"], "type": piece["type"], "function": piece["function"]})
            else:
                found[CALLS][-1]["function"]["arguments"] += piece["function"]["arguments"]
    if found["content"] is None and CALLS not in found:
        found["content"] = ""
    return found


def _call_of(value: Any) -> tuple[str, str] | None:
    """Return name and arguments of a call, these as JSON text of an object; None if it is none."""
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    arguments = function.get("arguments") or {} if isinstance(function, dict) else None
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        text = as_json(arguments)
        text.encode()  # half a character cannot be sent
    except (ValueError, RecursionError):
        return None
    return (name, text) if isinstance(name, str) and name and isinstance(arguments, dict) else None


def _joined(deltas: Iterable[Json]) -> list[Json]:
    """Return deltas with neighbours of one kind of text as one."""
    found: list[Json] = []
    for keys, group in groupby(deltas, lambda delta: tuple[str, ...](delta)):
        same = list(group)
        found += same if CALLS in keys else [{key: "".join(each[key] for each in same) for key in keys}]
    return found
