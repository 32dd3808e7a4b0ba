"""Conversations to tokens, with a mask of what the assistant says.

If the template marks the assistant's words by `{% generation %}`, the template decides. Otherwise each assistant turn is found
by rendering the conversation up to it, with and without it. Both ways give stretches of the rendered text, and a token is the
assistant's if it stands for at least one character of such a stretch: tokens may extend beyond it (a line break of the template
and one of the assistant are one token in most vocabularies).

The invariant: a turn is trained only if these renderings agree with the whole conversation character by character; otherwise
the sample is left out, and nothing is guessed.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from headrace.data.bounded import Tokens, tokenize, tokens_between
from headrace.data.values import Encoded, Row, Tokenizer, Unmarked
from headrace.terms.errors import DataError, ModelError

Messages = list[Mapping[str, Any]]
Stretch = tuple[int, int]
"""Characters of a text: from the first one up to, and without, the second."""

_NAME_START = "headrace-content-"
_NAME = _NAME_START + "{}-"
_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class _Unmarkable(Exception):
    """It cannot be told which tokens are the assistant's; the message says why."""


@dataclass(frozen=True, slots=True)
class Template:
    """The chat template of `tokenizer`. A row may bring `tools` along, which its rendering uses."""

    tokenizer: Tokenizer
    has_tags: bool

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Template":
        """Return the template of `tokenizer`.

        Raises:
            ModelError: there is none.
        """
        template = tokenizer.chat_template
        if not template:
            raise ModelError(
                "the samples are conversations, but the tokenizer has no chat template; use the tokenizer of an instruct "
                "model, add a chat_template.jinja to its directory, or give the data as text or prompt + completion strings"
            )
        # The tokenizer chooses among several named templates by whether there are tools: tags only count if all of them have
        # tags.
        texts = template.values() if isinstance(template, dict) else [template]
        return cls(tokenizer, all(_GENERATION_TAG.search(text) for text in texts))

    def render(self, row: Row, messages: Messages, *, prompt: bool = False) -> str:
        """Return the text of `messages`; with `prompt`, the opening of an assistant turn follows them."""
        with _refusals(row, messages):
            tools = row.values.get("tools") or None
            return str(self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt))

    def render_tagged(self, row: Row, messages: Messages) -> tuple[str, list[Stretch]]:
        """Return the text of `messages` and the stretches that the template's tags mark."""
        # The tokenizer would give a mask, but it tokenises the whole text for it, and loses turns whose first blank is in no
        # token.
        from transformers.utils.chat_template_utils import render_jinja_template

        with _refusals(row, messages):
            tools = row.values.get("tools") or None
            texts, stretches = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=self.tokenizer.get_chat_template(None, tools),
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
            )
        return texts[0], stretches[0]


@contextmanager
def _refusals(row: Row, messages: Messages) -> Iterator[None]:
    try:
        yield
    # Templates are programs of the model's author: they raise what Jinja, or their own `raise_exception`, raises.
    except Exception as error:
        roles = ", ".join(str(message["role"]) for message in messages)
        raise DataError(
            f"{row.place}: the chat template refuses this conversation ({error}); its roles are {roles}. Correct the sample"
        ) from error


def encode_chat(row: Row, template: Template, most_tokens: int) -> Encoded | Unmarked:
    """Return the ids of the conversation in column `messages`, trained where the assistant speaks.

    Raises:
        DataError: malformed messages, or no assistant turn.
    """
    messages = checked_messages(row, "messages")
    if not any(message["role"] == "assistant" for message in messages):
        roles = ", ".join(str(message["role"]) for message in messages)
        raise DataError(
            f"{row.place}: no message has the role 'assistant' (found {roles}), nothing to train on; remove the sample"
        )
    if template.has_tags:
        text, stretches = template.render_tagged(row, messages)
        return _encode(row, text, iter(stretches), template.tokenizer, most_tokens)
    text = template.render(row, messages)
    return _encode(row, text, _turns(row, messages, text, template), template.tokenizer, most_tokens)


def encode_chat_completion(row: Row, template: Template, most_tokens: int) -> Encoded | Unmarked:
    """Return the ids of `prompt` + `completion`, both lists of messages, trained on all of the completion."""
    prompt = checked_messages(row, "prompt")
    text = template.render(row, prompt + checked_messages(row, "completion"))
    start = template.render(row, prompt, prompt=True)

    def completion() -> Iterator[Stretch]:
        yield _length_of_start(text, start, len(prompt)), len(text)

    return _encode(row, text, completion(), template.tokenizer, most_tokens)


def encode_contents(row: Row, messages: Messages, template: Template, most_tokens: int) -> Encoded | Unmarked:
    """Return the ids of a conversation, marked ("trained") where anybody speaks, and not in what the template adds.

    What the template adds is found by rendering the conversation with a name in the place of each text: the pieces between
    names, together with the texts, must be the rendering of the conversation itself.
    """
    places = [index for index, message in enumerate(messages) if isinstance(message.get("content"), str)]
    named = [
        dict(message, content=_NAME.format(index)) if index in places else message for index, message in enumerate(messages)
    ]
    text, frame = template.render(row, messages), template.render(row, named)
    stretches: list[Stretch] = []
    at = 0
    for index in places:
        added, name, frame = frame.partition(_NAME.format(index))
        content = str(messages[index]["content"])
        begin = at + len(added)
        rest = frame.split(_NAME_START)[0]
        spoken = next((each for each in (content, content.strip()) if text.startswith(each + rest, begin)), None)
        if not name or spoken is None or not text.startswith(added, at):
            return Unmarked(
                row.place, f"the chat template changes message {index}, so that it cannot be told from the template"
            )
        at = begin + len(spoken)
        stretches += [(begin, at)] if spoken else []
    if text[at:] != frame:
        return Unmarked(row.place, "the chat template renders other texts otherwise")
    return _encode(row, text, iter(stretches), template.tokenizer, most_tokens)


def checked_messages(row: Row, column: str) -> Messages:
    """Return the messages of `column` without null fields.

    Raises:
        DataError: not a non-empty list of objects with a `role` and a `content` (or `tool_calls`).
    """
    found = row.values[column]
    if not isinstance(found, list) or not found:
        raise DataError(
            f"{row.place}: {column} must be a non-empty list of messages, found {type(found).__name__} {str(found)[:60]!r}"
        )
    messages: Messages = []
    for index, message in enumerate(found):
        # Tables fill in null for a field that other rows have, while templates test whether a field exists.
        fields = {name: value for name, value in message.items() if value is not None} if isinstance(message, dict) else {}
        spoken = isinstance(fields.get("content"), str | list) or fields.get("tool_calls")
        if not isinstance(fields.get("role"), str) or not spoken:
            raise DataError(
                f"{row.place}: {column}[{index}] must be an object with a string role and a content, "
                f"found {str(message)[:80]!r}"
            )
        messages.append(fields)
    return messages


def _encode(row: Row, text: str, stretches: Iterator[Stretch], tokenizer: Tokenizer, most_tokens: int) -> Encoded | Unmarked:
    options = {"add_special_tokens": False} | ({"return_offsets_mapping": True} if tokenizer.is_fast else {})
    (tokens,) = tokenize([text], tokenizer, most_tokens, **options)
    trained = [False] * len(tokens.ids)
    done = 0
    try:
        for begin, end in stretches:
            # A turn that ends where it starts, or begins before the last one has ended, is not understood, and is refused.
            if not done <= begin < end:
                raise _Unmarkable("by the chat template, a turn of the assistant is empty, or begins within another")
            first, stop = _tokens_of(tokens, text, begin, end, tokenizer)
            if first >= len(trained):
                break  # this turn and all later ones are beyond what is kept
            trained[first:stop] = [True] * (stop - first)
            done = end
    except _Unmarkable as error:
        return Unmarked(row.place, str(error))
    return Encoded(tokens.ids, trained, tokens.beyond)


def _tokens_of(tokens: Tokens, text: str, begin: int, end: int, tokenizer: Tokenizer) -> Stretch:
    """Return the first and the one past the last token of a stretch of `text`."""
    if tokens.ends:
        return tokens_between(tokens, begin, end)
    # The tokenizer cannot tell which characters a token stands for, but it can tokenise the text up to a character.
    return _num_tokens(tokens, text[:begin], tokenizer), _num_tokens(tokens, text[:end], tokenizer)


def _num_tokens(tokens: Tokens, start: str, tokenizer: Tokenizer) -> int:
    (made,) = tokenize([start], tokenizer, len(tokens.ids), add_special_tokens=False)
    if tokens.ids[: len(made.ids)] != made.ids[: len(tokens.ids)]:
        raise _Unmarkable("a token reaches over the border of a turn, and this tokenizer cannot tell which characters it has")
    return min(len(made.ids), len(tokens.ids))


def _turns(row: Row, messages: Messages, text: str, template: Template) -> Iterator[Stretch]:
    """Yield where the assistant speaks in `text`, the rendering of all `messages`."""
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start = template.render(row, messages[:index], prompt=True) if index else ""
        begin = _length_of_start(text, start, index)
        closed = text if index == len(messages) - 1 else template.render(row, messages[: index + 1])
        yield begin, len(closed) if text.startswith(closed) else _end_of_turn(text, begin, closed, index, template)


def _length_of_start(text: str, start: str, index: int) -> int:
    if not text.startswith(start):
        raise _Unmarkable(f"the chat template renders what is before message {index} unlike the whole conversation")
    return len(start)


def _end_of_turn(text: str, begin: int, closed: str, index: int, template: Template) -> int:
    """Return where the turn that begins at `begin` ends in `text`.

    Some templates render the last turn differently from earlier ones (Qwen3 adds an empty thought to it), so the whole does not
    begin with `closed`, the conversation that ends with this turn. Its last special token is the mark that ends a turn in both.
    """
    marks = ((closed.rfind(mark, begin), mark) for mark in template.tokenizer.all_special_tokens if mark)
    place, mark = max(marks, default=(-1, ""))
    found = text.find(mark, begin) if place >= 0 else -1
    if found < 0:
        raise _Unmarkable(f"the chat template renders message {index} unlike the whole conversation, and no mark ends it")
    return found + len(mark)
