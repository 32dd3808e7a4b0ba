"""Entries of `data` with weights, columns and splits; packed files. Run: pytest tests/data/read/test_data_mixed_sources.py"""

import csv
import gzip
import json
from collections import Counter
from dataclasses import replace
from math import ceil, floor

import datasets
import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_tokenizers import numbered_tokens

from headrace.data import BatchStream, DataSpec
from headrace.data.batches.stream import drawn
from headrace.data.read.sources import find_sources, read_rows
from headrace.terms.errors import ConfigError, DataError
from headrace.terms.options.data_source import DataSource, SourceKind, source_of
from headrace.terms.options.run_options import RunOptions

COUNTS_AND_WEIGHTS = st.lists(
    st.tuples(st.integers(0, 30), st.sampled_from([0.1, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.25])), min_size=1, max_size=4
)


def rows_of(entry, tmp_path):
    return [row.values for source in find_sources([entry], tmp_path / "cache") for row in read_rows(source)[1]]


@given(sources=COUNTS_AND_WEIGHTS, seed=st.none() | st.integers(0, 9), epochs=st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_after_each_epoch_every_sample_has_occurred_as_often_as_its_weight_says(sources, seed, epochs):
    ends = np.cumsum([count for count, _ in sources]).tolist()
    weights = [weight for _, weight in sources]
    seen = Counter()
    for epoch in range(epochs):
        seen.update(drawn(ends, weights, seed=seed, epoch=epoch).tolist())
    of_sample = np.repeat(weights, [count for count, _ in sources])
    for sample, weight in enumerate(of_sample):
        expected = round(float(weight) * epochs, 6)
        assert floor(expected) <= seen[sample] <= ceil(expected)
    assert set(seen) <= set(range(len(of_sample)))


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
def test_weighted_batches_hold_each_source_as_often_as_its_weight_says_and_go_on_where_they_stopped(tmp_path, packing, shuffle):
    tokens = numbered_tokens(tmp_path / "set", [3] * 8 + [5] * 4, 16)
    tokens = replace(tokens, info=replace(tokens.info, entries=[8, 4]))
    paths = (DataSource("a", weight=0.5), DataSource("b", weight=2.0))
    spec = DataSpec(paths=paths, sequence_length=16, tokens_per_step=16, packing=packing, shuffle=shuffle)
    stream = BatchStream(tokens, spec)
    seen, epoch = Counter(), [stream.next_batch() for _ in range(round(stream.steps_per_epoch))]
    for batch in epoch:
        seen.update(batch.input_ids[batch.input_ids != 0].tolist())
    counts = [seen[int(tokens.sample(index).input_ids[0])] for index in range(12)]
    assert sorted(counts[:8]) == [0] * 4 + [1] * 4
    assert counts[8:] == [2] * 4
    state, after = stream.state(), stream.next_batch()
    resumed = BatchStream(tokens, spec)
    resumed.restore(json.loads(json.dumps(state)))
    assert np.array_equal(resumed.next_batch().input_ids, after.input_ids)
    others = BatchStream(tokens, replace(spec, paths=(DataSource("a", weight=0.5), DataSource("b", weight=3.0))))
    with pytest.raises(DataError, match="weights was"):
        others.restore(state)


@given(
    weight=st.none() | st.floats(0.01, 100),
    columns=st.dictionaries(st.sampled_from(["text", "prompt"]), st.text(min_size=1, max_size=5), max_size=1),
    split=st.none() | st.text(min_size=1, max_size=5),
)
def test_an_entry_is_read_back_from_what_is_written_of_it(weight, columns, split):
    given = {"path": "owner/name", "weight": weight, "columns": columns, "split": split}
    entry = SourceKind().read(given, "data")
    written = entry.to_json() if isinstance(entry, DataSource) else entry
    assert SourceKind().read(json.loads(json.dumps(written)), "data") == entry
    assert source_of(entry).weight == (1.0 if weight is None else weight)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"name": "x"}, "path is missing"),
        ({"path": "a", "wieght": 2}, "unknown key 'wieght'"),
        ({"path": "a", "weight": 0}, r"data\.0\.weight: expected a number > 0"),
        ({"path": "a", "columns": ["x"]}, "ours first"),
        ({"path": "a", "columns": {"text": "x", "prompt": "x"}}, "stands for two columns"),
        ({"path": "a", "split": 3}, r"split: expected a text"),
    ],
)
def test_a_wrong_entry_is_refused_with_its_key(entry, message):
    with pytest.raises(ConfigError, match=message):
        RunOptions(model="m", data=[entry])


def test_options_of_trls_command_line_become_an_entry():
    options = RunOptions(model="m", data="owner/name", dataset_config="c", dataset_train_split="a", dataset_test_split="b")
    assert options.data == (DataSource("owner/name", "c", "a"),)
    assert options.eval_data == (DataSource("owner/name", "c", "b"),)
    assert RunOptions.of(options.to_json()) == options
    with pytest.raises(ConfigError, match="data has 2 entries"):
        RunOptions(model="m", data=["a", "b"], dataset_config="c")


TEXTS = [{"body": f"text {number}", "text": "not this", "other": number} for number in range(3)]


def written(tmp_path, form):
    path = tmp_path / f"rows{form}"
    lines = "".join(json.dumps(row) + "\n" for row in TEXTS).encode()
    if form.startswith(".csv"):
        with open(tmp_path / "plain.csv", "w", newline="") as file:
            table = csv.DictWriter(file, list(TEXTS[0]))
            table.writeheader()
            table.writerows(TEXTS)
        lines = (tmp_path / "plain.csv").read_bytes()
        (tmp_path / "plain.csv").unlink()
    match form:
        case ".parquet":
            datasets.Dataset.from_list(TEXTS).to_parquet(path)
        case "":
            datasets.Dataset.from_list(TEXTS).save_to_disk(path)
        case _ if form.endswith(".gz"):
            path.write_bytes(gzip.compress(lines))
        case _ if form.endswith(".zst"):
            path.write_bytes(pyarrow.compress(lines, codec="zstd", asbytes=True))
        case _:
            path.write_bytes(lines)
    return path


FORMS = [".jsonl", ".csv", ".jsonl.gz", ".jsonl.zst", ".csv.gz", ".csv.zst", ".json.gz", ".parquet", ""]


@pytest.mark.parametrize("form", FORMS)
def test_columns_rename_what_the_data_has_in_every_form(tmp_path, form):
    path = written(tmp_path, form)
    found = rows_of(DataSource(str(path), columns={"text": "body"}), tmp_path)
    assert [row["text"] for row in found] == ["text 0", "text 1", "text 2"]
    assert rows_of(str(path), tmp_path)[0]["text"] == "not this"
    with pytest.raises(DataError, match="columns names 'nobody', the data has 'body', 'text', 'other'"):
        rows_of(DataSource(str(path), columns={"text": "nobody"}), tmp_path)


@pytest.mark.parametrize("form", [".jsonl.gz", ".jsonl.zst", ".csv.gz"])
@pytest.mark.parametrize("damage", [lambda content: content[:-9], lambda content: b"no packed file at all"])
def test_a_damaged_packed_file_is_named_and_never_a_shorter_one(tmp_path, form, damage):
    path = written(tmp_path, form)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=rf"rows\{form}: cannot be unpacked"):
        rows_of(str(path), tmp_path)


def test_a_csv_file_whose_row_has_other_fields_than_the_header_is_refused_with_its_line(tmp_path):
    (tmp_path / "a.csv").write_text('text,other\n"two\nlines",1\nx,y,z\n')
    with pytest.raises(DataError, match=r"a\.csv, line 4: has another number of fields"):
        rows_of(str(tmp_path / "a.csv"), tmp_path)


def test_a_split_of_a_saved_dictionary_is_read_and_a_file_has_none(tmp_path):
    parts = {name: datasets.Dataset.from_list([{"text": name}]) for name in ("train", "test")}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved")
    assert rows_of(DataSource(str(tmp_path / "saved"), split="test"), tmp_path) == [{"text": "test"}]
    with pytest.raises(DataError, match="no split 'other', found train, test"):
        rows_of(DataSource(str(tmp_path / "saved"), split="other"), tmp_path)
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(DataError, match="a file has none"):
        rows_of(DataSource(str(tmp_path / "a.jsonl"), split="test"), tmp_path)
