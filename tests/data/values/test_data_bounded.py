"""Beginnings of long texts have the tokens of the whole. Run: pytest tests/data/values/test_data_bounded.py"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_tokenizers import PLAIN, TAGGED, make_tokenizer, merging_tokenizer, slow_tokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from headrace.data.tokens.encode import encode_rows
from headrace.data.values import bounded
from headrace.data.values.bounded import tokenize
from headrace.data.values.values import Kind, Row


def unigram_tokenizer():
    """As those of SentencePiece: no borders between words, the best pieces of the whole; marks at both ends."""
    backend = Backend(models.Unigram())
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    words = ["the quick brown fox", "water led to the turbine", "headrace"]
    trainer = trainers.UnigramTrainer(vocab_size=60, special_tokens=["<s>", "</s>", "<unk>"], unk_token="<unk>")
    backend.train_from_iterator(words * 20, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", bos_token="<s>", unk_token="<unk>")


TOKENIZERS = {
    "plain": make_tokenizer(PLAIN),
    "tagged": make_tokenizer(TAGGED),
    "merging": merging_tokenizer(PLAIN),
    "slow": slow_tokenizer(PLAIN),
    "unigram": unigram_tokenizer(),
}
TEXTS = st.lists(
    st.one_of(
        st.sampled_from(["the quick ", "headrace", " ", "\n\n", "<|end|>", "a" * 40, " " * 90, "ü", "😀", "\u0301"]),
        st.text(max_size=12),
    ),
    min_size=1,
    max_size=120,
).map("".join)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(texts=st.lists(TEXTS, min_size=1, max_size=4), most=st.integers(1, 40))
@settings(max_examples=25, deadline=None)
def test_the_first_tokens_are_those_of_the_whole_text(name, texts, most):
    tokenizer = TOKENIZERS[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounded, "_LEAST_CHARACTERS", 16)
        patch.setattr(bounded, "_CHARACTERS_AT_ONCE", 100)
        made = tokenize(texts, tokenizer, most)
    for text, tokens in zip(texts, made, strict=True):
        whole = tokenizer(text)["input_ids"]
        assert tokens.ids == (whole[:most] if tokens.beyond else whole)


@pytest.mark.parametrize("name", ["plain", "tagged", "merging", "slow"])
@given(turns=st.lists(TEXTS, min_size=2, max_size=6), most=st.integers(2, 60))
@settings(max_examples=25, deadline=None)
def test_what_is_kept_of_a_conversation_is_marked_as_in_the_whole(name, turns, most):
    roles = ("user", "assistant")
    row = Row("place", {"messages": [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]})
    with pytest.MonkeyPatch.context() as patch:
        (whole,) = encode_rows(Kind.CHAT, [row], TOKENIZERS[name], 10**6)
        patch.setattr(bounded, "_LEAST_CHARACTERS", 16)
        (made,) = encode_rows(Kind.CHAT, [row], TOKENIZERS[name], most)
    if hasattr(whole, "ids"):
        assert (made.ids[:most], made.trained[:most]) == (whole.ids[:most], whole.trained[:most])
        assert (len(made.ids) + made.beyond > most) == (len(whole.ids) > most)


@given(prompt=TEXTS, completion=TEXTS, most=st.integers(2, 60))
@settings(max_examples=40, deadline=None)
def test_what_is_kept_of_a_prompt_with_completion_is_marked_as_in_the_whole(prompt, completion, most):
    row = Row("place", {"prompt": prompt, "completion": completion})
    with pytest.MonkeyPatch.context() as patch:
        (whole,) = encode_rows(Kind.COMPLETION, [row], TOKENIZERS["merging"], 10**6)
        patch.setattr(bounded, "_LEAST_CHARACTERS", 16)
        (made,) = encode_rows(Kind.COMPLETION, [row], TOKENIZERS["merging"], most)
    assert (made.ids[:most], made.trained[:most]) == (whole.ids[:most], whole.trained[:most])


def test_of_a_long_text_a_beginning_is_tokenised_and_the_rest_is_estimated():
    tokenizer, taken = make_tokenizer(), []

    class Watched:
        is_fast = True

        def __call__(self, texts, **options):
            taken.append(sum(map(len, texts)))
            return tokenizer(texts, **options)

    (tokens,) = tokenize(["the quick brown fox " * 100_000], Watched(), 100)
    assert len(tokens.ids) == 100
    assert sum(taken) < 5_000
    assert tokens.beyond == pytest.approx(len(tokenizer("the quick brown fox " * 1000)["input_ids"]) * 100, rel=0.05)


def test_many_short_texts_are_handed_over_a_few_at_a_time():
    tokenizer, taken = make_tokenizer(), []

    class Watched:
        is_fast = True

        def __call__(self, texts, **options):
            taken.append(sum(map(len, texts)))
            return tokenizer(texts, **options)

    made = tokenize(["the fox " * 1000] * 200, Watched(), 10_000)
    assert all(tokens == made[0] for tokens in made)
    assert max(taken) <= bounded._CHARACTERS_AT_ONCE
    assert len(taken) == 7
