"""A tokenizer's chat template: what it renders, and which forms of contents and arguments it takes, found by trying it.

Invariant: templates are programs of the model's author. What they do is found by rendering, once, and never by their names.
"""

import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from itertools import takewhile
from typing import Any

from headrace.data.values.messages import Message, Messages
from headrace.data.values.values import Tokenizer
from headrace.terms.errors import DataError, ModelError, shortened

Stretch = tuple[int, int]
"""Characters of a text: from the first one up to, and without, the second."""

# What transformers offers to templates: a function of a format.
_ASKS_TIME = "strftime_now"
_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Words of conversations that are only rendered to see what the template does.
_ASKED, _SAID = "headrace asks", "headrace answers"
_KEY, _VALUE = "headracekey", "headracevalue"
_TOOL = {
    "type": "function",
    "function": {"name": "headrace", "description": "tries", "parameters": {"type": "object", "properties": {}}},
}


def asks_for_time(tokenizer: Tokenizer) -> bool:
    """Return whether a chat template of `tokenizer` asks for the time, so that it renders otherwise another day."""
    return any(_ASKS_TIME in text for text in _texts(getattr(tokenizer, "chat_template", None) or ""))


class TemplateRefusal(DataError):
    """The template does not render a conversation."""


@dataclass(frozen=True)
class Template:
    """The chat template of `tokenizer`. Conversations may bring `tools` along, which their rendering uses."""

    tokenizer: Tokenizer
    has_tags: bool
    day: str | None = None
    _takes: dict[tuple[str, str], bool] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, tokenizer: Tokenizer, day: str | None = None) -> "Template":
        """Return the template of `tokenizer`. If it asks for the time, that is the beginning of `day`, or now.

        Raises:
            ModelError: there is none.
        """
        template = tokenizer.chat_template
        if not template:
            raise ModelError(
                "the samples are conversations, but the tokenizer has no chat template. Use the tokenizer of an instruct "
                "model, add a chat_template.jinja to its directory, or give the data as text or prompt + completion strings"
            )
        # The tokenizer chooses among several named templates by whether there are tools: tags only count if all of them have
        # tags.
        return cls(tokenizer, all(_GENERATION_TAG.search(text) for text in _texts(template)), day)

    @property
    def texts(self) -> list[str]:
        """The template itself, or several."""
        return _texts(self.tokenizer.chat_template)

    def render(
        self,
        messages: Messages,
        tools: Any = None,
        *,
        prompt: bool = False,
        opened: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of `messages`; with `prompt`, the opening of an assistant turn follows them; with `opened`, the last
        of them does not end. `variables` are the template's own, such as `enable_thinking`.

        Raises:
            TemplateRefusal: the template raises.
            DataError: a variable has the name of an argument: a template of a client's own would be a program of its.
        """
        if not messages:  # which the tokenizer's own method does not take
            return self._render(messages, tools, add_generation_prompt=prompt)[0]
        if taken := self._arguments & set(variables or ()):
            raise DataError(f"{min(taken)} is no variable of a chat template; it is set by Headrace. Leave it out")
        with _refusals():
            dated = {} if self.day is None else {"chat_template": self._dated(tools)}
            options = {"tools": tools, "add_generation_prompt": prompt, "continue_final_message": opened, **dated}
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **options, **(variables or {})))

    @cached_property
    def _arguments(self) -> set[str]:
        """What transformers takes beside a template's variables."""
        from transformers.utils.chat_template_utils import render_jinja_template

        methods = (type(self.tokenizer).apply_chat_template, render_jinja_template)
        return {"messages", *(name for each in methods for name in inspect.signature(each).parameters)}

    def render_tagged(self, messages: Messages, tools: Any = None) -> tuple[str, list[Stretch]]:
        """Return the text of `messages` and the stretches that the template's tags mark.

        Raises:
            TemplateRefusal: the template raises.
        """
        # The tokenizer would give a mask, but it tokenises the whole text for it, and loses turns whose first blank is in no
        # token.
        return self._render(messages, tools, return_assistant_tokens_mask=True)

    def try_render(self, messages: Messages, tools: Any = None, *, prompt: bool = False) -> str | None:
        """Return the text of `messages`, or None where the template refuses them."""
        try:
            return self.render(messages, tools, prompt=prompt)
        except TemplateRefusal:
            return None

    def given(self, messages: Sequence[Message]) -> Messages:
        """Return `messages` in the forms that the template takes: contents as text or parts, arguments as objects or text."""
        return [self._given(message) for message in messages]

    @cached_property
    def header(self) -> str | None:
        """What opens a turn of the assistant: "" if nothing but white space does, None if it cannot be told.

        The generation prompt may go further (into a thought), and so may a turn: what both begin with is the header.
        """
        beginnings: list[Messages] = [[], [{"role": "system", "content": _SAID}]]
        found = (self._header_after(first) for first in beginnings)
        return next((header for header in found if header is not None), None)

    def _header_after(self, first: Messages) -> str | None:
        asked = [*first, {"role": "user", "content": _ASKED}]
        turn = [*asked, {"role": "assistant", "content": _SAID}]
        before, prompt = self.try_render(asked), self.try_render(asked, prompt=True)
        whole = self.try_render([*turn, {"role": "user", "content": _ASKED}]) or self.try_render(turn)
        if before is None or prompt is None or whole is None or not (prompt.startswith(before) and whole.startswith(before)):
            return None
        opened, asks = whole[len(before) :].partition(_SAID)[0], prompt[len(before) :]
        same = takewhile(lambda pair: pair[0] == pair[1], zip(asks, opened, strict=False))
        header = "".join(each for each, _ in same) if asks else opened
        return header if header.strip() else ""

    @cached_property
    def marks(self) -> list[str]:
        """All special tokens of the tokenizer, also those without a role of their own."""
        added = [str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        return [mark for mark in dict.fromkeys([*self.tokenizer.all_special_tokens, *added]) if mark]

    @cached_property
    def answer_end(self) -> str | None:
        """What follows the words of the last turn; None if it cannot be told."""
        whole = self.try_render([{"role": "user", "content": _ASKED}, {"role": "assistant", "content": _SAID}]) or ""
        return whole.partition(_SAID)[2] if _SAID in whole else None

    @cached_property
    def tags_leave_end_out(self) -> bool:
        """Whether the template ends a turn with a mark that its tags do not enclose."""
        try:
            text, found = self.render_tagged([{"role": "user", "content": _ASKED}, {"role": "assistant", "content": _SAID}])
        except TemplateRefusal:
            return False
        place = text.find(_SAID) + len(_SAID)
        return bool(text[place:].strip()) and place in [end for _, end in found]

    def _dated(self, tools: Any) -> str:
        """Return the template's text, which asks a function of its own for the time where that is not now.

        Variables cannot be functions, and transformers keeps compiled templates by their texts: so it has another name.
        """
        from transformers.utils.chat_template_utils import _compile_jinja_template

        text = self.tokenizer.get_chat_template(None, tools)
        if self.day is None or _ASKS_TIME not in text:
            return text
        name = f"headrace_{_ASKS_TIME}_{self.day.replace('-', '_')}"
        dated = re.sub(rf"\b{_ASKS_TIME}\b", name, text)
        _compile_jinja_template(dated).globals[name] = datetime.fromisoformat(self.day).strftime
        return dated

    def _given(self, message: Message) -> Message:
        content, role = message.get("content"), str(message["role"])
        given = dict(message)
        if isinstance(content, list) and not self._takes_content(role, "parts"):
            given["content"] = "".join(_text_of(message, part) for part in content)
        if isinstance(content, str) and not self._takes_content(role, "text") and self._takes_content(role, "parts"):
            given["content"] = [{"type": "text", "text": content}]
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            given["tool_calls"] = [self._given_call(call) for call in calls]
            if content is None and not self._takes_no_content:
                given["content"] = ""
        return given

    @cached_property
    def _takes_no_content(self) -> bool:
        """Whether the assistant may call without a content."""
        call = {key: value for key, value in _calling({}).items() if key != "content"}
        return self.try_render([{"role": "user", "content": _ASKED}, call], [_TOOL]) is not None

    def _given_call(self, call: Any) -> Any:
        if not isinstance(call, dict):
            return call
        if isinstance(call.get("function"), dict):
            return {**call, "function": self._given_call(call["function"])}
        arguments = call.get("arguments")
        if isinstance(arguments, str) and not self._takes_arguments("text") and self._takes_arguments("object"):
            return {**call, "arguments": _object_in(arguments)}
        if isinstance(arguments, dict) and not self._takes_arguments("object") and self._takes_arguments("text"):
            return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}
        return call

    def _takes_content(self, role: str, form: str) -> bool:
        """Return whether a content of `role` in this form, text or parts, is printed as its words."""
        if (role, form) not in self._takes:
            words = [_KEY, _VALUE]
            content = " ".join(words) if form == "text" else [{"type": "text", "text": word} for word in words]
            message, asked = {"role": role, "content": content}, {"role": "user", "content": _ASKED}
            told = [{"type": "text", "text": _ASKED}]
            tries: dict[str, tuple[Messages, ...]] = {
                "system": ([message, asked], [message, {"role": "user", "content": told}]),
                "user": ([message],),
                "assistant": ([asked, message], [{"role": "user", "content": told}, message]),
                "tool": ([asked, _calling({}), {**message, "tool_call_id": "headrace1"}],),
            }
            texts = [self.try_render(each, [_TOOL] if role == "tool" else None) for each in tries.get(role, ([message],))]
            text = next((each for each in texts if each is not None), "")
            repeated = any(f"{q}text{q}: {q}{_KEY}{q}" in text for q in "'\"")
            self._takes[role, form] = all(word in text for word in words) and not repeated
        return self._takes[role, form]

    def _takes_arguments(self, form: str) -> bool:
        """Return whether arguments of calls in this form, text or object, are printed as JSON or taken apart."""
        if ("arguments", form) not in self._takes:
            arguments = {_KEY: _VALUE}
            written = json.dumps(arguments)
            text = self.try_render(
                [{"role": "user", "content": _ASKED}, _calling(written if form == "text" else arguments)], [_TOOL]
            )
            shown = text is not None and (written in text if form == "text" else _KEY in text and _VALUE in text)
            self._takes["arguments", form] = shown and f"'{_KEY}'" not in (text or "")
        return self._takes["arguments", form]

    def _render(self, messages: Messages, tools: Any, **options: Any) -> tuple[str, list[Stretch]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        with _refusals():
            texts, stretches = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=self._dated(tools),
                **options,
                **self.tokenizer.special_tokens_map,
            )
        return texts[0], stretches[0] if stretches else []


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    # Templates raise what Jinja, or their own `raise_exception`, raises.
    except Exception as error:
        raise TemplateRefusal(f"the chat template refuses this conversation ({shortened(str(error))})") from error


def _texts(template: Any) -> list[str]:
    return list(template.values()) if isinstance(template, Mapping) else [template]


def _text_of(message: Message, part: Mapping[str, Any]) -> str:
    if "text" not in part:
        raise TemplateRefusal(f"the chat template takes no part of type {part.get('type')!r} from {message['role']}")
    return str(part["text"])


def _calling(arguments: Any) -> Message:
    call = {"id": "headrace1", "type": "function", "function": {"name": "headrace", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _object_in(arguments: str) -> Any:
    """Return the object that a text has as JSON; what is none stays text."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments
