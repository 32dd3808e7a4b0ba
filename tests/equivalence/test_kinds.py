"""What is decayed, what is frozen: against `torch.optim.AdamW`, which passes over parameters without a gradient.

Run: pytest tests/equivalence/test_kinds.py
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import LENGTH, MODELS, ROWS, SPLIT, PlainTrainer, batch_of, is_decayed, train
from safetensors.torch import load_file
from tiers import sampled
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import headrace
from headrace.engine.trainer import Engine
from headrace.model import Chain
from headrace.terms.errors import RunDirectoryError
from headrace.terms.options.optimizer import Optimizer

DECAY, STEPS = 0.1, 5
SHAPE = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
BERT = {key: value for key, value in SHAPE.items() if key != "num_key_value_heads"} | {
    "is_decoder": True,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
LATENT = {
    **{name: value for name, value in MODELS["deepseek"].items() if name != "model_type"},
    "index_head_dim": 16,
    "index_n_heads": 2,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "indexer": ("deepseek_v32", {**LATENT, "index_topk": 16}),
    "indexer of glm": ("glm_moe_dsa", {**LATENT, "index_topk": 16}),
    "indexer and gates in norms": ("axk2", {**LATENT, "index_topk": 16}),
    "pooler": ("big_bird", {**BERT, "attention_type": "original_full"}),
    "fixed table": ("roformer", {**BERT, "embedding_size": 64}),
    "attention in a norm": (
        "dbrx",
        {
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 3,
            "max_seq_len": 128,
            "vocab_size": 384,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
            "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    "all in a norm": ("roberta-prelayernorm", BERT),
    "norms of heads": ("cohere", {**SHAPE, "use_qk_norm": True}),
    "norm of a stream": ("gemma3_text", {**SHAPE, "head_dim": 16, "sliding_window": 16}),
}


def saved(case: str, path: Path) -> Path:
    """Save a model with weights far from their first values."""
    kind, values = CASES[case]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**values), dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if not name.endswith("embed_positions.weight"):
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    return path


@pytest.mark.wide
@pytest.mark.parametrize("case", sampled(CASES, ("indexer", "fixed table", "attention in a norm")))
def test_decay_is_that_of_plain_pytorch(case: str, tmp_path: Path) -> None:
    path = saved(case, tmp_path / "model")
    plain = PlainTrainer(path, 1e-3, DECAY, None)
    expected = [plain.step(batch_of(ROWS, LENGTH, seed))[0] for seed in range(STEPS)]
    losses, weights = train(path, tmp_path / "run", steps=STEPS, compute_dtype="float32", adjust=SPLIT)
    assert losses == pytest.approx(expected, rel=1e-5)
    plain.model.save_pretrained(tmp_path / "plain")
    stored, reference = load_file(path / "model.safetensors"), load_file(tmp_path / "plain" / "model.safetensors")
    without = {name for name, parameter in plain.model.named_parameters() if parameter.grad is None}
    assert bool(without) == (case in ("indexer", "indexer of glm", "indexer and gates in norms", "pooler", "fixed table"))
    for name, tensor in weights.items():
        if name.endswith("key.bias"):  # a softmax does not change with it: its gradient is rounding alone
            continue
        torch.testing.assert_close(tensor, reference[name], rtol=2e-4, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}")
        assert name not in without or torch.equal(tensor, stored[name]), name


@pytest.mark.wide
@pytest.mark.parametrize("case", CASES)
def test_the_class_of_the_module_that_owns_it_says_what_a_matrix_is(case: str) -> None:
    kind, values = CASES[case]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**values))
    chain = Chain.from_config(CONFIG_MAPPING[kind](**values), "float32", Optimizer())
    specs = [spec for layout in chain.layouts for spec in layout.parameters if spec.kind != "frozen"]
    assert {spec.name for spec in specs if spec.is_matrix} == {spec.name for spec in specs if is_decayed(model, spec.name)}


@pytest.mark.deep
def test_adapters_of_what_nothing_reaches_stay_as_they_begin(tmp_path: Path) -> None:
    path = saved("indexer", tmp_path / "model")
    options: dict[str, Any] = {"adapter": "lora:rank=2", "learning_rate": 1e-2, "compute_dtype": "float32", "adjust": SPLIT}
    _, first = train(path, tmp_path / "one", steps=1, weight_decay=DECAY, **options)
    _, last = train(path, tmp_path / "run", steps=STEPS, weight_decay=DECAY, **options)
    of_indexers = [name for name in last if ".indexer." in name]
    assert of_indexers
    assert all(torch.equal(first[name], last[name]) for name in of_indexers)
    assert any(not torch.equal(first[name], last[name]) for name in last if ".indexer." not in name)


@pytest.mark.wide
def test_an_expert_without_tokens_is_decayed_as_ever(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    path = model_dir("mixtral-aux")
    chain = Chain.from_config(AutoModelForCausalLM.from_pretrained(path).config, "float32", Optimizer(weight_decay=DECAY))
    assert not any(layout.kinds for layout in chain.layouts)


@pytest.mark.wide
@pytest.mark.parametrize("case", ["norm of a stream", "attention in a norm"])
def test_a_run_from_before_kinds_were_recorded_resumes_to_the_same_bits_or_is_refused(case: str, tmp_path: Path) -> None:
    path, batches = saved(case, tmp_path / "model"), [batch_of(ROWS, LENGTH, seed) for seed in range(2)]
    options = headrace.Options(
        output=tmp_path / "run", tokens_per_step=ROWS * LENGTH, sequence_length=LENGTH, weight_decay=DECAY, host_memory="4GiB"
    )
    with Engine.open(path, options) as engine:
        losses = [engine.step(batch).loss for batch in batches]
    with Engine.open(path, replace(options, output=tmp_path / "other")) as engine:
        engine.step(batches[0])
    manifest = tmp_path / "other" / "state.json"
    values = json.loads(manifest.read_text())
    for layout in values["units"]["layouts"]:
        for parameter in layout["parameters"]:
            del parameter["kind"]
    manifest.write_text(json.dumps(values))
    if case == "norm of a stream":
        with Engine.resume(tmp_path / "other") as engine:
            assert engine.step(batches[1]).loss == losses[1]
    else:
        with pytest.raises(RunDirectoryError, match=r"took .*Wqkv.weight for a norm. This one takes it for an ordinary weight"):
            Engine.resume(tmp_path / "other")
