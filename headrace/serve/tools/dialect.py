"""What a dialect is: the words by which a family of models calls tools and thinks.

A dialect's fields are those of transformers' response templates. Those whose names begin with `tool_calls` are calls.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]
CALLS = "tool_calls"
# How fields of response templates call a thought.
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_CONTENT: Json = {"content": {"content": "text"}}


def as_json(value: Any) -> str:
    """Return `value` as JSON text."""
    return json.dumps(value, ensure_ascii=False)


def thought(begin: str = "<think>", end: str = "</think>") -> Json:
    """Return the field of a thought between two marks."""
    return {THOUGHTS[0]: {"open": begin, "close": end, "content": "text"}}


def call(arguments: str = "{content}", name: str = "{name}") -> Json:
    """Return the transform of a call whose name its opening pattern captures."""
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


@dataclass(frozen=True, slots=True)
class Dialect:
    """One dialect. A chat template speaks it if it has all of one of `marks`. `content`: where the answer stands, by default
    in all that no other field has. A call is written as `begin`, name, `middle`, arguments, `end`. `hidden` are marks that no
    content shows, beside special tokens.
    """

    name: str
    marks: tuple[tuple[str, ...], ...]
    fields: Mapping[str, Any]
    begin: str = ""
    middle: str = ""
    end: str = ""
    arguments: Callable[[Mapping[str, Any]], str] = as_json
    hidden: tuple[str, ...] = ()
    content: Mapping[str, Any] = field(default_factory=lambda: _CONTENT)

    def speaks(self, templates: list[str]) -> bool:
        """Return whether one of these chat templates is of this dialect."""
        return any(all(mark in text for mark in marks) for marks in self.marks for text in templates)

    def response_template(self, *, calls: bool) -> Json:
        """Return transformers' response template; without `calls` they are content. It is given the opening of the turn alone
        as prefix, so its anchor is a text that nobody writes.
        """
        fields = {name: each for name, each in self.fields.items() if calls or not name.startswith(CALLS)}
        return {"start_anchor": "\0", "fields": {**self.content, **fields}}

    def words(self, tools: list[Any]) -> str:
        """Return what a system message says of tools, for templates that say nothing of them."""
        form = f"{self.begin}NAME{self.middle}{self.arguments({'ARGUMENT': 'VALUE'})}{self.end}"
        listed = "\n".join(map(as_json, tools))
        return f"You may call these functions to help the user:\n{listed}\nTo call one, answer in this form alone:\n{form}"

    def written(self, name: str, arguments: Any) -> str:
        """Return the text of a call; `arguments` are an object, or JSON text of one."""
        return f"{self.begin}{name}{self.middle}{self._given(arguments)}{self.end}"

    def _given(self, arguments: Any) -> str:
        found = json.loads(arguments or "{}") if isinstance(arguments, str | None) else arguments
        return self.arguments(found)


def tagged(before: str, between: str, after: str) -> Callable[[Mapping[str, Any]], str]:
    """Return what writes arguments one by one, each value as text or as JSON."""

    def written(values: Mapping[str, Any]) -> str:
        texts = {key: each if isinstance(each, str) else as_json(each) for key, each in values.items()}
        return "".join(f"{before}{key}{between}{text}{after}" for key, text in texts.items())

    return written
