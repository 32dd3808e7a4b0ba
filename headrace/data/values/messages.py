"""Messages as the data has them: checked, without nulls, with the flags of turns taken out and lists of parts looked through.

Invariant: no picture, sound or video goes on as if it were text, and no flag reaches a chat template.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.terms.errors import DataError, shortened

Message = Mapping[str, Any]
Messages = list[Message]

# By whom: OpenAI; AgentInstruct and LLaMA-Factory; axolotl (both).
FLAGS = ("weight", "loss", "train", "training")
# Which characters of a turn are trained (axolotl).
_FLAGS_WITHIN = ("train_detail", "training_detail")
_TEXT_TYPES = ("text", "input_text", "output_text")
_HALF = re.compile("[\ud800-\udfff]")
MEDIA_COLUMNS = ("images", "image", "videos", "video", "audios", "audio")


@dataclass(frozen=True, slots=True)
class Conversation:
    """`messages` without flags; `untrained` are the indices of turns that the data marks as context only."""

    messages: Messages
    untrained: frozenset[int] = frozenset()
    remarks: tuple[str, ...] = ()


def read_messages(place: str, found: Any, column: str) -> Conversation:
    """Return the messages that stand in `column`, without null fields.

    Raises: DataError: no list of objects with a `role` and a `content` (or `tool_calls`), or an empty one. Or a picture, sound
        or video; or a flag that is neither on nor off.
    """
    if not isinstance(found, list) or not found:
        raise DataError(
            f"{place}: {column} must be a non-empty list of messages, found {type(found).__name__} {str(found)[:60]!r}"
        )
    messages: Messages = []
    untrained: set[int] = set()
    remarks: list[str] = []
    for index, message in enumerate(found):
        # Tables fill in null for a field that other rows have, while templates test whether a field exists.
        fields = {name: value for name, value in message.items() if value is not None} if isinstance(message, dict) else {}
        spoken = isinstance(fields.get("content"), str | list) or fields.get("tool_calls")
        if not isinstance(fields.get("role"), str) or not spoken:
            raise DataError(
                f"{place}: {column}[{index}] must be an object with a string role and a content, found {str(message)[:80]!r}"
            )
        where = f"{place}: {column}[{index}]"
        refuse_media(where, fields)
        flag = _flag(where, fields)
        if flag is False:
            untrained.add(index)
        elif flag and fields["role"] != "assistant":
            remarks.append(
                f"a flag asks to train a message of role {fields['role']!r}; only turns of the assistant are trained"
            )
        messages.append(plain(where, {name: value for name, value in fields.items() if name not in FLAGS}))
    return Conversation(messages, frozenset(untrained), tuple(dict.fromkeys(remarks)))


def read_tools(place: str, found: Any) -> list[Any] | None:
    """Return the tools of a conversation; None for none. They may be given as JSON text, whole or one by one.

    Raises:
        DataError: not a list of objects, nor JSON text of one.
    """
    if isinstance(found, str):
        found = read_json(f"{place}: tools", found) if found.strip() else None
    if isinstance(found, list):
        found = [read_json(f"{place}: tools[{index}]", tool) for index, tool in enumerate(found)]
    if not found:
        return None
    if not isinstance(found, list) or not all(isinstance(tool, dict) for tool in found):
        raise DataError(f"{place}: tools must be a list of objects, found {str(found)[:60]!r}. Correct the sample")
    return found


def read_json(where: str, value: Any) -> Any:
    """Return the value of JSON text; what is no text stays as it is.

    Raises:
        DataError: it is text, but not JSON.
    """
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{where} is not JSON ({str(error) or 'too deep'}), found {value[:60]!r}. Correct the sample"
        ) from error


def whole_text(where: str, text: str) -> str:
    """Return `text`, which a tokenizer will read.

    Raises:
        DataError: it has half a character, as JSON can escape one; `where` names the text.
    """
    if found := _HALF.search(text):
        raise DataError(
            f"{where} has half a character ({found[0]!a} behind {text[: found.start()][-20:]!r}), which no UTF-8 can write; "
            "correct the text"
        )
    return text


def plain(where: str, message: Message) -> Message:
    """Return `message` with its list of parts, if it has one, as objects `{"type": "text", "text": ...}`.

    Raises:
        DataError: a part is a picture, a sound, a video or of a kind that is not known; `where` names the message.
    """
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [_part(where, part) for part in content]}


def _part(where: str, part: Any) -> Any:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(part, dict) and isinstance(part.get("text"), str) and kind in (*_TEXT_TYPES, None):
        return part if kind == "text" else {"type": "text", "text": part["text"]}
    if kind == "thinking":
        return part
    named = f"a part of type {shortened(str(kind), 60)!r}" if kind else f"a part {str(part)[:60]!r}"
    raise DataError(f"{where} has {named}; only text is read. Take it out, or leave the sample out")


def refuse_media(place: str, values: Mapping[str, Any]) -> None:
    """Refuse pictures, sounds and videos that stand beside the messages of a row, or beside the content of one.

    Raises:
        DataError: there are some.
    """
    for column in MEDIA_COLUMNS:
        if values.get(column):
            raise DataError(f"{place}: {column!r} is not empty; only text is read. Take it out, or leave the sample out")


def _flag(where: str, fields: Message) -> bool | None:
    """Return whether a turn is to be trained: None if nothing is said."""
    for name in _FLAGS_WITHIN:
        if fields.get(name):
            raise DataError(f"{where} has {name}, which trains parts of a turn; this is not supported. Use a flag of the turn")
    found = {name: fields[name] for name in FLAGS if name in fields}
    for name, value in found.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise DataError(
                f"{where} has {name} {shortened(repr(value), 60)}; expected 0, 1, false or true. Correct the sample"
            )
    if len({bool(value) for value in found.values()}) > 1:
        raise DataError(f"{where} has {' and '.join(f'{n} {v!r}' for n, v in found.items())}, which differ. Correct the sample")
    return bool(next(iter(found.values()))) if found else None


def unread_fields(messages: Sequence[Message], read: Sequence[str]) -> list[str]:
    """Return the unused fields of messages: read neither by this program nor by the texts `read` of a chat template."""
    reasoning = ("reasoning_content", "reasoning", "thinking")  # transformers hands each on under all names
    names = dict.fromkeys(name for message in messages for name in message)
    known = {"role", "content", "name", "tool_call_id", *FLAGS, *_FLAGS_WITHIN}

    def is_read(name: str) -> bool:
        return any(each in text for each in (reasoning if name in reasoning else (name,)) for text in read)

    return [name for name in names if name not in known and not is_read(name)]
