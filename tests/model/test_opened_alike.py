"""Whatever a model is opened for, its files are compared with it by the same steps. Run: pytest tests/model"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from headrace import Engine, Generator, Options
from headrace.engine.open_model import Purpose, open_model
from headrace.machine.cpu import CpuMachine
from headrace.model import self_check
from headrace.terms.errors import ModelError

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 96}


def tied_but_different(folder: Path) -> Path:
    """A configuration that ties head and embedding, over files in which they differ."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)).to(torch.bfloat16)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def without_a_tensor(folder: Path) -> Path:
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).to(torch.bfloat16)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def of_more_blocks(folder: Path) -> Path:
    LlamaForCausalLM(LlamaConfig(**SIZES)).to(torch.bfloat16).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    return folder


FAULTS: list[tuple[Callable[[Path], Path], str]] = [
    (tied_but_different, "differ, but the configuration ties them"),
    (without_a_tensor, "up_proj"),
    (of_more_blocks, "model.layers.1"),
]
WAYS: dict[str, Callable[[Path], Any]] = {
    "train": lambda path: Engine.open(path, Options(host_memory="4GiB")),
    "generate": lambda path: Generator.open(path),
    "eval": lambda path: Generator.open(path, opened=_to_score),
    "compress": lambda path: open_model(path, CpuMachine(), Purpose(compute_dtype="bfloat16", reads_codes=False)),
}


def _to_score(path: Path, budget: Any, dtype: Any, sink: Any) -> Any:
    from headrace.generate.passes.opened import GenerationModel

    return GenerationModel.of_directory(path, budget, dtype, sink, self_check)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("fault", "words"), FAULTS)
def test_what_one_way_refuses_all_refuse(fault: Callable[[Path], Path], words: str, way: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words):
        WAYS[way](fault(tmp_path))
