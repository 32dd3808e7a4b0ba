"""A table holds the samples that were put into it: no field that a row never had; and no column is in the way."""

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from chat_templates import TEMPLATES, tokenizer_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.data import DataSpec, load_tokens
from headrace.data.read.sources import find_sources, read_rows
from headrace.terms.errors import DataError

NAMES = st.sampled_from(["alpha", "beta", "city", "x"])
WORDS = st.text('ab {}"\\:nul', max_size=8)


def objects(values: Any) -> Any:
    """Objects with their keys in one order: a table has one for all rows."""
    return st.dictionaries(NAMES, values, max_size=3).map(lambda found: dict(sorted(found.items())))


ARGUMENTS = objects(WORDS)
CALLS = st.lists(
    st.builds(lambda n, a: {"function": {"arguments": a, "name": n}, "type": "function"}, NAMES, ARGUMENTS), min_size=1
)
SPEAKS = st.one_of(
    st.builds(lambda content: {"content": content, "role": "assistant"}, WORDS),
    st.builds(lambda content, calls: {"content": content, "role": "assistant", "tool_calls": calls}, WORDS, CALLS),
    st.builds(lambda content, flag: {"content": content, "loss": flag, "role": "assistant"}, WORDS, st.booleans()),
)
TOOL = st.builds(
    lambda name, properties, required: {
        "function": {"name": name, "parameters": {"properties": properties, "type": "object", **required}},
        "type": "function",
    },
    NAMES,
    objects(objects(WORDS)),
    st.sampled_from([{}, {"z_required": ["city"]}]),
)
ROW = st.builds(
    lambda asked, said, more: {"messages": [{"content": asked, "role": "user"}, *said], **more},
    WORDS,
    st.lists(SPEAKS, min_size=1, max_size=3),
    st.one_of(
        st.just({}),
        st.builds(lambda tools: {"tools": tools}, st.lists(TOOL, min_size=1, max_size=2)),
    ),
)


def read(path: Path) -> list[dict[str, Any]]:
    found = [row.values for source in find_sources([str(path)], path.parent) for row in read_rows(source)[1]]
    return [{name: value for name, value in row.items() if value is not None} for row in found]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(ROW, min_size=1, max_size=4))
def test_rows_come_back_from_a_table_as_they_went_in(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    table = pyarrow.Table.from_pylist([{"tools": None, **row} for row in rows])  # the first row names the columns
    with pyarrow.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    assert read(tmp_path / "a.arrow") == rows
    try:
        pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    except pyarrow.ArrowNotImplementedError:
        return  # Parquet has no objects without fields
    assert read(tmp_path / "a.parquet") == rows


def call(name: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    function = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [{"role": "user", "content": "go"}, {"role": "assistant", "content": "", "tool_calls": [function]}]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


CHATS = [
    {"messages": call("weather", {"city": "Bonn"}), "tools": [tool("weather", city={"type": "string"})]},
    {
        "messages": call("time", {"zone": "CET", "short": True}),
        "tools": [tool("time", zone={"type": "string", "enum": ["CET"]})],
    },
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "null: None"}], "tools": []},
]


@pytest.mark.parametrize("name", ["qwen3", "llama3"])
@pytest.mark.parametrize("form", ["parquet", "arrow", "saved", "json kept as text", "tools as text"])
def test_the_samples_of_a_table_are_those_of_its_lines(name: str, form: str, tmp_path: Path) -> None:
    rows = [{**row, "tools": json.dumps(row["tools"])} for row in CHATS] if form == "tools as text" else CHATS
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in CHATS))
    table = tmp_path / "a.parquet"
    if form in ("parquet", "arrow", "tools as text"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), table)
    if form == "arrow":
        table = tmp_path / "a.arrow"
        made = pyarrow.Table.from_pylist(rows)
        with pyarrow.ipc.new_stream(table, made.schema) as writer:
            writer.write_table(made)
    if form == "saved":
        table = tmp_path / "saved"
        datasets.Dataset.from_list(rows).save_to_disk(table)
    if form == "json kept as text":
        if not hasattr(datasets, "Json"):
            pytest.skip("older versions of datasets have no such type")
        table = tmp_path / "saved"
        columns = {key: [row[key] for row in rows] for key in ("messages", "tools")}
        datasets.Dataset.from_dict(columns, on_mixed_types="use_json").save_to_disk(table)
    tokenizer = tokenizer_of(TEMPLATES[name])
    found = [
        load_tokens(DataSpec(paths=(str(path),), sequence_length=512, tokens_per_step=512), tokenizer, tmp_path / "cache")
        for path in (lines, table)
    ]
    assert found[0].info.samples == 3
    assert found[0].info.digest == found[1].info.digest


@pytest.mark.skipif(not hasattr(datasets, "Json"), reason="older versions of datasets have no such type")
def test_nulls_in_what_was_stored_as_json_are_the_users_own(tmp_path: Path) -> None:
    rows = [{"a": None, "b": [1, "x"]}, {"a": [None, {"c": None}]}]
    messages = [[{"role": "assistant", "content": "x", "extra": row}] for row in rows]
    data = datasets.Dataset.from_dict({"messages": messages}, on_mixed_types="use_json")
    data.save_to_disk(tmp_path / "saved")
    data.to_parquet(tmp_path / "a.parquet")
    for path in (tmp_path / "saved", tmp_path / "a.parquet"):
        assert [row["messages"][0]["extra"] for row in read(path)] == rows


@pytest.mark.parametrize("form", ["parquet", "arrow"])
@pytest.mark.parametrize("column", ["at", "output"], ids=["of no form", "of another form"])
@pytest.mark.parametrize("kind", [pyarrow.timestamp("ms"), pyarrow.timestamp("ms", "Mars/Olympus"), pyarrow.date64()], ids=str)
def test_a_column_that_is_not_used_may_hold_what_python_cannot(form: str, column: str, kind: Any, tmp_path: Path) -> None:
    values = pyarrow.array([2**61 // 86_400_000 * 86_400_000] * 2, pyarrow.int64()).cast(kind)
    table, path = pyarrow.table({"text": ["one", "two"], column: values}), tmp_path / f"a.{form}"
    if form == "parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pyarrow.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    assert [row["text"] for row in read(path)] == ["one", "two"]
    if column == "at":
        pyarrow.parquet.write_table(table.drop_columns(["text"]), tmp_path / "b.parquet")
        with pytest.raises(DataError, match=r"nothing to train on in the columns 'at'"):
            read(tmp_path / "b.parquet")


@pytest.mark.parametrize("tools", ["{", "[{]", '"x"', "3", '{"name": "x"}', ["{"], ["3"]])
def test_tools_that_are_no_json_are_refused_by_the_name_of_their_column(tools: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({**CHATS[0], "tools": tools}) + "\n")
    spec = DataSpec(paths=(str(path),), sequence_length=512, tokens_per_step=512)
    with pytest.raises(DataError, match=r"a\.jsonl, line 1: tools"):
        load_tokens(spec, tokenizer_of(TEMPLATES["qwen3"]), tmp_path / "cache")


@pytest.mark.parametrize("text", [True, False])
@pytest.mark.parametrize("several", [True, False])
def test_function_calls_of_llama_factory_are_calls(text: bool, several: bool, tmp_path: Path) -> None:
    calls: Any = [{"name": "weather", "arguments": {"city": "Bonn"}}, {"name": "now"}]
    value = calls if several else calls[0]
    turns = [
        ("human", "go"),
        ("function_call", json.dumps(value) if text else value),
        ("observation", "rain"),
        ("gpt", "Rain."),
    ]
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"conversations": [{"from": who, "value": said} for who, said in turns], "tools": "[]"}) + "\n")
    (row,) = read(path)
    assert [message["role"] for message in row["messages"]] == ["user", "assistant", "tool", "assistant"]
    made = [each["function"] for each in row["messages"][1]["tool_calls"]]
    assert made == [{"arguments": {}, **each} for each in (calls if several else calls[:1])]


@pytest.mark.parametrize("value", ["go", "[]", "{}", '{"arguments": {}}', '["x"]', 3])
def test_a_function_call_that_is_none_is_refused_by_its_place(value: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"conversations": [{"from": "function_call", "value": value}]}) + "\n")
    with pytest.raises(DataError, match=r"a\.jsonl, line 1: conversations\[0\].*function_call"):
        read(path)


FORMS = {
    "input_ids": {"input_ids": [1]},
    "messages": {"messages": [{"role": "assistant", "content": "a"}]},
    "prompt + completion": {"prompt": "a", "completion": "b"},
    "text": {"text": "a"},
    "conversations": {"conversations": [{"from": "gpt", "value": "a"}]},
    "instruction + output": {"instruction": "a", "output": "b"},
}


@pytest.mark.parametrize("first", range(len(FORMS)))
@pytest.mark.parametrize("second", range(len(FORMS)))
def test_of_two_forms_the_first_is_used_and_the_other_named(first: int, second: int, tmp_path: Path) -> None:
    if first >= second:
        return
    (used, left), path = (list(FORMS)[each] for each in (first, second)), tmp_path / "a.jsonl"
    path.write_text(json.dumps(FORMS[left] | FORMS[used]) + "\n")
    (row,) = read_rows(find_sources([str(path)], tmp_path)[0])[1]
    assert f"{used} is used, {left} beside it is not" in row.remarks
