"""Conversations to tokens, with the mask of what the assistant says.

Where the template marks the assistant's words by `{% generation %}`, the template decides. Elsewhere each assistant turn is
found by rendering the conversation up to it, with and without it. The invariant: a turn is trained only where these renderings
agree with the whole conversation token by token; a template for which they do not is refused, never guessed at.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.data.values import Row, Tokenizer
from headrace.terms.errors import DataError, ModelError

Messages = list[Mapping[str, Any]]
Encoded = tuple[list[int], list[bool]]
"""Token ids of a sample, and for each whether it is a target."""

_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclass(frozen=True, slots=True)
class Template:
    """The chat template of `tokenizer`. Renderings are functions of a row, which may bring `tools` along."""

    tokenizer: Tokenizer
    has_tags: bool

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Template":
        """Return the template of `tokenizer`.

        Raises:
            ModelError: it has none.
        """
        template = tokenizer.chat_template
        if not template:
            raise ModelError(
                "the samples are conversations, but the tokenizer has no chat template; use the tokenizer of an instruct "
                "model, add a chat_template.jinja to its directory, or give the data as text or prompt + completion strings"
            )
        # Of several named templates the tokenizer chooses by whether there are tools: tags count if all have them. Only fast
        # tokenizers can tell which tokens a tagged stretch of text became.
        texts = template.values() if isinstance(template, dict) else [template]
        return cls(tokenizer, tokenizer.is_fast and all(_GENERATION_TAG.search(text) for text in texts))

    def render(self, row: Row, messages: Messages, *, prompt: bool = False) -> list[int]:
        """Return the ids of `messages`; with `prompt`, the opening of an assistant turn follows them."""
        return list(self._apply(row, messages, add_generation_prompt=prompt)["input_ids"])

    def render_tagged(self, row: Row, messages: Messages) -> Encoded:
        """Return the ids of `messages` and the mask that the template's tags give."""
        made = self._apply(row, messages, return_assistant_tokens_mask=True)
        return list(made["input_ids"]), [bool(trained) for trained in made["assistant_masks"]]

    def _apply(self, row: Row, messages: Messages, **options: Any) -> Any:
        tools = row.values.get("tools") or None
        try:
            return self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=True, **options)
        # Templates are programs of the model's author: they raise whatever Jinja, or their own `raise_exception`, raises.
        except Exception as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise DataError(
                f"{row.place}: the chat template refuses this conversation ({error}); its roles are {roles}. Correct the sample"
            ) from error


def encode_chat(row: Row, template: Template) -> Encoded:
    """Return the ids of the conversation in column `messages`, trained where the assistant speaks.

    Raises:
        DataError: malformed messages, no assistant turn, or a template whose turns cannot be told apart.
    """
    messages = checked_messages(row, "messages")
    if not any(message["role"] == "assistant" for message in messages):
        roles = ", ".join(str(message["role"]) for message in messages)
        raise DataError(
            f"{row.place}: no message has the role 'assistant' (found {roles}), nothing to train on; remove the sample"
        )
    if template.has_tags:
        return template.render_tagged(row, messages)
    return _by_prefixes(row, messages, template)


def encode_chat_completion(row: Row, template: Template) -> Encoded:
    """Return the ids of `prompt` + `completion`, both lists of messages, trained on all of the completion."""
    prompt = checked_messages(row, "prompt")
    ids = template.render(row, prompt + checked_messages(row, "completion"))
    start = template.render(row, prompt, prompt=True)
    if ids[: len(start)] != start:
        raise DataError(_unlike(row, len(prompt)))
    return ids, [False] * len(start) + [True] * (len(ids) - len(start))


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
        # Tables fill in null for a field that other rows have; templates test whether a field is there.
        fields = {name: value for name, value in message.items() if value is not None} if isinstance(message, dict) else {}
        spoken = isinstance(fields.get("content"), str | list) or fields.get("tool_calls")
        if not isinstance(fields.get("role"), str) or not spoken:
            raise DataError(
                f"{row.place}: {column}[{index}] must be an object with a string role and a content, "
                f"found {str(message)[:80]!r}"
            )
        messages.append(fields)
    return messages


def _by_prefixes(row: Row, messages: Messages, template: Template) -> Encoded:
    ids = template.render(row, messages)
    trained = [False] * len(ids)
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    starts = [template.render(row, messages[:index], prompt=True) if index else [] for index in turns]
    limits = [*(len(start) for start in starts[1:]), len(ids)]
    for index, start, limit in zip(turns, starts, limits, strict=True):
        if ids[: len(start)] != start:
            raise DataError(_unlike(row, index))
        closed = ids if index == len(messages) - 1 else template.render(row, messages[: index + 1])
        stop = len(closed) if ids[: len(closed)] == closed else _end_of_turn(ids, start, closed, template)
        # A turn that ends where it starts, or only after the next has begun, is not understood: say so.
        if not len(start) < stop <= limit:
            raise DataError(_unlike(row, index))
        trained[len(start) : stop] = [True] * (stop - len(start))
    return ids, trained


def _end_of_turn(ids: Sequence[int], start: Sequence[int], closed: Sequence[int], template: Template) -> int:
    """Return where the turn that begins at `start` ends in `ids`, 0 if that is not known.

    Some templates render the last turn unlike earlier ones (Qwen3 adds an empty thought to it), so `closed`, the conversation
    that ends with this turn, is no prefix of the whole. Its last special token is the mark that ends a turn in both.
    """
    special = set(template.tokenizer.all_special_ids)
    mark = next((token for token in reversed(closed[len(start) :]) if token in special), None)
    return ids.index(mark, len(start)) + 1 if mark is not None and mark in ids[len(start) :] else 0


def _unlike(row: Row, index: int) -> str:
    return (
        f"{row.place}: cannot tell which tokens of message {index} are the assistant's: the chat template has no "
        "{% generation %} tags, and it renders the beginning of this conversation unlike the whole. Put {% generation %} and "
        "{% endgeneration %} around the assistant's content in the chat template, or give the data as prompt + completion"
    )
