"""Lines too long to be read whole. Run: pytest tests/data/test_data_long_lines.py"""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_tokenizers import PLAIN, make_tokenizer

from headrace.data import DataSpec, load_tokens
from headrace.data.read import sources
from headrace.data.read.long_lines import cut_strings
from headrace.machine.host_memory import anonymous_bytes
from headrace.machine.meter import MemoryMeter
from headrace.terms.errors import DataError

TEXTS = st.text(alphabet=st.sampled_from('a"\\/\n\tü😀{}[],:\u2028'), max_size=60)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


def alike(cut, whole, most):
    """Whether `cut` is `whole` but that its long strings end early."""
    if isinstance(whole, str):
        assert whole.startswith(cut)
        short = len(json.dumps(whole)) - 2 <= most
        return cut == whole if short else len(cut) > 0 or most < 12
    if isinstance(whole, list):
        return len(cut) == len(whole) and all(alike(one, two, most) for one, two in zip(cut, whole, strict=True))
    if isinstance(whole, dict):
        return all(alike(one, two, most) for one, two in zip(cut.values(), whole.values(), strict=False))
    return cut == whole


@given(value=st.lists(VALUES, max_size=4), is_ascii=st.booleans(), most=st.integers(14, 40), size=st.integers(1, 30))
@settings(max_examples=150, deadline=None)
def test_what_comes_out_is_the_same_but_that_long_strings_end_early(value, is_ascii, most, size):
    line = json.dumps(value, ensure_ascii=is_ascii).encode() + b"\n"
    pieces = [line[start : start + size] for start in range(0, len(line), size)]
    try:
        cut, left_out = cut_strings(pieces, most)
    except ValueError:
        assert len(line) > 4 * most
        return
    assert len(cut) + left_out == len(line)
    assert alike(json.loads(cut), value, most)


def test_tokens_of_a_long_line_are_those_of_the_whole(tmp_path, monkeypatch):
    text = 'the quick brown fox ü \\ " 😀\n' * 2000
    chat = [{"role": "user", "content": "two?"}, {"role": "assistant", "content": text}]
    rows = [{"text": text}, {"text": "short"}], [{"messages": chat, "id": "x"}], [{"prompt": "a", "completion": text}]
    for number, each in enumerate(rows):
        path = tmp_path / f"{number}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in each))
        spec = DataSpec(paths=(str(path),), sequence_length=64, tokens_per_step=64)
        whole = load_tokens(spec, make_tokenizer(PLAIN), tmp_path / "cache")
        with monkeypatch.context() as patch:
            patch.setattr(sources, "_LEAST_STRING_BYTES", 10_000)
            cut = load_tokens(spec, make_tokenizer(PLAIN), tmp_path / "other")
        assert cut.info.digest == whole.info.digest
        assert cut.info.cut_tokens == pytest.approx(whole.info.cut_tokens, rel=0.2)


def test_a_line_of_which_the_kept_part_is_too_short_or_too_long_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_LEAST_STRING_BYTES", 100)
    monkeypatch.setattr(sources, "_BYTES_PER_TOKEN", 1)
    for row, found in (
        ({"text": "the quick brown fox " * 50}, "line 1: only the beginning of a very long string is read"),
        ({"text": "x", "more": ["the quick brown fox " * 4] * 20}, "line 1: more than 400 bytes in one sample"),
    ):
        (tmp_path / "a.jsonl").write_text(json.dumps(row))
        spec = DataSpec(paths=(str(tmp_path / "a.jsonl"),), sequence_length=90, tokens_per_step=90)
        with pytest.raises(DataError, match=found):
            load_tokens(spec, make_tokenizer(PLAIN), tmp_path / "cache")


def test_a_line_of_many_megabytes_takes_little_memory(tmp_path):
    """Of 20 MB it was 3.9 GiB: all of it was tokenised at once."""
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "the quick brown fox " * (1 << 20)}))
    spec = DataSpec(paths=(str(tmp_path / "a.jsonl"),), sequence_length=256, tokens_per_step=256)
    tokenizer = make_tokenizer(PLAIN)
    tokenizer("warm")
    with MemoryMeter() as meter:
        meter.tell(lambda sample: None)  # which looks more often
        before = anonymous_bytes()
        assert load_tokens(spec, tokenizer, tmp_path / "cache").info.tokens == 256
        assert meter.peak_bytes() - before < 80 << 20
