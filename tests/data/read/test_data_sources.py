"""Files to rows. Run: pytest tests/data/read/test_data_sources.py"""

import json
import sys

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from headrace.data.read import tables
from headrace.data.read.sources import find_sources, read_rows
from headrace.data.values.values import Kind
from headrace.terms.errors import DataError


def values(path, tmp_path):
    return [row.values for source in find_sources([str(path)], tmp_path / "cache") for row in read_rows(source)[1]]


def kind_of(path, tmp_path):
    return read_rows(find_sources([str(path)], tmp_path / "cache")[0])[0]


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def texts():
    return [{"text": "one"}, {"text": "2020-01-01"}, {"text": "drei ü"}]


def test_json_lines_and_arrays_and_tables_hold_the_same_rows(tmp_path, texts):
    lines = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, texts)) + "\n\n")
    array = write(tmp_path / "b.json", json.dumps(texts, indent=1))
    lines_in_json = write(tmp_path / "c.json", lines.read_text())
    table = tmp_path / "d.parquet"
    data = datasets.Dataset.from_list(texts)
    data.to_parquet(table)
    data.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict(train=data).save_to_disk(tmp_path / "split")
    arrow = next((tmp_path / "saved").glob("*.arrow"))
    for path in (lines, array, lines_in_json, table, arrow, tmp_path / "saved", tmp_path / "split"):
        assert [dict(row) for row in values(path, tmp_path)] == texts, path


def test_tables_of_any_form_hold_the_same_rows_whatever_the_pieces(tmp_path, monkeypatch):
    rows = [
        {"input_ids": list(range(index % 7 + 1)), "labels": None, "tools": {"a": [index], "b": "ü"}} for index in range(300)
    ]
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "one.parquet")
    pyarrow.parquet.write_table(table, tmp_path / "many.parquet", row_group_size=70, compression="zstd")
    with pyarrow.ipc.new_file(tmp_path / "file.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=100)
    with pyarrow.ipc.new_stream(tmp_path / "stream.arrow", table.schema) as writer:
        writer.write_table(table)
    monkeypatch.setattr(tables, "_BATCH_BYTES", 1000)
    for path in tmp_path.iterdir():
        assert values(path, tmp_path) == rows, path


@pytest.mark.skipif(not hasattr(datasets, "Json"), reason="older versions of datasets have no such type")
def test_objects_that_a_data_set_keeps_as_text_are_objects(tmp_path):
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": [{"type": "text"}]}]}] * 3
    data = datasets.Dataset.from_dict({"messages": [row["messages"] for row in rows]}, on_mixed_types="use_json")
    data.to_parquet(tmp_path / "a.parquet")
    assert values(tmp_path / "a.parquet", tmp_path) == rows


@pytest.mark.parametrize(
    ("name", "package"), [("a.parquet", "pyarrow"), ("a.arrow", "pyarrow"), ("saved", "datasets"), ("owner/none", "datasets")]
)
def test_a_library_that_is_missing_is_named(tmp_path, monkeypatch, name, package):
    (tmp_path / "a.parquet").touch()
    (tmp_path / "a.arrow").touch()
    datasets.Dataset.from_list([{"text": "x"}]).save_to_disk(tmp_path / "saved")
    for each in ("pyarrow", "pyarrow.parquet", "datasets"):
        monkeypatch.setitem(sys.modules, each, None)
    path = name if "/" in name else tmp_path / name
    with pytest.raises(
        DataError, match=rf"{name}: needs the package {package}, which cannot be loaded .*; install it \(pip in"
    ):
        values(path, tmp_path)


def test_a_large_row_group_is_not_read_whole(tmp_path):
    """It was: 300 MB of rows in one group, and a millisecond for each row besides."""
    texts = [f"{index:06}" * 200 for index in range(40_000)]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    del texts
    before = pyarrow.total_allocated_bytes()
    rows = read_rows(find_sources([str(tmp_path / "a.parquet")], tmp_path)[0])[1]
    most = max(pyarrow.total_allocated_bytes() for index, _ in enumerate(rows) if index % 100 == 0)
    assert most - before < 8 << 20


def test_a_byte_order_mark_is_skipped(tmp_path):
    for name in ("a.jsonl", "a.json"):
        path = tmp_path / name
        path.write_bytes(b"\xef\xbb\xbf" + b'{"text": "x"}\n')
        assert values(path, tmp_path) == [{"text": "x"}]


def test_a_directory_is_searched_in_sorted_order_without_hidden_files(tmp_path):
    (tmp_path / "data" / "sub").mkdir(parents=True)
    (tmp_path / "data" / ".hidden").mkdir()
    write(tmp_path / "data" / "b.jsonl", '{"text": "second"}')
    write(tmp_path / "data" / "a.jsonl", '{"text": "first"}')
    write(tmp_path / "data" / "sub" / "c.jsonl", '{"text": "third"}')
    write(tmp_path / "data" / ".hidden" / "d.jsonl", '{"text": "never"}')
    write(tmp_path / "data" / "README.md", "about")
    assert [row["text"] for row in values(tmp_path / "data", tmp_path)] == ["first", "second", "third"]


@pytest.mark.parametrize(
    ("columns", "kind"),
    [
        ({"text": "x"}, Kind.TEXT),
        ({"messages": [], "text": "x", "prompt": "y"}, Kind.CHAT),
        ({"prompt": "x", "completion": "y", "id": 3}, Kind.COMPLETION),
        ({"input_ids": [1], "labels": [1]}, Kind.TOKENS),
        ({"messages": None, "text": "x"}, Kind.TEXT),
    ],
)
def test_the_kind_follows_from_the_columns(tmp_path, columns, kind):
    assert kind_of(write(tmp_path / "a.jsonl", json.dumps(columns)), tmp_path) is kind


MESSAGES = [{"role": "user", "content": "two?"}, {"role": "assistant", "content": "four"}]
SYSTEM = {"role": "system", "content": "be brief"}


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"conversations": [{"from": "human", "value": "two?"}, {"from": "gpt", "value": "four"}], "id": "x"}, MESSAGES),
        ({"conversations": MESSAGES}, MESSAGES),
        ({"conversations": [{"from": "system", "value": "be brief"}]}, [SYSTEM]),
        ({"conversations": [{"from": "human", "value": "two?"}], "system": "be brief"}, [SYSTEM, MESSAGES[0]]),
        ({"instruction": "two?", "input": "", "output": "four"}, MESSAGES),
        ({"instruction": "two?", "output": "four"}, MESSAGES),
        (
            {"instruction": "add", "input": "2, 2", "output": "4"},
            [MESSAGES[0] | {"content": "add\n\n2, 2"}, MESSAGES[1] | {"content": "4"}],
        ),
        (
            {"instruction": "two?", "output": "four", "system": "be brief", "history": [["two?", "four"]]},
            [SYSTEM, *MESSAGES, *MESSAGES],
        ),
    ],
)
def test_share_gpt_and_alpaca_are_renamed_to_messages(tmp_path, row, messages):
    path = write(tmp_path / "a.jsonl", json.dumps(row) + "\n" + json.dumps(row))
    (source,) = find_sources([str(path)], tmp_path)
    kind, rows = read_rows(source)
    rows = list(rows)
    assert kind is Kind.CHAT
    assert [each.values["messages"] for each in rows] == [messages] * 2
    assert "is read as messages" in rows[1].remarks[0]


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"conversations": "x"}, "line 1: conversations must be a list of objects with from and value, found 'x'"),
        ({"conversations": [{"from": "who", "value": "x"}]}, r"line 1: conversations\[0\] must .* who speaks .human, .*'who'"),
        ({"conversations": [{"from": "human"}]}, r"line 1: conversations\[0\] must have a value"),
        ({"instruction": "x", "output": 5}, "line 1: instruction, input and output must be strings, found '5'"),
        ({"instruction": "x", "output": "y", "history": ["z"]}, "line 1: history must be a list of pairs"),
    ],
)
def test_a_bad_row_of_another_form_is_named(tmp_path, row, found):
    path = write(tmp_path / "a.jsonl", json.dumps(row))
    with pytest.raises(DataError, match=found):
        values(path, tmp_path)
    write(path, '{"instruction": "x", "output": "y"}\n{"instruction": "x"}\n')
    with pytest.raises(DataError, match=r"line 2: output missing or null; the first sample .* has instruction . output"):
        values(path, tmp_path)


def test_keys_that_stand_twice_and_columns_that_are_not_used_are_remarked(tmp_path):
    text = '{"text": "a", "text": "b"}\n{"text": "c", "more": {"x": 1, "x": 2}}\n{"text": "d", "messages": []}\n{"text": "e"}\n'
    (source,) = find_sources([str(write(tmp_path / "a.jsonl", text))], tmp_path)
    rows = list(read_rows(source)[1])
    assert [row.values["text"] for row in rows] == ["b", "c", "d", "e"]
    assert [row.remarks for row in rows] == [
        ("'text' stands there twice; the last one is used",),
        ("'x' stands there twice; the last one is used",),
        ("text is used, messages beside it is not",),
        (),
    ]
    (source,) = find_sources([str(write(tmp_path / "a.json", '[{"text": "a"}, {"text": "a", "text": "b"}]'))], tmp_path)
    assert sum(len(row.remarks) for row in read_rows(source)[1]) == 1


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["a.jsonl", "no samples", "text | messages"]),
        ("\n \n", ["no samples"]),
        ('{"text": "x"}\n{"text": "y"\n', ["a.jsonl, line 2", "not JSON", "column"]),
        ('{"text": "x"}\n\n["y"]\n', ["a.jsonl, line 3", "expected a JSON object", "list"]),
        ('{"text": "x"}\n{"words": "y"}\n', ["a.jsonl, line 2", "text missing", "'words'"]),
        ('{"text": "x"}\n{"text": null}\n', ["a.jsonl, line 2", "text missing or null"]),
        ('{"prompt": "x", "answer": "y"}\n', ["a.jsonl, line 1", "'prompt', 'answer'", "prompt + completion"]),
        ("[" * 100_000, ["a.jsonl, line 1"]),
    ],
)
def test_a_bad_line_is_named(tmp_path, text, parts):
    path = write(tmp_path / "a.jsonl", text)
    with pytest.raises(DataError) as caught:
        values(path, tmp_path)
    assert all(part in str(caught.value) for part in parts), caught.value


def test_bytes_that_are_not_utf8_are_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "x"}\n{"text": "\xff\xfe"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: not UTF-8"):
        values(path, tmp_path)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
@pytest.mark.parametrize("content", [b"", b"no table at all" * 10])
def test_a_damaged_table_is_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=name):
        values(tmp_path / name, tmp_path)


def test_a_bad_row_of_a_table_is_named(tmp_path):
    datasets.Dataset.from_list([{"text": "x"}, {"text": None}]).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet, row 1: text missing or null"):
        values(tmp_path / "a.parquet", tmp_path)


@pytest.mark.parametrize("name", ["missing.jsonl", "some/missing.jsonl", "nothing here", "/no/such/place"])
def test_a_missing_path_is_named_without_asking_the_network(tmp_path, name):
    with pytest.raises(DataError, match="no such file or directory"):
        find_sources([name], tmp_path)


def test_a_hub_name_that_cannot_be_had_is_an_error_with_its_cause(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"owner/name: no such file.*Hub"):
        find_sources(["owner/name"], tmp_path)


def test_unknown_files_and_empty_directories_are_refused_with_what_is_accepted(tmp_path):
    write(tmp_path / "notes.txt", "x")
    with pytest.raises(DataError, match=r"'\.txt' are not read; expected \.jsonl"):
        find_sources([str(tmp_path / "notes.txt")], tmp_path)
    with pytest.raises(DataError, match=r"found \.txt"):
        find_sources([str(tmp_path)], tmp_path)


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", '{"text": "x"}')
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(DataError, match=r"a\.jsonl: this user may not read"):
        find_sources([str(path)], tmp_path)


def test_a_saved_dictionary_without_train_is_refused(tmp_path):
    datasets.DatasetDict(test=datasets.Dataset.from_list([{"text": "x"}])).save_to_disk(tmp_path / "split")
    with pytest.raises(DataError, match="no split 'train', found test"):
        values(tmp_path / "split", tmp_path)


def test_reading_tables_leaves_the_settings_of_datasets_and_writes_no_copy(tmp_path):
    datasets.Dataset.from_list([{"text": "x"}] * 3).to_parquet(tmp_path / "a.parquet")
    before = datasets.logging.get_verbosity(), datasets.utils.are_progress_bars_disabled()
    files = set(tmp_path.rglob("*"))
    assert len(values(tmp_path / "a.parquet", tmp_path)) == 3
    assert (datasets.logging.get_verbosity(), datasets.utils.are_progress_bars_disabled()) == before
    assert set(tmp_path.rglob("*")) == files


@pytest.mark.parametrize(
    "text", ['{"text": "x", "n": ' + "9" * 5000 + "}", '{"text": ' + "[" * 200_000 + "}"], ids=["digits", "depth"]
)
def test_what_is_json_and_still_cannot_be_read_is_named_with_its_line(tmp_path, text):
    path = write(tmp_path / "a.jsonl", '{"text": "x"}\n' + text + "\n")
    with pytest.raises(DataError, match=rf"^{path}, line 2: .*; expected one JSON object a line"):
        values(path, tmp_path)
    array = write(tmp_path / "a.json", f"[{text}]")
    with pytest.raises(DataError, match=rf"^{array}, element 0: .*; expected an array of JSON objects"):
        values(array, tmp_path)
