"""Entries of lists of data: each of their keys is translated, named with a reason, or refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.migrate.migration import migrate
from headrace.terms.errors import ConfigError

LLAMA_FACTORY = (
    "model_name_or_path: m\nstage: sft\nfinetuning_type: full\ndataset: mine\ncutoff_len: 64\ndataset_dir: {folder}\n"
)
INFO_KEYS = {
    "num_samples": 2,
    "ms_hub_url": "x/y",
    "columns": {"prompt": "question", "response": "better", "system": "rules", "images": "pictures"},
}


def test_each_key_of_an_entry_of_llama_factory_counts(file: Callable[..., Path], tmp_path: Path) -> None:
    file(json.dumps({"mine": {"file_name": "mine.json", **INFO_KEYS}}), "dataset_info.json")
    found = migrate(file(LLAMA_FACTORY.format(folder=tmp_path)))
    columns = {"instruction": "question", "output": "better", "system": "rules"}
    assert found.options["data"][0] == {"path": str(tmp_path / "mine.json"), "columns": columns}
    left = {"dataset_info.mine.num_samples", "dataset_info.mine.ms_hub_url", "dataset_info.mine.columns.images"}
    assert left <= set(found.left_out)
    assert any("an empty line joins" in note and "input, history are read" in note for note in found.notes)


def test_tags_of_llama_factory_are_read_or_refused(file: Callable[..., Path], tmp_path: Path) -> None:
    def of(**tags: str) -> Any:
        entry = {"file_name": "a.json", "formatting": "sharegpt", "columns": {"messages": "talk"}, "tags": tags}
        file(json.dumps({"mine": entry}), "dataset_info.json")
        return migrate(file(LLAMA_FACTORY.format(folder=tmp_path))).options["data"][0]["columns"]

    assert of() == {"conversations": "talk"}
    assert of(role_tag="role", content_tag="content", user_tag="user", assistant_tag="assistant") == {"messages": "talk"}
    for tags in ({"user_tag": "asker"}, {"role_tag": "who"}):
        with pytest.raises(ConfigError, match="is not read here"):
            of(**tags)


def test_each_key_of_an_entry_of_axolotl_counts(file: Callable[..., Path]) -> None:
    text = """
base_model: m
datasets:
  - {path: json, data_files: [a.jsonl, b.jsonl], type: chat_template, shards: 4, roles_to_train: [assistant], odd: 1}
  - {path: c.jsonl, type: chat_template, field_messages: talk, message_property_mappings: {role: from, content: value}}
"""
    found = migrate(file(text))
    assert found.options["data"] == ["a.jsonl", "b.jsonl", {"path": "c.jsonl", "columns": {"conversations": "talk"}}]
    assert {"datasets[0].shards", "datasets[0].odd"} <= set(found.left_out)
    for more, word in (("roles_to_train: [user]", "roles_to_train"), ("message_property_mappings: {role: who}", "mappings")):
        with pytest.raises(ConfigError, match=word):
            migrate(file(f"base_model: m\ndatasets:\n  - {{path: c.jsonl, {more}}}\n"))
