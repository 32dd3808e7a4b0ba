"""What a chat asks: its prompt, with the tools that the template or a dialect's own words tell of, and how its answer is read.

Invariant: a tool that the model is not told of is refused, never passed over.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from headrace.data.chat.api_bodies import messages_of, template_options_of
from headrace.data.chat.prompts import Prompts
from headrace.data.values.messages import read_tools
from headrace.serve.tools.dialect import CALLS, THOUGHTS, Dialect, Json
from headrace.serve.tools.speech import Speech
from headrace.serve.tools.table import DIALECTS
from headrace.terms.errors import DataError, refusing, shortened

CHAT_KEYS = ("messages", "tools", "tool_choice", "parallel_tool_calls")
_AUTO, _NONE, _REQUIRED = "auto", "none", "required"


@dataclass(frozen=True, slots=True)
class AskedTools:
    """The text of a prompt, and what makes a reader of an answer to it; None: it is read as it is."""

    text: str
    speech: Callable[[], Speech] | None


@dataclass(frozen=True)
class Asking:
    """Reads bodies of chats. `named` is the dialect of `--tool-dialect`; else the tokenizer or the template's marks say it."""

    prompts: Prompts
    named: str | None = None

    def __post_init__(self) -> None:
        """Refuse a tokenizer whose own response template transformers does not read.

        Raises:
            ModelError: it is none; the message says why.
        """
        if (own := getattr(self.prompts.tokenizer, "response_template", None)) is not None and self.named is None:
            with refusing("response_template of tokenizer_config.json cannot be used; correct it, or give --tool-dialect NAME"):
                self.prompts.tokenizer.get_response_parser(own, prefix="")

    @cached_property
    def dialect(self) -> Dialect | None:
        """The dialect, if one is known."""
        if self.named is not None or not self.prompts.tokenizer.chat_template:
            return DIALECTS.get(self.named or "")
        return next((each for each in DIALECTS.values() if each.speaks(self.prompts.template.texts)), None)

    def read(self, body: Mapping[str, Any]) -> AskedTools:
        """Return what a body asks.

        Raises:
            InputError: it is no conversation, the template refuses it, or does not tell of tools, or a choice cannot be kept.
        """
        messages, tools = messages_of(body), read_tools("the request", body.get("tools"))
        options, (choice, most_calls) = template_options_of(body), _choice_of(body, tools)
        render = partial(self.prompts.rendered, options=options)
        text, told = render(messages, tools), tools
        if tools and text == render(messages):
            if self.named is None or self.dialect is None or not self.dialect.begin:
                raise DataError(
                    "the model's chat template does not tell of tools; leave them out, or serve with --tool-dialect NAME"
                )
            messages, told = list(_in_words(messages, tools, self.dialect)), None
            text = render(messages)
        template, own = None, getattr(self.prompts.tokenizer, "response_template", None)
        if own is not None and self.named is None:
            template, prefix = _without_calls(own, tools and choice != _NONE), text
        elif self.dialect is not None:
            template = self.dialect.response_template(calls=bool(tools) and choice != _NONE)
            before = render(messages, told, prompt=False)
            prefix = text[len(before) :] if text.startswith(before) else ""
        if template is None:
            if choice not in (_AUTO, _NONE):
                raise DataError("tool_choice: it is not known how this model calls tools; serve with --tool-dialect NAME")
            return AskedTools(text, None)
        make = partial(self._speech, template, prefix, tools, most_calls)
        if choice in (_AUTO, _NONE):
            return AskedTools(text, make)
        begun = self._call_begun(choice, make().thinks)
        return AskedTools(text + begun, lambda: _after(make(), begun))

    def _speech(self, template: Json, prefix: str, tools: Any, most_calls: int | None) -> Speech:
        parser = partial(self.prompts.tokenizer.get_response_parser, template, tools=tools)
        marks = [*self.prompts.template.marks, *(self.dialect.hidden if self.dialect else ())]
        return Speech(lambda prefix: parser(prefix=prefix), template, prefix, marks, most_calls)

    def _call_begun(self, choice: str, thinks: bool) -> str:
        """Return the words with which an answer has to begin so that it calls: any function, or the one of that name."""
        if self.dialect is None or not self.dialect.begin:
            raise DataError("tool_choice: it is not known how this model calls tools; serve with --tool-dialect NAME")
        end = self.dialect.fields[THOUGHTS[0]]["close"] if thinks else ""
        closed = f"{end if isinstance(end, str) else end[0]}\n\n" if thinks else ""
        name = "" if choice == _REQUIRED else choice.removeprefix("=") + self.dialect.middle
        return (closed + self.dialect.begin + name).rstrip()  # tokens begin with a blank, and none ends with one


def _after(speech: Speech, begun: str) -> Speech:
    """Return `speech` behind the words that the prompt has of the answer."""
    speech.feed(begun)
    return speech


def _without_calls(template: Mapping[str, Any], calls: Any) -> Json:
    fields = {name: each for name, each in template["fields"].items() if calls or not name.startswith(CALLS)}
    return {**template, "fields": fields}


def _choice_of(body: Mapping[str, Any], tools: list[Any] | None) -> tuple[str, int | None]:
    """Return a body's choice of tools (auto, none, required, or `=` and a name), and the most calls, None for any number.

    Raises:
        DataError: it is not understood, or chooses what is not there.
    """
    choice, several = body.get("tool_choice") or _AUTO, body.get("parallel_tool_calls")
    if not isinstance(several, bool | None):
        raise DataError(f"parallel_tool_calls must be true or false, found {shortened(repr(several))}")
    names = [each.get("function", each).get("name") for each in tools or [] if isinstance(each.get("function", each), dict)]
    if isinstance(choice, dict) and isinstance(choice.get("function"), dict):
        if choice["function"].get("name") not in names:
            raise DataError(f"tool_choice: {shortened(repr(choice))} is none of the tools ({shortened(repr(names))})")
        choice = f"={choice['function']['name']}"
    elif choice not in (_AUTO, _NONE, _REQUIRED):
        raise DataError(f"tool_choice must be auto, none, required or a function by name, found {shortened(repr(choice))}")
    if choice == _REQUIRED and not tools:
        raise DataError("tool_choice is required, but the request has no tools; give some")
    if choice == _REQUIRED and len(names) == 1:
        choice = f"={names[0]}"
    return choice, 1 if several is False else None


def _in_words(messages: list[Json], tools: list[Any], dialect: Dialect) -> Iterator[Json]:
    """Yield messages for a template that knows neither tools nor calls nor results: all of it in words."""
    first = messages[0] if messages[0]["role"] == "system" else {"role": "system", "content": ""}
    yield {**first, "content": f"{_text_of(first)}\n\n{dialect.words(tools)}".lstrip()}
    for each in messages[1:] if first is messages[0] else messages:
        calls = each.get("tool_calls")
        if each["role"] == "tool":
            yield {"role": "user", "content": f"<tool_response>\n{_text_of(each)}\n</tool_response>"}
        elif isinstance(calls, list) and calls:
            yield {
                "role": each["role"],
                "content": "\n".join([_text_of(each), *(_written(call, dialect) for call in calls)]).lstrip(),
            }
        else:
            yield each


def _text_of(message: Json) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    if not parts or not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise DataError(f"a content beside tools must be a text, found {shortened(repr(content))}")
    return "".join(part["text"] for part in parts)


def _written(call: Any, dialect: Dialect) -> str:
    try:
        function = call["function"]
        return dialect.written(str(function["name"]), function.get("arguments"))
    except (AttributeError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise DataError(f"tool_calls must have function, name and arguments as JSON, found {shortened(repr(call))}") from error
