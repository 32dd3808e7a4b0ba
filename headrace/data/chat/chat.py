"""Conversations to tokens, with a mask of what the assistant says: stretches of the rendered text (`turns.py`) become tokens.

Invariant: a token is the assistant's if it stands for at least one character of a stretch. Tokens may extend beyond it: a line
break of the template and one of the assistant are one token in most vocabularies.
"""

from collections.abc import Iterator

from headrace.data.chat.chat_template import Stretch, Template, TemplateRefusal
from headrace.data.chat.turns import Rendered, Unmarkable
from headrace.data.values.bounded import Tokens, tokenize, tokens_between
from headrace.data.values.messages import Messages, read_messages, read_tools, refuse_media, whole_text
from headrace.data.values.values import Encoded, Row, Tokenizer, Unmarked
from headrace.terms.errors import DataError, shortened

_NAME_START = "headrace-content-"
_NAME = _NAME_START + "{}-"


def encode_chat(row: Row, template: Template, most_tokens: int, columns: tuple[str, ...] = ("messages",)) -> Encoded | Unmarked:
    """Return the ids of the conversation in `columns`. Trained are the assistant's words in the last of them, except for turns
    that the data flags as context.

    Raises:
        DataError: malformed messages, or no assistant turn.
    """
    read = [read_messages(row.place, row.values[column], column) for column in columns]
    refuse_media(row.place, row.values)
    messages = [message for each in read for message in each.messages]
    first = len(messages) - len(read[-1].messages)
    spoken = [index for index, message in enumerate(messages) if index >= first and message["role"] == "assistant"]
    if not spoken:
        raise DataError(
            f"{row.place}: no message has the role 'assistant' (found {_roles(messages[first:])}), "
            "nothing to train on; remove the sample"
        )
    trained = [index for index in spoken if index - first not in read[-1].untrained]
    try:
        tools, tagged = read_tools(row.place, row.values.get("tools")), template.has_tags and len(columns) == 1
        rendered = Rendered.of(template, messages, tools, tagged=tagged)
        rendered.remarks.extend(remark for each in read for remark in each.remarks)
        return _encode(row, rendered.text, rendered.turns(trained), template.tokenizer, most_tokens, rendered.remarks)
    except TemplateRefusal as error:
        return _refused(row, messages, error)


def encode_whole(row: Row, template: Template, most_tokens: int, columns: tuple[str, ...]) -> Encoded | Unmarked:
    """Return the ids of the conversation in `columns`, all trained.

    Raises:
        DataError: malformed messages.
    """
    refuse_media(row.place, row.values)
    said = [message for column in columns for message in read_messages(row.place, row.values[column], column).messages]
    try:
        text = template.render(template.given(said), read_tools(row.place, row.values.get("tools")))
    except TemplateRefusal as error:
        return _refused(row, said, error)
    return _encode(row, text, iter([(0, len(text))]), template.tokenizer, most_tokens, [])


def encode_contents(row: Row, said: Messages, template: Template, most_tokens: int) -> Encoded | Unmarked:
    """Return the ids of a conversation, marked ("trained") where anybody speaks, and not in what the template adds.

    To find what the template adds, the conversation is rendered with a name in the place of each text. The pieces between
    names, together with the texts, must be the rendering of the conversation itself.
    """
    try:
        messages, tools = template.given(said), read_tools(row.place, row.values.get("tools"))
        places = [index for index, message in enumerate(messages) if isinstance(message.get("content"), str)]
        named = [
            dict(message, content=_NAME.format(index)) if index in places else message for index, message in enumerate(messages)
        ]
        text, frame = template.render(messages, tools), template.render(named, tools)
    except TemplateRefusal as error:
        return _refused(row, said, error)
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
    return _encode(row, text, iter(stretches), template.tokenizer, most_tokens, [])


def _refused(row: Row, messages: Messages, error: TemplateRefusal) -> Unmarked:
    return Unmarked(row.place, f"{error}; its roles are {_roles(messages)}")


def _roles(messages: Messages) -> str:
    return shortened(", ".join(str(message["role"]) for message in messages))


def _encode(
    row: Row, text: str, stretches: Iterator[Stretch], tokenizer: Tokenizer, most_tokens: int, remarks: list[str]
) -> Encoded | Unmarked:
    options = {"add_special_tokens": False} | ({"return_offsets_mapping": True} if tokenizer.is_fast else {})
    (tokens,) = tokenize([whole_text(f"{row.place}: the conversation", text)], tokenizer, most_tokens, **options)
    trained = [False] * len(tokens.ids)
    done = 0
    try:
        for begin, end in stretches:
            if begin == end:
                continue
            # A turn that begins before the last one has ended is not understood, and is refused.
            if not done <= begin < end:
                raise Unmarkable("by the chat template, a turn of the assistant begins within another")
            first, stop = _tokens_of(tokens, text, begin, end, tokenizer)
            if first >= len(trained):
                break  # this turn and all later ones are beyond what is kept
            trained[first:stop] = [True] * (stop - first)
            done = end
    except Unmarkable as error:
        return Unmarked(row.place, str(error))
    return Encoded(tokens.ids, trained, tokens.beyond, tuple((row.place, remark) for remark in remarks))


def _tokens_of(tokens: Tokens, text: str, begin: int, end: int, tokenizer: Tokenizer) -> Stretch:
    """Return the first and the one past the last token of a stretch of `text`."""
    if tokens.ends:
        return tokens_between(tokens, begin, end)
    # The tokenizer cannot tell which characters a token stands for, but it can tokenise the text up to a character.
    return _num_tokens(tokens, text[:begin], tokenizer), _num_tokens(tokens, text[:end], tokenizer)


def _num_tokens(tokens: Tokens, start: str, tokenizer: Tokenizer) -> int:
    (made,) = tokenize([start], tokenizer, len(tokens.ids), add_special_tokens=False)
    if tokens.ids[: len(made.ids)] != made.ids[: len(tokens.ids)]:
        raise Unmarkable("a token crosses the border of a turn, and this tokenizer cannot say which characters it has")
    return min(len(made.ids), len(tokens.ids))
