"""What people see of the data. Run: pytest tests/data/test_data_show.py"""

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_tokenizers import TAGGED, make_tokenizer, numbered_tokens

from headrace.data import DataSpec, LengthBin, length_histogram, load_tokens, render_samples, summarize, trained_stretches


@pytest.fixture
def chat(tmp_path):
    path = tmp_path / "chat.jsonl"
    messages = [{"role": "user", "content": "two?"}, {"role": "assistant", "content": "ü four [b]"}]
    path.write_text((json.dumps({"messages": messages}) + "\n") * 3)
    spec = DataSpec(paths=(str(path),), sequence_length=128, tokens_per_step=256)
    tokenizer = make_tokenizer(TAGGED)
    return load_tokens(spec, tokenizer, tmp_path / "cache"), tokenizer, spec


def test_segments_tell_trained_text_from_the_rest(chat):
    tokens, tokenizer, _ = chat
    expected = [("<|start|>user\ntwo?<|end|>\n<|start|>assistant\n", False), ("ü four [b]<|end|>", True), ("\n", False)]
    assert render_samples(tokens, tokenizer, 2) == [expected, expected]
    assert len(render_samples(tokens, tokenizer, 9)) == 3
    assert len(render_samples(tokens, tokenizer, 9, start=2)) == 1


def test_stretches_are_the_trained_segments_with_their_tokens(chat):
    tokens, tokenizer, _ = chat
    (stretch,) = trained_stretches(tokens, tokenizer, 1)
    assert stretch.text == "ü four [b]<|end|>"
    assert tokenizer.decode(tokens.sample(1).input_ids[stretch.begin : stretch.end]) == stretch.text
    assert tokens.sample(1).trained.nonzero()[0].tolist() == list(range(stretch.begin, stretch.end))


def test_the_summary_adds_up(chat):
    tokens, _, spec = chat
    made = summarize(tokens, spec)
    assert (made.samples, made.dropped_samples, made.cut_tokens, made.kinds) == (3, 0, 0, {"messages": 3})
    assert made.tokens == 3 * made.longest_tokens
    assert 0 < made.trained_tokens < made.tokens
    assert made.efficiency == made.tokens / (made.rows * 128)
    assert made.steps_per_epoch == made.rows / 2


def test_unpacked_the_rows_are_the_samples(tmp_path):
    tokens = numbered_tokens(tmp_path / "set", [4, 8, 2], 8)
    spec = DataSpec(paths=("unused",), sequence_length=8, tokens_per_step=8, packing=False)
    made = summarize(tokens, spec)
    assert (made.rows, made.efficiency, made.steps_per_epoch) == (3, 14 / 24, 3.0)


def test_the_histogram_of_known_lengths(tmp_path):
    tokens = numbered_tokens(tmp_path / "set", [2, 3, 4, 5, 10], 16)
    assert length_histogram(tokens, 3) == [LengthBin(1, 4, 3), LengthBin(5, 8, 1), LengthBin(9, 10, 1)]


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(2, 50), min_size=1, max_size=30), num_bins=st.integers(1, 20))
def test_the_histogram_counts_each_sample_once_in_bins_without_gaps(tmp_path_factory, lengths, num_bins):
    bins = length_histogram(numbered_tokens(tmp_path_factory.mktemp("t") / "set", lengths, 64), num_bins)
    assert len(bins) <= num_bins
    assert bins[0].least_tokens == 1
    assert bins[-1].most_tokens == max(lengths)
    assert [b.most_tokens + 1 for b in bins[:-1]] == [b.least_tokens for b in bins[1:]]
    for b in bins:
        assert b.samples == sum(b.least_tokens <= length <= b.most_tokens for length in lengths)


def test_importing_the_package_does_not_import_the_slow_libraries():
    code = "import sys, headrace.data; print([m for m in ('datasets', 'transformers', 'torch', 'pyarrow') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
