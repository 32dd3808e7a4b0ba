"""What people get wrong about a model is refused in one line that names it and says what to do."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_models import save
from tiny_architectures import CONFIGS, make_config
from tiny_sizes import SIZES
from transformers import CONFIG_MAPPING

from headrace.ask.model_config import read_parts
from headrace.data.batches.open_data import read_model_config
from headrace.model import Checkpoint, build_skeleton, self_check
from headrace.terms.errors import ModelError

LFS = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'46' * 32}\nsize 7\n"
READERS = (Checkpoint.open, read_parts, read_model_config)


@pytest.mark.parametrize("read", READERS)
def test_an_adapter_is_no_model(tmp_path: Path, read: Any) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "meta/llama"}))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=r"adapter \(LoRA\) .* belongs to meta/llama; merge it .*[^\n]$"):
        read(tmp_path)


@pytest.mark.parametrize("read", READERS)
def test_symbolic_links_in_a_circle(tmp_path: Path, read: Any) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.symlink_to(other)
    other.symlink_to(one)
    with pytest.raises(ModelError, match="Too many levels of symbolic links; look at where"):
        read(one)
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").symlink_to(directory / "config.json")
    with pytest.raises(ModelError, match="Too many levels of symbolic links"):
        read(directory)


def test_a_shard_that_is_a_circle_of_links(tmp_path: Path) -> None:
    directory, _ = save(tmp_path, max_shard_size="20KB")
    shard = next(directory.glob("*.safetensors"))
    shard.unlink()
    shard.symlink_to(shard)
    with pytest.raises(ModelError, match=rf"{shard.name}.* Too many levels of symbolic links"):
        Checkpoint.open(directory)


def test_git_lfs_pointers(tmp_path: Path) -> None:
    directory, _ = save(tmp_path)
    (directory / "model.safetensors").write_text(LFS)
    with pytest.raises(ModelError, match=r"model\.safetensors: a git-lfs pointer, not the weights; .*git lfs pull"):
        Checkpoint.open(directory)
    (directory / "config.json").write_text(LFS)
    for read in READERS:
        with pytest.raises(ModelError, match=r"git-lfs pointer instead of config\.json"):
            read(directory)


@pytest.mark.parametrize(
    ("kind", "values", "words"),
    [
        ("llama", {"hidden_act": "sillu"}, "hidden_act is 'sillu'.* did you mean 'silu'"),
        ("gpt2", {"activation_function": "gelu_newer"}, "activation_function is 'gelu_newer'.* did you mean 'gelu_new'"),
        ("llama", {"hidden_act": "no-such-thing"}, "hidden_act is 'no-such-thing'.* known are .*silu"),
        ("llama", {"rope_parameters": {"rope_type": "yarm", "factor": 2.0}}, "rope_type is 'yarm'.* did you mean 'yarn'"),
    ],
)
def test_misspelt_words_of_a_configuration(kind: str, values: dict[str, Any], words: str) -> None:
    sizes = {key: value for key, value in SIZES.items() if kind != "gpt2" or key == "vocab_size"}
    config = CONFIG_MAPPING[kind](**sizes, **values)
    # A trial goes on with plain tables; the model itself cannot.
    for refuse in (*(() if "rope" in words else (self_check,)), lambda config: build_skeleton(config, torch.float32)):
        with pytest.raises(ModelError, match=rf"^{type(config).__name__}: .*{words}[^\n]*$"):
            refuse(config)


@pytest.mark.parametrize(("kind", "key"), [("llama", "num_hidden_layers"), ("gpt2", "n_layer"), ("bamba", "num_hidden_layers")])
def test_no_layers(kind: str, key: str) -> None:
    config = make_config(CONFIGS[kind])
    setattr(config, key, 0)
    with pytest.raises(ModelError, match=f"{key} is 0"):
        self_check(config)


def test_a_name_of_the_hub_without_a_network_is_refused_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that nobody resolves, for as long as one waits."""
    import threading

    never, outlived = threading.Event(), list[bool]()

    def resolve(*words: Any, **named: Any) -> Any:
        outlived.append(not never.wait(200))
        raise socket.gaierror("no network")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(ModelError, match=r"nobody/no-model: no such directory here, and the Hub did not answer[^\n]*$"):
        read_parts("nobody/no-model")
    assert outlived == [], "it was given up while names were still looked up"
    never.set()
