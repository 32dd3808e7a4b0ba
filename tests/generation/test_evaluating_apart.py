"""Architectures whose packed samples run by themselves, or are padded: held-out loss is that of plain transformers."""

from pathlib import Path
from typing import Any

import pytest
from test_evaluating import options, own_loss, text_samples, texts
from tiers import sampled
from tiny_architectures import CONFIGS, make_config, make_plain
from tiny_sizes import SIZES
from transformers import PreTrainedTokenizerFast

from headrace.generate.uses.evaluating import evaluate_model
from headrace.terms.errors import ModelError

_LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 2}
_LINEAR = {f"linear_{name}": size for name, size in (("num_key_heads", 2), ("num_value_heads", 4), ("key_head_dim", 8))}
APART: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": CONFIGS["mamba2"],
    "lfm2": ("lfm2", {**SIZES, "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16}),
    "longrope": (
        "phi3",
        {**SIZES, "pad_token_id": 0, "original_max_position_embeddings": 2}
        | {"rope_parameters": {**_LONG, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}},
    ),
    "qwen3_next": (
        "qwen3_next",
        {**SIZES, "head_dim": 16, **_LINEAR, "linear_value_head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    ),
    "llama4": (
        "llama4_text",
        {**SIZES, "head_dim": 8, "num_local_experts": 4, "intermediate_size_mlp": 48, "attention_chunk_size": 16},
    ),
}


def saved(case: tuple[str, dict[str, Any]], model: Path, out: Path) -> Path:
    """A stock model of an architecture, with the tokenizer of `model`."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    config = make_config((case[0], {**case[1], "vocab_size": 320}))
    make_plain(config).save_pretrained(out)
    tokenizer.save_pretrained(str(out))
    return out


@pytest.mark.parametrize("packing", [None, False])
@pytest.mark.parametrize("name", sampled(APART, ["longrope"]))
def test_samples_that_run_by_themselves(name: str, packing: bool | None, model: Path, tmp_path: Path) -> None:
    directory = saved(APART[name], model, tmp_path / "model")
    found = evaluate_model(directory, options(texts(tmp_path / "a.jsonl"), tmp_path, packing=packing, rows=2))
    loss, tokens = own_loss(directory, text_samples(model))
    assert found.tokens == tokens
    assert found.loss == pytest.approx(loss, rel=2e-6)
    assert (found.rows < 7) is (packing is None)


@pytest.mark.parametrize("name", sampled(CONFIGS, ["bloom"]))
def test_every_architecture_is_measured(name: str, model: Path, tmp_path: Path) -> None:
    directory = saved(CONFIGS[name], model, tmp_path / "model")
    found = evaluate_model(directory, options(texts(tmp_path / "a.jsonl"), tmp_path))
    loss, _ = own_loss(directory, text_samples(model))
    assert found.loss == pytest.approx(loss, rel=2e-6)


def test_a_model_whose_code_asks_for_values_is_refused_in_one_line(model: Path, tmp_path: Path) -> None:
    """JetMoe's routers copy counts to the host."""
    values = {**SIZES, "kv_channels": 8, "num_local_experts": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    directory = saved(("jetmoe", values), model, tmp_path / "model")
    with pytest.raises(ModelError, match="a measurement of its loss cannot be planned: it fails on shapes alone: Data"):
        evaluate_model(directory, options(texts(tmp_path / "a.jsonl"), tmp_path))
