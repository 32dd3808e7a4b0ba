"""Directories with several splits: the rows that `datasets` itself gives, or a refusal that names the splits.

Run: pytest tests/data/read/test_data_splits.py
"""

import json
from pathlib import Path

import datasets
import pytest

from headrace.data.read.sources import find_sources, read_rows
from headrace.terms.errors import DataError
from headrace.terms.options.data_source import DataSource

LAYOUTS = {
    "sharded": ["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl", "data/test-00000-of-00001.jsonl"],
    "other names in shards": ["data/train-00000-of-00001.jsonl", "data/random-00000-of-00001.jsonl"],
    "two files": ["train.jsonl", "test.jsonl"],
    "words": ["my_training-1.jsonl", "my-dev.jsonl"],
    "folders": ["train/a.jsonl", "validation/a.jsonl", "test/b.jsonl"],
    "no split": ["a.jsonl", "latest.jsonl", "contest/b.jsonl", "evaluations.jsonl"],
    "a file of none": ["train.jsonl", "notes.jsonl"],
}


def made(folder: Path, names: list[str]) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("".join(json.dumps({"text": f"{name} {row}"}) + "\n" for row in range(2)))
    return folder


def rows(entry: str | DataSource, tmp_path: Path) -> list[str]:
    return sorted(row.values["text"] for source in find_sources([entry], tmp_path / "cache") for row in read_rows(source)[1])


def own(folder: Path, tmp_path: Path, split: str = "train", name: str | None = None) -> list[str]:
    return sorted(datasets.load_dataset(str(folder), name, split=split, cache_dir=str(tmp_path / "own"))["text"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_directory_gives_the_training_split_of_datasets(layout: str, tmp_path: Path) -> None:
    folder = made(tmp_path / "set", LAYOUTS[layout])
    assert rows(str(folder), tmp_path) == own(folder, tmp_path)


def test_another_split_is_named(tmp_path: Path) -> None:
    folder = made(tmp_path / "set", LAYOUTS["folders"])
    assert rows(DataSource(str(folder), split="validation"), tmp_path) == own(folder, tmp_path, "validation")
    with pytest.raises(DataError, match=r"no split 'dev', found .*test"):
        rows(DataSource(str(folder), split="dev"), tmp_path)
    with pytest.raises(DataError, match="leave split out"):
        rows(DataSource(str(made(tmp_path / "plain", ["a.jsonl"])), split="test"), tmp_path)


def test_only_held_out_files_are_what_is_meant_and_beside_others_they_are_refused(tmp_path: Path) -> None:
    names = ["test-1.jsonl", "test-2.jsonl"]
    assert len(rows(str(made(tmp_path / "set", names)), tmp_path)) == 4
    with pytest.raises(DataError, match="no split 'train', found test"):
        rows(str(made(tmp_path / "set", ["other.jsonl"])), tmp_path)


README = """---
configs:
- config_name: first
  data_files:
  - {split: train, path: "one/*"}
  - {split: held, path: "two/*"}
- config_name: second
  data_files: "three.jsonl"
---
"""


def test_a_readme_says_which_files_are_which_split(tmp_path: Path) -> None:
    folder = made(tmp_path / "set", ["one/a.jsonl", "two/a.jsonl", "three.jsonl"])
    (folder / "README.md").write_text(README)
    with pytest.raises(DataError, match="configurations first, second"):
        rows(str(folder), tmp_path)
    for name, split in (("first", "train"), ("first", "held"), ("second", "train")):
        assert rows(DataSource(str(folder), name=name, split=split), tmp_path) == own(folder, tmp_path, split, name)
