"""Pieces of an answer are together what the tokenizer decodes, for byte-level tokenizers and those of SentencePiece; and a text
that stops an answer is found in it alone, across tokens and special tokens.

Run: pytest tests/generation/uses/test_answer_text.py
"""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headrace.data.chat import answer_text
from headrace.data.chat.answer_text import AnswerText

SPECIAL = ["<s>", "</s>", "<|im_end|>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def pieces() -> Any:
    """A tokenizer as Llama 2 has it: the first blank of a text is no part of it, and rare signs are bytes."""
    words = ["<unk>", *SPECIAL, *BYTES, "▁", "▁▁▁▁", *"abcm:<|>_", "▁def", "▁a", "im_"]
    made = Tokenizer(models.BPE({word: at for at, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True))
    strip = decoders.Strip(" ", 1, 0)
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>", additional_special_tokens=SPECIAL[2:]
    )


def byte_level(**more: Any) -> Any:
    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġa", "Ġ.", "im_"]
    made = Tokenizer(models.BPE({word: at for at, word in enumerate(words)}, []))
    made.decoder = decoders.ByteLevel()
    special = {"bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": SPECIAL[2:]}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special, **more)


KINDS = {"pieces": pieces(), "bytes": byte_level(), "tidied": byte_level(clean_up_tokenization_spaces=True)}


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_pieces_are_together_what_is_decoded(kind: str, data: st.DataObject) -> None:
    tokenizer = KINDS[kind]
    tokens = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=40))
    given_pieces, found = [], AnswerText(tokenizer)
    for token in tokens:
        found.add([token])
        given_pieces.append(found.certain())
    given_pieces.append(found.rest())
    assert "".join(given_pieces) == found.text == tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("kind", ["pieces", "bytes"])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_window_of_tokens_changes_nothing(kind: str, data: st.DataObject) -> None:
    tokenizer = KINDS[kind]
    tokens = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), min_size=20, max_size=60))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answer_text, "_WINDOW", 8)
        patch.setattr(answer_text, "_KEPT", 4)
        found, shown = AnswerText(tokenizer), ""
        for token in tokens:
            found.add([token])
            shown += found.certain()
    assert shown + found.rest() == tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("kind", ["pieces", "bytes"])
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_an_answer_ends_before_the_first_stop(kind: str, data: st.DataObject) -> None:
    """Compared with a search in the texts of all beginnings, as brute force."""
    tokenizer = KINDS[kind]
    common = tokenizer.convert_tokens_to_ids(["a", "b", "c", "<|im_end|>", "</s>", "im_", "|", ">"])
    tokens = data.draw(st.lists(st.sampled_from(common), max_size=20))
    stops = data.draw(st.lists(st.sampled_from(["ab", "abc", "c<|im_end|>", "<|im_end|>", "|>", "b", "</s>a"]), min_size=1))
    found, shown = AnswerText(tokenizer, stops), ""
    for token in tokens:
        found.add([token])
        shown += found.certain()
    shown += found.rest()
    marked = [tokenizer.decode(tokens[:count]) for count in range(len(tokens) + 1)]
    plain = [tokenizer.decode(tokens[:count], skip_special_tokens=True) for count in range(len(tokens) + 1)]
    hit = [any(stop in text for stop in stops for text in pair) for pair in zip(marked, plain, strict=True)]
    count = hit.index(True) if any(hit) else len(tokens)
    assert (found.stopped, found.count) == (any(hit), count)
    assert shown == found.text
    assert plain[count].startswith(shown)
    if any(hit):
        assert not any(stop in shown for stop in stops)
        places = [place for stop in stops if (place := plain[count].find(stop)) >= 0]
        assert all(len(shown) <= place for place in places)
    else:
        assert shown == plain[count]


def test_a_special_token_stops_and_is_not_shown() -> None:
    tokenizer = KINDS["bytes"]
    tokens = tokenizer.convert_tokens_to_ids(["a", "b", "<|im_end|>", "c"])
    found = AnswerText(tokenizer, ["<|im_end|>"])
    found.add(tokens)
    assert (found.text, found.stopped, found.count) == ("ab", True, 3)
