"""What is at a path: a model, an adapter and its model, both in one directory; and what is refused, in the same words.

Run: pytest tests/store/test_model_here.py
"""

import json
from pathlib import Path

import pytest

from headrace.data.batches.open_data import read_chat_template
from headrace.store.model_here import Kind, directory_at, model_at, whole_model_at
from headrace.terms.errors import ConfigError, ModelError


def made(folder: Path, *names: str, base: Path | None = None) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).write_text(json.dumps({"base_model_name_or_path": str(base)}) if "adapter_config" in name else "{}")
    return folder


MODEL, ADAPTER = ("config.json", "model.safetensors"), ("adapter_config.json", "adapter_model.safetensors")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return made(tmp_path / "base", *MODEL, "tokenizer.json", "generation_config.json")


def test_files_of_an_adapter_go_before_those_of_its_model(base: Path, tmp_path: Path) -> None:
    bare = made(tmp_path / "bare", *ADAPTER, base=base)
    more = ("tokenizer.json", "chat_template.jinja", "generation_config.json")
    full = made(tmp_path / "full", *ADAPTER, *more, base=base)
    for here in (directory_at(bare), model_at(base, bare)):
        assert (here.directory, here.kind, here.adapter) == (base, Kind.ADAPTER, bare)
        assert (here.template, here.tokenizer, here.generation_config) == (None, base, base)
    for here in (directory_at(full), model_at(base, full)):
        assert (here.directory, here.adapter) == (base, full)
        assert (here.template, here.tokenizer, here.generation_config) == (full / "chat_template.jinja", full, full)


def test_a_template_may_stand_in_a_tokenizers_configuration_alone(base: Path, tmp_path: Path) -> None:
    adapter = made(tmp_path / "adapter", *ADAPTER, base=base)
    (adapter / "tokenizer_config.json").write_text(json.dumps({"chat_template": "OWN {{ messages }}"}))
    here = directory_at(adapter)
    assert (here.template, here.tokenizer) == (adapter / "tokenizer_config.json", base)
    assert read_chat_template(adapter / "tokenizer_config.json") == "OWN {{ messages }}"


def test_a_model_and_an_adapter_in_one_directory_both_act(base: Path, tmp_path: Path) -> None:
    """As in transformers: the model is that of the directory, whatever the adapter names."""
    both = made(tmp_path / "both", *MODEL, *ADAPTER, base=base)
    here = directory_at(both)
    assert (here.directory, here.kind, here.adapter) == (both, Kind.ADAPTER, both)
    with pytest.raises(ModelError, match="holds a model and an adapter"):
        whole_model_at(both)
    with pytest.raises(ConfigError, match="is an adapter itself"):
        directory_at(both, made(tmp_path / "other", *ADAPTER, base=base))
    with pytest.raises(ModelError, match="has one beside its weights"):
        directory_at(made(tmp_path / "upon", *ADAPTER, base=both))


def test_the_configuration_of_a_model_beside_an_adapter_is_no_model(base: Path, tmp_path: Path) -> None:
    folder = made(tmp_path / "axolotl", "config.json", *ADAPTER, base=base)
    assert directory_at(folder).directory == base
    with pytest.raises(ModelError, match="holds a model and an adapter"):
        whole_model_at(folder)


def test_an_adapters_configuration_without_weights_is_noted_beside_a_whole_model(base: Path, tmp_path: Path) -> None:
    folder = made(tmp_path / "merged", *MODEL, "adapter_config.json", base=base)
    here = directory_at(folder)
    assert (here.directory, here.kind, here.adapter) == (folder, Kind.MODEL, None)
    assert "no adapter's weights" in here.notes[0]
    assert whole_model_at(folder).notes == here.notes
    assert directory_at(base).notes == ()


def test_a_model_that_is_not_there_is_said_in_the_same_words(tmp_path: Path) -> None:
    words = "no such directory; give a model directory, a GGUF file, or OWNER/NAME of the Hub"
    for asked in (directory_at, model_at, whole_model_at):
        with pytest.raises(ModelError, match=words):
            asked(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"an adapter of .*no such directory"):
        directory_at(made(tmp_path / "lost", *ADAPTER, base=tmp_path / "nowhere"))
