"""Texts to tokens: only the beginning of a long text is tokenised, so memory depends on the kept tokens.

Where a text is cut into tokens depends on the words nearby, not on what follows pages later. But no tokenizer says how near. So
two beginnings are tokenised, one longer than the other. If both begin with the same tokens, as many as needed, these are the
whole text's. Invariant: tokens that still change with what follows are never taken as the text's.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.data.values.values import Tokenizer
from headrace.terms.errors import refusing

# Most texts have three to five characters per token: then a first beginning and one that is half as long again are enough.
_CHARACTERS_PER_TOKEN = 6
_LEAST_CHARACTERS = 512
_GROWTH = 1.5
# So many characters are handed to a tokenizer at once: it keeps some hundred bytes for each token until the last text is done.
_CHARACTERS_AT_ONCE = 1 << 18


@dataclass(frozen=True, slots=True)
class Tokens:
    """The first tokens of a text. `beyond` estimates how many more it has: 0 if these are all.

    `begins` and `ends` say which characters each token stands for; they are empty if the tokenizer cannot tell.
    """

    ids: list[int]
    beyond: int
    begins: list[int]
    ends: list[int]


def tokenize(texts: Sequence[str], tokenizer: Tokenizer, most_tokens: int, **options: Any) -> list[Tokens]:
    """Return the tokens of each text: all of them, or the first `most_tokens` of a text that has more and is long. Fast
    tokenizers get many texts at once and use all cores. `options` go to the tokenizer.
    """
    made: list[Tokens | None] = [None] * len(texts)
    short: list[int] = []
    size = 0
    for index, text in enumerate(texts):
        if len(text) > _first_length(most_tokens):
            made[index] = _beginning(text, tokenizer, most_tokens, options)
            continue
        if short and size + len(text) > _CHARACTERS_AT_ONCE:
            _fill(made, short, texts, tokenizer, options)
            size = 0
        short.append(index)
        size += len(text)
    _fill(made, short, texts, tokenizer, options)
    return [tokens for tokens in made if tokens is not None]


def _fill(
    made: list[Tokens | None], indices: list[int], texts: Sequence[str], tokenizer: Tokenizer, options: dict[str, Any]
) -> None:
    """Tokenise the texts of `indices` into their places in `made`, and empty `indices`."""
    if indices:
        for index, tokens in zip(indices, _all_of([texts[index] for index in indices], tokenizer, options), strict=True):
            made[index] = tokens
    indices.clear()


def _first_length(most_tokens: int) -> int:
    return _CHARACTERS_PER_TOKEN * most_tokens + _LEAST_CHARACTERS


def _beginning(text: str, tokenizer: Tokenizer, most_tokens: int, options: dict[str, Any]) -> Tokens:
    length = _first_length(most_tokens)
    before: list[int] = []
    while length < len(text):
        (made,) = _all_of([text[:length]], tokenizer, options)
        # One token more than is kept, because a tokenizer may add a mark at the end of what it takes as the whole text.
        if len(before) > most_tokens and before[:most_tokens] == made.ids[:most_tokens]:
            more = len(made.ids) * len(text) // length - most_tokens
            return Tokens(made.ids[:most_tokens], max(1, more), made.begins[:most_tokens], made.ends[:most_tokens])
        before = made.ids
        length = round(length * _GROWTH)
    return _all_of([text], tokenizer, options)[0]


def _all_of(texts: list[str], tokenizer: Tokenizer, options: dict[str, Any]) -> list[Tokens]:
    # verbose=False: the warning about texts beyond the model's maximum is noise here, because samples are cut later.
    with refusing("the tokenizer of the model refuses a text"):  # whatever its files make it raise
        made = tokenizer(texts, return_attention_mask=False, verbose=False, **options)
    offsets = made["offset_mapping"] if options.get("return_offsets_mapping") else [[] for _ in texts]
    return [Tokens(list(ids), 0, *_stretches(found)) for ids, found in zip(made["input_ids"], offsets, strict=True)]


def _stretches(offsets: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Return the begin and the end of each token in characters; no stretch is empty.

    Some tokenizers leave blanks out of the characters of a token, so a token of blanks alone has none. It gets the characters
    between its neighbours. If there are none, the token was inserted (a mark for the beginning of a word), and gets the
    character that follows.
    """
    begins, ends, done = [], [], 0
    for begin, end in offsets:
        begins.append(done if begin == end and done < begin else begin)
        ends.append(end + 1 if begin == end and done >= begin else end)
        done = max(done, end)
    return begins, ends


def tokens_between(tokens: Tokens, begin: int, end: int) -> tuple[int, int]:
    """Return the first and the one past the last of the tokens that stand for characters from `begin` to `end`."""
    return bisect_right(tokens.ends, begin), bisect_left(tokens.begins, end)
