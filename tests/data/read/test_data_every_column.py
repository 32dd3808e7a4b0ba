"""What a loss takes comes from each kind of file alike: all columns of prompts, with their types, and labels."""

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made_tokenizers import PLAIN, make_tokenizer

from headrace.data.batches.prompt_batches import Prompt, read_prompts
from headrace.data.chat.prompts import Prompts
from headrace.data.pairs.preferences import read_labelled
from headrace.data.read.sources import find_sources
from headrace.terms.errors import DataError
from headrace.terms.options.data_source import DataSource

ROWS: list[dict[str, Any]] = [
    {"prompt": "12", "answer": "Rhine", "level": 1, "label": True, "share": 0.5, "text": "a"},
    {"prompt": "a hill", "answer": "Brocken", "level": 2, "label": False, "share": 2.0, "text": None},
]
VALUES = [{name: value for name, value in row.items() if name != "prompt"} for row in ROWS]


def write_jsonl(folder: Path) -> str:
    rows = [{name: value for name, value in row.items() if value is not None} for row in ROWS]  # an absent key is None, too
    (folder / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "p.jsonl")


def write_csv(folder: Path) -> str:
    lines = [",".join("" if value is None else str(value) for value in row.values()) for row in ROWS]
    (folder / "p.csv").write_text("\n".join([",".join(ROWS[0]), *lines]) + "\n")
    return str(folder / "p.csv")


def write_parquet(folder: Path) -> str:
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "p.parquet")
    return str(folder / "p.parquet")


def write_arrow(folder: Path) -> str:
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(folder / "p.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return str(folder / "p.arrow")


def write_saved(folder: Path) -> str:
    """Write a data set of `datasets`, which is read as one of the Hub is."""
    datasets.Dataset.from_list(ROWS).save_to_disk(str(folder / "saved"))
    return str(folder / "saved")


def read(entry: str | DataSource, folder: Path, most_tokens: int = 99) -> list[Prompt]:
    return read_prompts([entry], folder, Prompts(make_tokenizer(PLAIN), raw=True), most_tokens)[0]


@pytest.mark.parametrize("write", [write_jsonl, write_csv, write_parquet, write_arrow, write_saved])
def test_prompts_bring_all_columns_with_their_types_and_none_for_what_is_absent(write: Any, tmp_path: Path) -> None:
    found = read(write(tmp_path), tmp_path)
    assert [each.text for each in found] == ["12", "a hill"]
    assert [dict(each.columns) for each in found] == VALUES
    assert [list(map(type, each.columns.values())) for each in found] == [list(map(type, row.values())) for row in VALUES]


def test_a_column_of_another_name_is_the_prompt_and_all_others_come_along(tmp_path: Path) -> None:
    pq.write_table(pa.table({"question": ["?"], "prompt": ["hidden"], "answer": [7]}), tmp_path / "p.parquet")
    (found,) = read(DataSource(path=str(tmp_path / "p.parquet"), columns={"prompt": "question"}), tmp_path)
    assert (found.text, dict(found.columns)) == ("?", {"answer": 7})


def test_a_column_that_cannot_be_a_value_is_refused_by_name(tmp_path: Path) -> None:
    when = pa.array([2**62], pa.timestamp("us"))  # beyond the years of Python
    pq.write_table(pa.table({"prompt": ["?"], "when": when}), tmp_path / "p.parquet")
    with pytest.raises(DataError, match="column 'when' has a value that cannot be read"):
        read(str(tmp_path / "p.parquet"), tmp_path)


def test_a_prompt_that_ends_in_an_opened_answer_is_gone_on_with(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(PLAIN)
    said = [{"role": "user", "content": "two and two?"}, {"role": "assistant", "content": "it is"}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": each}) + "\n" for each in (said, said[:1])))
    opened, asked = read(str(tmp_path / "p.jsonl"), tmp_path)
    own = [tokenizer.apply_chat_template(said, tokenize=False, continue_final_message=True)]
    own += [tokenizer.apply_chat_template(said[:1], tokenize=False, add_generation_prompt=True)]
    assert [list(opened.ids), list(asked.ids)] == [tokenizer(each, add_special_tokens=False).input_ids for each in own]
    assert opened.text == said


def test_a_long_value_of_a_column_is_whole(tmp_path: Path) -> None:
    long = "x" * (5 << 20)
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "?", "answer": long}) + "\n")
    assert read(str(tmp_path / "p.jsonl"), tmp_path)[0].columns["answer"] == long


@pytest.mark.parametrize(("yes", "no"), [("True", "False"), ("true", "FALSE"), ("1", "0"), ("yes", "No"), ("1.0", "0.0")])
def test_labels_in_csv_are_true_or_false(yes: str, no: str, tmp_path: Path) -> None:
    (tmp_path / "k.csv").write_text(f"prompt,completion,label\na,b,{yes}\nc,d,{no}\n")
    (source,) = find_sources([str(tmp_path / "k.csv")], tmp_path)
    assert [row.desirable for row in read_labelled(source)[1]] == [True, False]


@pytest.mark.parametrize("labels", [[True, False], [1, 0], [1.0, 0.0]])
def test_labels_in_tables_are_read(labels: list[Any], tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a", "c"], "completion": ["b", "d"], "label": labels}), tmp_path / "k.parquet")
    (source,) = find_sources([str(tmp_path / "k.parquet")], tmp_path)
    assert [row.desirable for row in read_labelled(source)[1]] == [True, False]


def test_another_label_in_csv_is_refused_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "k.csv").write_text("prompt,completion,label\na,b,good\n")
    (source,) = find_sources([str(tmp_path / "k.csv")], tmp_path)
    with pytest.raises(DataError, match="line 2: label must be true or false, found 'good'"):
        list(read_labelled(source)[1])
