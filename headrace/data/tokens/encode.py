"""Rows of each kind to token ids, and a mask of what is trained.

text: every token, and an end-of-sequence token after them. prompt + completion: the completion and that token; where a token
crosses their border, `Border` decides.
messages: see `data/chat/chat.py`. input_ids: where `labels` is not -100, without what `attention_mask` says is padding.
The invariant: only what the kind promises is trained, and memory is bounded, however many or long the rows are.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import compress, takewhile
from typing import Any

from headrace.data.chat.chat import encode_chat, encode_contents, encode_whole
from headrace.data.chat.chat_template import Template
from headrace.data.chat.forms import MASKS
from headrace.data.values.bounded import Tokens, tokenize
from headrace.data.values.messages import Messages, read_messages, refuse_media, whole_text
from headrace.data.values.values import IGNORED, Encoded, Kind, Row, Tokenizer, Unmarked
from headrace.terms.errors import DataError, ModelError, shortened
from headrace.terms.options.border import Border

_ROWS_AT_ONCE = 512
_CHARACTERS_AT_ONCE = 1 << 20
_LARGEST_ID = 2**31 - 1
_CROSSED = (
    "a token crosses the border of prompt and completion; each keeps its own tokens (border: apart), where TRL tokenises both "
    "together (border: joint)"
)


def encode_rows(
    kind: Kind,
    rows: Iterable[Row],
    tokenizer: Tokenizer,
    most_tokens: int,
    *,
    contents: bool = False,
    everything: bool = False,
    day: str | None = None,
    border: Border = Border.APART,
) -> Iterator[Encoded | Unmarked]:
    """Yield ids and mask of each row, in order: all of them, or at least the first `most_tokens`.

    `contents`, `everything`, `day`, `border`: see `contents`, `everything`, `template_date` and `border` of `DataSpec`.

    Raises:
        DataError: a sample is not what its columns promise; the message has its place.
        ModelError: the tokenizer lacks an end-of-sequence token or a chat template that the samples need.
    """
    encode = _encoder(kind, tokenizer, most_tokens, contents=contents, day=day, border=border)
    if everything and kind is not Kind.TOKENS:
        encode = partial(_encode_whole, encode, kind, tokenizer, most_tokens, day)
    for chunk in _chunks(rows):
        for row, sample in zip(chunk, encode(chunk), strict=True):
            yield sample if isinstance(sample, Unmarked) else _of_row(row, sample, most_tokens)


def _of_row(row: Row, sample: Encoded, most_tokens: int) -> Encoded:
    found = _with_unread(row, sample, most_tokens) if row.unread else sample
    return found if row.desirable is None else replace(found, desirable=row.desirable)


def _with_unread(row: Row, sample: Encoded, most_tokens: int) -> Encoded:
    """Return `sample`, counting what was not read of its row as beyond it."""
    if not sample.beyond and len(sample.ids) <= most_tokens:
        raise DataError(
            f"{row.place}: only the beginning of a very long string is read, and it has fewer tokens than sequence_length "
            f"{most_tokens}. Cut the string into several samples"
        )
    whole = (len(sample.ids) + sample.beyond) * (1 + row.unread)
    return replace(sample, beyond=max(1, round(whole) - len(sample.ids)))


def _chunks(rows: Iterable[Row]) -> Iterator[list[Row]]:
    chunk: list[Row] = []
    size = 0
    for row in rows:
        chunk.append(row)
        size += _size(row.values)
        if len(chunk) == _ROWS_AT_ONCE or size >= _CHARACTERS_AT_ONCE:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _size(value: Any) -> int:
    """Return roughly how many characters a value has; a number counts as eight, which is its size in memory."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, list) and value and isinstance(value[0], int):
        return 8 * len(value)
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 8 + sum(map(_size, values))


def _encoder(
    kind: Kind, tokenizer: Tokenizer, most_tokens: int, *, contents: bool, day: str | None, border: Border
) -> Callable[[list[Row]], Iterable[Encoded | Unmarked]]:
    if contents and kind is not Kind.TOKENS:
        template = Template.of(tokenizer, day)
        return lambda rows: (encode_contents(row, _spoken(kind, row), template, most_tokens) for row in rows)
    match kind:
        case Kind.TOKENS:
            return lambda rows: map(_encode_tokens, rows)
        case Kind.CHAT:
            template = Template.of(tokenizer, day)
            return lambda rows: (encode_chat(row, template, most_tokens) for row in rows)
        case Kind.COMPLETION:
            return partial(_encode_completions, tokenizer=tokenizer, most_tokens=most_tokens, day=day, border=border)
        case Kind.TEXT:
            return partial(_encode_texts, tokenizer=tokenizer, most_tokens=most_tokens)


def _encode_whole(
    encode: Callable[[list[Row]], Iterable[Encoded | Unmarked]],
    kind: Kind,
    tokenizer: Tokenizer,
    most_tokens: int,
    day: str | None,
    rows: list[Row],
) -> Iterator[Encoded | Unmarked]:
    """Yield rows whose every token is trained: conversations as the template renders them, others as `encode` does."""
    chats = [kind is Kind.CHAT or (kind is Kind.COMPLETION and isinstance(row.values["completion"], list)) for row in rows]
    others = iter(encode([row for row, chat in zip(rows, chats, strict=True) if not chat]))
    template = Template.of(tokenizer, day) if any(chats) else None
    for row, chat in zip(rows, chats, strict=True):
        sample = encode_whole(row, template, most_tokens, kind.columns) if chat and template else next(others)
        yield replace(sample, trained=[True] * len(sample.ids)) if isinstance(sample, Encoded) else sample


def _spoken(kind: Kind, row: Row) -> Messages:
    """Return a row as a conversation: a text is what the user says, a completion is the answer to its prompt."""
    if kind is Kind.CHAT:
        refuse_media(row.place, row.values)
        return read_messages(row.place, row.values["messages"], "messages").messages
    if kind is Kind.TEXT:
        return [{"role": "user", "content": _string(row, "text")}]
    messages: Messages = []
    for column, role in (("prompt", "user"), ("completion", "assistant")):
        is_chat = isinstance(row.values[column], list)
        read = read_messages(row.place, row.values[column], column).messages if is_chat else None
        messages += read or [{"role": role, "content": _string(row, column)}]
    return messages


def _encode_texts(rows: list[Row], *, tokenizer: Tokenizer, most_tokens: int) -> list[Encoded]:
    eos = _eos(tokenizer)
    made = tokenize([_string(row, "text") for row in rows], tokenizer, most_tokens)
    return [
        _noting_bos(row, _trained_from(0, each.ids, each.beyond, eos), tokenizer) for row, each in zip(rows, made, strict=True)
    ]


def _encode_completions(
    rows: list[Row], *, tokenizer: Tokenizer, most_tokens: int, day: str | None, border: Border
) -> list[Encoded | Unmarked]:
    chats = [isinstance(row.values["prompt"], list) and isinstance(row.values["completion"], list) for row in rows]
    pairs = [row for row, chat in zip(rows, chats, strict=True) if not chat]
    strings = iter(_encode_string_pairs(pairs, tokenizer, most_tokens, border))
    if not any(chats):
        return list(strings)
    template = Template.of(tokenizer, day)
    return [
        encode_chat(row, template, most_tokens, ("prompt", "completion")) if chat else next(strings)
        for row, chat in zip(rows, chats, strict=True)
    ]


def _encode_string_pairs(rows: list[Row], tokenizer: Tokenizer, most_tokens: int, border: Border) -> list[Encoded]:
    if not rows:
        return []
    eos = _eos(tokenizer)
    prompts = [_string(row, "prompt") for row in rows]
    completions = [_string(row, "completion") for row in rows]
    starts = tokenize(prompts, tokenizer, most_tokens)
    together = tokenize(
        [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)], tokenizer, most_tokens
    )
    apart = tokenize(completions, tokenizer, most_tokens, add_special_tokens=False)
    parts = zip(rows, starts, together, apart, strict=True)
    return [_noting_bos(row, _encode_pair(row, *each, eos=eos, border=border), tokenizer) for row, *each in parts]


def _encode_pair(row: Row, prompt: Tokens, whole: Tokens, completion: Tokens, *, eos: int, border: Border) -> Encoded:
    start = prompt.ids if prompt.beyond else _without_last(prompt.ids, eos)
    parted = _shared(start, whole.ids)
    # Tokenised together, the completion gets the tokens that it has in running text.
    if parted == len(start) or border is Border.JOINT:
        found = _trained_from(parted, whole.ids, whole.beyond, eos)
        return replace(found, parted=parted) if border is Border.JOINT else found
    if border is Border.CPO:
        return _trained_from(max(0, min(len(start), len(whole.ids)) - 1), whole.ids, whole.beyond, eos)
    # The prompt keeps the tokens that it has alone, as it will when the model is asked.
    found = _trained_from(len(start), start + completion.ids, prompt.beyond + completion.beyond, eos)
    return replace(found, remarks=((row.place, _CROSSED),))


def _shared(ids: list[int], others: list[int]) -> int:
    """Return with how many tokens both begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, others, strict=False)))


def _trained_from(start: int, ids: list[int], beyond: int, eos: int) -> Encoded:
    """Return `ids`, trained from `start` on, followed by the end-of-sequence token if the text ends there."""
    ended = ids if beyond else [*_without_last(ids, eos), eos]
    return Encoded(ended, [False] * start + [True] * (len(ended) - start), beyond)


def _noting_bos(row: Row, sample: Encoded, tokenizer: Tokenizer) -> Encoded:
    """Return `sample` as it is, with a remark if its text brings the mark that the tokenizer adds."""
    bos = tokenizer.bos_token_id
    if bos is None or sample.ids[:2] != [bos, bos]:
        return sample
    mark = tokenizer.decode([bos])
    words = f"the text begins with {mark}, and the tokenizer puts another before it; take it out of the text"
    return replace(sample, remarks=(*sample.remarks, (row.place, words)))


def _encode_tokens(row: Row) -> Encoded:
    ids = _integers(row, "input_ids")
    wrong = next((token for token in ids if not 0 <= token <= _LARGEST_ID), None)
    if wrong is not None:
        raise DataError(
            f"{row.place}: input_ids holds {shortened(str(wrong), 60)}; "
            f"token ids lie between 0 and {_LARGEST_ID}. Correct the sample"
        )
    _check_is_one_sample(row)
    attended = _attended(row, len(ids))
    trained = _trained(row, ids)
    return Encoded(list(compress(ids, attended)), list(compress(trained, attended)))


def _check_is_one_sample(row: Row) -> None:
    positions = [] if row.values.get("position_ids") is None else _integers(row, "position_ids")
    lengths = [] if row.values.get("seq_lengths") is None else _integers(row, "seq_lengths")
    if positions != list(range(len(positions))) or len(lengths) > 1:
        raise DataError(
            f"{row.place}: its position_ids or seq_lengths say that it holds several samples; give one sample per row; "
            "Headrace packs them"
        )


def _attended(row: Row, num_ids: int) -> list[int]:
    """Return 1 for each token that is no padding. Padding is dropped, because rows are padded when batches are made."""
    if row.values.get("attention_mask") is None:
        return [1] * num_ids
    mask = _integers(row, "attention_mask")
    if len(mask) != num_ids or not set(mask) <= {0, 1}:
        raise DataError(f"{row.place}: attention_mask must hold {num_ids} times 0 or 1, one for each of input_ids")
    return mask


def _trained(row: Row, ids: list[int]) -> list[bool]:
    if row.values.get("labels") is None:
        if (mask := next((name for name in MASKS if row.values.get(name) is not None), None)) is not None:
            raise DataError(
                f"{row.place}: {mask} is not read beside input_ids; give labels: {IGNORED} where nothing is trained"
            )
        return [True] * len(ids)
    labels = _integers(row, "labels")
    if len(labels) != len(ids):
        raise DataError(f"{row.place}: {len(ids)} input_ids but {len(labels)} labels; both must have the same length")
    for index, (token, label) in enumerate(zip(ids, labels, strict=True)):
        if label not in (IGNORED, token):
            raise DataError(
                f"{row.place}: labels[{index}] is {shortened(str(label), 60)}, input_ids[{index}] is {token}; "
                f"a label must be {IGNORED} or the "
                "input id at the same place (the model shifts labels itself). Do not shift labels beforehand"
            )
    return [label != IGNORED for label in labels]


def _integers(row: Row, column: str) -> list[int]:
    found = row.values[column]
    if not isinstance(found, list) or not all(type(value) is int for value in found):
        raise DataError(f"{row.place}: {column} must be a list of integers, found {type(found).__name__} {str(found)[:60]!r}")
    return found


def _string(row: Row, column: str) -> str:
    found = row.values[column]
    if not isinstance(found, str):
        raise DataError(
            f"{row.place}: {column} must be a string, found {type(found).__name__} {str(found)[:60]!r}. "
            "Correct or remove the sample"
        )
    return whole_text(f"{row.place}: {column}", found)


def _without_last(ids: list[int], token: int) -> list[int]:
    return ids[:-1] if ids[-1:] == [token] else ids


def _eos(tokenizer: Tokenizer) -> int:
    if tokenizer.eos_token_id is None:
        raise ModelError(
            "the tokenizer has no eos_token, so the model could not learn where a text ends; set it in tokenizer_config.json"
        )
    return tokenizer.eos_token_id
