"""Data that are read as they come, and the position in them. Run: pytest tests/data/test_data_streamed.py"""

import csv
import gzip
import json
from dataclasses import replace

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_tokenizers import PLAIN, make_tokenizer
from test_data_stream import assert_equal

from headrace.data import BatchStream, DataSpec, load_tokens
from headrace.data.batches.streamed import StreamedBatches
from headrace.data.read.sources import find_sources
from headrace.terms.errors import ConfigError, DataError
from headrace.terms.options.data_source import DataSource
from headrace.terms.options.run_options import RunOptions

WORDS = ("water", "is led to", "the turbine", "by the headrace", "fox", "jumps over the lazy dog and", "two")
TOKENIZER = make_tokenizer(PLAIN)
SPEC = DataSpec(paths=("unused",), sequence_length=32, tokens_per_step=96, seed=3, shuffle=False, packing=False)


def texts(count):
    return [" ".join(WORDS[(number * 7 + each) % len(WORDS)] for each in range(1 + number % 5)) for number in range(count)]


def write(path, found):
    rows = [{"text": each} for each in found]
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": found}), path, row_group_size=7)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["text"])
            writer.writeheader()
            writer.writerows(rows)
    else:
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        if path.suffix == ".zst":
            content = pyarrow.compress(content, codec="zstd", asbytes=True)
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return str(path)


def streamed(paths, spec, tmp_path, buffer_rows=None, tokenizer=TOKENIZER):
    sources = find_sources(paths, tmp_path / "cache", spec.sequence_length)
    return StreamedBatches(sources, spec, tokenizer, buffer_rows=buffer_rows)


def whole(paths, spec, tmp_path):
    return BatchStream(load_tokens(replace(spec, paths=tuple(paths)), TOKENIZER, tmp_path / "cache"), spec)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.csv"])
def test_without_shuffling_batches_are_those_of_data_tokenised_beforehand(tmp_path, name):
    paths = [write(tmp_path / name, texts(40)), write(tmp_path / f"b{name}", texts(9))]
    found, expected = streamed(paths, SPEC, tmp_path, 8), whole(paths, SPEC, tmp_path)
    for _ in range(45):
        assert_equal(found.next_batch(), replace(expected.next_batch(), samples=None))
    assert not list((tmp_path / "cache").glob("*streamed*"))


@given(packing=st.booleans(), shuffle=st.booleans(), seed=st.integers(0, 5), count=st.integers(1, 30))
@settings(max_examples=25, deadline=None)
def test_what_fits_into_a_buffer_is_shuffled_and_packed_as_data_tokenised_beforehand(
    tmp_path_factory, packing, shuffle, seed, count
):
    tmp_path, spec = tmp_path_factory.mktemp("data"), replace(SPEC, packing=packing, shuffle=shuffle, seed=seed)
    paths = [write(tmp_path / "a.jsonl", texts(count))]
    found, expected = streamed(paths, spec, tmp_path, 30), whole(paths, spec, tmp_path)
    assert found.first_rows(9).samples == expected.first_rows(9).samples[: len(found.first_rows(9).samples)]
    for _ in range(12):
        assert_equal(found.next_batch(), replace(expected.next_batch(), samples=None))


@pytest.mark.wide
@given(
    packing=st.booleans(),
    shuffle=st.booleans(),
    before=st.integers(0, 60),
    counts=st.lists(st.integers(1, 25), min_size=1, max_size=3),
    buffer_rows=st.integers(1, 20),
)
@settings(max_examples=40, deadline=None)
def test_a_resumed_stream_goes_on_at_the_very_row(tmp_path_factory, packing, shuffle, before, counts, buffer_rows):
    tmp_path, spec = tmp_path_factory.mktemp("data"), replace(SPEC, packing=packing, shuffle=shuffle)
    paths = [write(tmp_path / f"{number}.jsonl", texts(count)) for number, count in enumerate(counts)]
    unbroken = streamed(paths, spec, tmp_path, buffer_rows)
    for _ in range(before):
        unbroken.next_batch()
    state = json.loads(json.dumps(unbroken.state()))
    resumed = streamed(paths, spec, tmp_path, buffer_rows)
    resumed.restore(state)
    assert resumed.state() == state
    for _ in range(8):
        assert_equal(resumed.next_batch(), unbroken.next_batch())
    assert resumed.state() == unbroken.state()
    assert resumed.left_out == unbroken.left_out


def test_an_epoch_that_is_shuffled_in_buffers_has_every_sample_once(tmp_path):
    found = texts(50)
    spec = replace(SPEC, shuffle=True, tokens_per_step=32)
    stream = streamed([write(tmp_path / "a.jsonl", found)], spec, tmp_path, 12)
    epochs = [[TOKENIZER.decode(stream.next_batch().input_ids[0], skip_special_tokens=True) for _ in found] for _ in range(2)]
    assert [sorted(epoch) for epoch in epochs] == [sorted(found)] * 2
    assert found != epochs[0] != epochs[1]
    assert sorted(epochs[0][:12]) == sorted(found[:12])


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.csv", "a.json"])
def test_a_file_is_read_on_after_any_row(tmp_path, name):
    path = write(tmp_path / name, texts(30))
    source = find_sources([path], tmp_path)[0]
    rows = list(source.read())
    assert len(rows) == 30
    for skip in range(32):
        assert list(source.read(skip)) == rows[skip:]


def test_the_first_row_of_a_file_decides_what_its_rows_are_read_as(tmp_path):
    rows = [{"text": "water", **({"messages": [{"role": "user", "content": "two"}]} if number else {})} for number in range(9)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = [str(tmp_path / "a.jsonl")]
    found, expected = streamed(paths, SPEC, tmp_path, 2), whole(paths, SPEC, tmp_path)
    for _ in range(6):
        assert_equal(found.next_batch(), replace(expected.next_batch(), samples=None))


def test_rows_are_read_as_they_are_needed(tmp_path):
    bad = tmp_path / "a.jsonl"
    write(bad, texts(20))
    bad.write_text(bad.read_text() + "no JSON\n")
    stream = streamed([str(bad)], SPEC, tmp_path, 5)
    for _ in range(6):
        stream.next_batch()
    with pytest.raises(DataError, match="line 21: not JSON"):
        [stream.next_batch() for _ in range(3)]


def test_what_is_cut_and_dropped_is_counted_over_buffers_and_through_a_resume(tmp_path):
    rows = [{"prompt": "fox " * length, "completion": "two " * 9} for length in (1, 99, 2, 26, 3, 99)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = (streamed([str(tmp_path / "a.jsonl")], SPEC, tmp_path, 2) for _ in range(2))
    first.next_batch()
    second.restore(first.state())
    for stream in (first, second):
        stream.next_batch()
        assert any("dropped" in words for words in stream.left_out)
    assert first.left_out == second.left_out


def test_another_file_at_the_position_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    write(path, texts(20))
    stream = streamed([str(path)], SPEC, tmp_path, 5)
    for _ in range(3):
        stream.next_batch()
    state = stream.state()
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], *lines]))
    with pytest.raises(DataError, match="row 5 on give other tokens"):
        streamed([str(path)], SPEC, tmp_path, 5).restore(state)
    for changed, words in (
        (state | {"streamed_rows": 6}, "streamed_rows was 6"),
        (state | {"place": {}}, "damaged"),
        ({"samples_digest": "x"}, "streamed_rows was"),
    ):
        with pytest.raises(DataError, match=words):
            streamed([str(path)], SPEC, tmp_path, 5).restore(changed)


def test_data_without_anything_to_train_end_in_an_error_and_not_in_a_search_without_end(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "fox " * 99, "completion": "two"}) + "\n")
    with pytest.raises(DataError, match="no token of the data set is trained"):
        streamed([str(tmp_path / "a.jsonl")], SPEC, tmp_path, 5).next_batch()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "give max_steps"),
        ({"max_steps": 3, "eval_split": 0.5}, "streaming and eval_split"),
        ({"max_steps": 3, "loss": "dpo"}, "streaming and loss"),
        ({"max_steps": 3, "save_total_limit": 2}, "give save_steps"),
        ({"max_steps": 3, "data": ["a", {"path": "b", "weight": 2}]}, "streaming and weight: b"),
        ({"streaming": False, "max_steps": 3, "buffer_size": 9}, "buffer_size"),
    ],
)
def test_what_takes_all_data_is_refused_by_name(options, words):
    with pytest.raises(ConfigError, match=words):
        RunOptions.of({"model": "m", "data": ["a"], "streaming": True, **options})


def test_an_entry_of_the_data_may_ask_for_streaming():
    options = RunOptions.of({"model": "m", "data": [{"path": "a", "streaming": True}], "max_steps": 3})
    assert options.streams
    assert options.data == (DataSource("a", streaming=True),)
