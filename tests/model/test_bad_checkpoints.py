"""Broken, truncated and foreign model directories: each is refused with the file, the numbers and what to do."""

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from saved_models import import_all, save
from tiny_architectures import CONFIGS, make_config

from headrace.model import Chain, Checkpoint, import_unit
from headrace.terms.errors import ModelError
from headrace.terms.options.optimizer import Optimizer


def edit_config(directory: Path, **values: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **values}))


def test_bad_directories(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such directory"):
        Checkpoint.open(tmp_path / "absent")
    with pytest.raises(ModelError, match=r"no config\.json"):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(ModelError, match=r"config\.json"):
        Checkpoint.open(tmp_path)
    make_config(CONFIGS["llama"]).save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin"):
        Checkpoint.open(tmp_path)


def test_truncated_and_foreign_files(tmp_path: Path) -> None:
    directory, _ = save(tmp_path)
    file = directory / "model.safetensors"
    whole = file.read_bytes()
    for kept in (0, 5, 300, len(whole) - 1):
        file.write_bytes(whole[:kept])
        with pytest.raises(ModelError, match=r"model\.safetensors"):
            Checkpoint.open(directory)
    file.write_bytes(whole[:-1])
    with pytest.raises(ModelError, match=rf"{len(whole)} bytes .*found {len(whole) - 1}"):
        Checkpoint.open(directory)
    file.write_bytes(whole + b"more")
    with pytest.raises(ModelError, match=f"found {len(whole) + 4}"):
        Checkpoint.open(directory)
    file.write_bytes(b"\x80\x02}q\x00" * 100)
    with pytest.raises(ModelError, match="truncated or of another kind"):
        Checkpoint.open(directory)
    file.write_bytes((2).to_bytes(8, "little") + b"[]")
    with pytest.raises(ModelError, match="found list"):
        Checkpoint.open(directory)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32"},
        {"dtype": "X9", "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
    ],
)
def test_bad_header_entries(tmp_path: Path, entry: dict[str, Any]) -> None:
    directory, _ = save(tmp_path)
    header = json.dumps({"weird": entry}).encode()
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"1234")
    with pytest.raises(ModelError, match="weird"):
        Checkpoint.open(directory)


@pytest.mark.parametrize(("dtype", "stored"), [("float32", "F32"), ("bfloat16", "BF16")])
def test_quantised_weights_in_the_configuration_alone(tmp_path: Path, dtype: str, stored: str) -> None:
    """Of weights that were converted, by somebody who left the configuration."""
    directory, _ = save(tmp_path, dtype=dtype)
    edit_config(directory, quantization_config={"quant_method": "fp8"})
    with pytest.raises(
        ModelError, match=rf"quantised weights \(fp8\), but the files hold {stored}\. .*remove quantization_config"
    ):
        Checkpoint.open(directory)


@pytest.mark.parametrize(("named", "dtype", "stored"), [("float8_e4m3fn", "float32", "F32"), ("float32", "bfloat16", "BF16")])
def test_a_dtype_in_the_configuration_that_no_weight_has_is_told(tmp_path: Path, named: str, dtype: str, stored: str) -> None:
    directory, _ = save(tmp_path, dtype=dtype)
    assert Checkpoint.open(directory).notes == ()
    edit_config(directory, dtype=named)
    _, chain, _, _ = import_all(directory, "bfloat16")
    [note] = chain.notes
    assert note.startswith(f"config.json says {named}, the weights are {stored}. ")


def test_missing_shard_and_missing_tensor(tmp_path: Path) -> None:
    directory, _ = save(tmp_path, max_shard_size="20KB")
    shards = sorted(directory.glob("*.safetensors"))
    held = shards[1].read_bytes()
    shards[1].unlink()
    with pytest.raises(ModelError, match=shards[1].name):
        Checkpoint.open(directory)
    shards[1].write_bytes(shards[0].read_bytes())
    with pytest.raises(ModelError, match="not in the file"):
        Checkpoint.open(directory)
    shards[1].write_bytes(held)
    Checkpoint.open(directory)
    (directory / "model.safetensors.index.json").write_text('{"weights": 1}')
    with pytest.raises(ModelError, match="weight_map"):
        Checkpoint.open(directory)


def test_weights_of_another_configuration(tmp_path: Path) -> None:
    directory, _ = save(tmp_path)
    edit_config(directory, intermediate_size=64)
    with pytest.raises(ModelError, match=r"down_proj\.weight: expected \(32, 64\) .*found \(32, 48\)"):
        import_all(directory, "bfloat16")
    edit_config(directory, intermediate_size=48, num_hidden_layers=5)
    with pytest.raises(ModelError, match=r"18 parameters .*model\.layers\.3"):
        import_all(directory, "bfloat16")


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2"])
def test_weights_of_blocks_that_the_configuration_leaves_out(tmp_path: Path, name: str) -> None:
    directory, _ = save(tmp_path, name)
    stored = set(load_file(directory / "model.safetensors"))
    of_the_last = [key for key in stored if re.search(r"\b(layers|h)\.2\.", key)]
    edit_config(directory, **{"n_layer" if name == "gpt2" else "num_hidden_layers": 2})
    checkpoint = Checkpoint.open(directory)
    chain = Chain.from_config(checkpoint.config, "bfloat16", Optimizer())
    with pytest.raises(ModelError, match=rf"has 2 blocks .* {len(of_the_last)} stored tensors .*\.2\..*leave_out_blocks"):
        chain.attach(checkpoint)
    weights = chain.attach(checkpoint, leave_out_blocks=True)
    assert set(weights.unused) == set(weights.unknown) == set(of_the_last)
    [note] = chain.notes
    assert note.startswith(f"{len(of_the_last)} stored tensors that the model does not have (")


def test_blocks_that_transformers_passes_over_are_no_fault(tmp_path: Path) -> None:
    """DeepSeek-V3 comes with a block that predicts one token more."""
    directory, _ = save(tmp_path, "deepseek-v3")
    tensors = load_file(directory / "model.safetensors")
    save_file({**tensors, "model.layers.61.eh_proj.weight": torch.ones(3)}, directory / "model.safetensors")
    checkpoint = Checkpoint.open(directory)
    chain = Chain.from_config(checkpoint.config, "bfloat16", Optimizer())
    assert list(chain.attach(checkpoint).unknown) == ["model.layers.61.eh_proj.weight"]
    assert "1 stored tensors" in chain.notes[0]


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    directory, _ = save(tmp_path, "mixtral")
    tensors = load_file(directory / "model.safetensors")
    key = next(key for key in tensors if ".experts.2.w1" in key)
    del tensors[key]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"experts of .*\[3, 4\]"):
        import_all(directory, "bfloat16")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_values_that_are_no_numbers(tmp_path: Path, value: float, dtype: str) -> None:
    directory, _ = save(tmp_path, "llama", dtype)
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"][3] = value
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.norm\.weight: NaN or infinity in 1 of 32"):
        import_all(directory, "bfloat16")


def test_weights_in_eight_bits_are_refused(tmp_path: Path) -> None:
    directory, _ = save(tmp_path)
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.norm\.weight is F8_E4M3"):
        import_all(directory, "bfloat16")


def test_wrong_plane_size(tmp_path: Path) -> None:
    directory, _ = save(tmp_path)
    checkpoint = Checkpoint.open(directory)
    chain = Chain.from_config(checkpoint.config, "bfloat16", Optimizer())
    with pytest.raises(ModelError, match="elements"):
        import_unit(chain.attach(checkpoint), chain.layouts[1], np.zeros(5, np.uint16), None)


@pytest.mark.parametrize("architectures", [[1], [None, []], float("nan"), 3, "Llama", {"a": 1}])
def test_words_for_the_class_that_are_none_are_passed_over(tmp_path: Path, architectures: Any) -> None:
    """As transformers does, which reads the model by its type; or the file is refused."""
    directory, _ = save(tmp_path)
    edit_config(directory, architectures=architectures)
    with contextlib.suppress(ModelError):
        assert Checkpoint.open(directory).whole is None
