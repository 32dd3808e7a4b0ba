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


def test_each_key_of_a_form_of_axolotl_counts(file: Callable[..., Path]) -> None:
    text = """
base_model: m
datasets:
  - path: a.jsonl
    type: {field_instruction: question, field_output: answer, field_system: system, format: "{instruction}", odd: 1}
"""
    found = migrate(file(text))
    assert found.options["data"] == [{"path": "a.jsonl", "columns": {"instruction": "question", "output": "answer"}}]
    assert {"datasets[0].type.format", "datasets[0].type.odd"} == set(found.left_out)
    of_pairs = "rl: dpo\n" + text.replace("instruction: question, field_output: answer", "prompt: q, field_chosen: good")
    assert migrate(file(of_pairs)).options["data"][0]["columns"] == {"prompt": "q", "chosen": "good"}


ENTRY = "{path: owner/name, name: part, split: train_sft, columns: [messages], data_dir: d, fraction: 0.5, odd: 1}"
FILES = "{path: json, data_files: {train: [a.jsonl, b.jsonl]}, weight: 0.5}"


@pytest.mark.parametrize("place", ["datasets", "dataset_mixture"])
def test_each_key_of_a_mixture_of_trl_counts(place: str, file: Callable[..., Path]) -> None:
    several, more = f"datasets: [{ENTRY}, {FILES}]", "test_split_size: 0.1"
    keys = f"{several}\n{more}\n" if place == "datasets" else f"dataset_mixture: {{{several}, {more}, seed: 0, odd: 1}}\n"
    found = migrate(file(f"model_name_or_path: m\ndataset_name: other\n{keys}"))
    assert found.options["data"] == [
        {"path": "owner/name", "name": "part", "split": "train_sft"},
        {"path": "a.jsonl", "weight": 0.5},
        {"path": "b.jsonl", "weight": 0.5},
    ]
    assert found.options["eval_split"] == 0.1
    begins = "datasets[0]" if place == "datasets" else "dataset_mixture[0]"
    left = {"dataset_name", *(f"{begins}.{key}" for key in ("columns", "data_dir", "fraction", "odd"))}
    left |= {"dataset_mixture.odd"} if place == "dataset_mixture" else set()
    assert left == {key for key in found.left_out if key != "dataset_mixture.seed"}
    assert any("keep that share of the rows" in note for note in found.notes)


def test_splits_of_a_mixer_of_trl_count(file: Callable[..., Path]) -> None:
    text = "model_name_or_path: m\ndataset_mixer: {a: 0.5, b: 1.0}\ndataset_splits: [train_sft, test_sft]\n"
    found = migrate(file(text + "dataset_configs: [one, two]\neval_strategy: epoch\n"))
    assert found.options["data"] == [
        {"path": "a", "name": "one", "weight": 0.5, "split": "train_sft"},
        {"path": "b", "name": "two", "split": "train_sft"},
    ]
    assert found.options["eval_data"] == [
        {"path": "a", "name": "one", "split": "test_sft"},
        {"path": "b", "name": "two", "split": "test_sft"},
    ]
    assert "eval_data" not in migrate(file(text)).options


def test_a_split_that_trl_evaluates_by_itself_is_evaluated(file: Callable[..., Path]) -> None:
    found = migrate(file("model_name_or_path: m\ndataset_name: d\neval_strategy: steps\neval_steps: 5\n"))
    assert found.options["eval_data"] == [{"path": "d", "split": "test"}]
