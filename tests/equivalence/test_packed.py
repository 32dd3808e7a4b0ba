"""Packed rows of models whose layers carry a state are trained as their samples are by plain PyTorch, each in a row of its own.

Run: pytest tests/equivalence/test_packed.py
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import LENGTH, SHAPE, PlainTrainer, batch_of, packed
from short_run import short_run
from tiers import sampled
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from headrace.engine.trainer import Engine
from headrace.model.trials.thresholds import architecture_key

LENGTHS = (LENGTH, 13, 11, 6, 2, LENGTH - 2)
ROWS = ((0,), (1, 2, 4), (3,), (5,))
MODELS: dict[str, dict[str, Any]] = {
    # Its routers hand logits aside, of each sample.
    "qwen3_next": {
        **SHAPE,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "head_dim": 16,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "output_router_logits": True,
    },
    "mamba2": {
        **{key: SHAPE[key] for key in ("vocab_size", "hidden_size")},
        "num_hidden_layers": 3,
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "n_groups": 1,
        "chunk_size": 16,
    },
}


# Of these what the trial makes of a configuration as it is published.
SHRUNK: dict[str, dict[str, Any]] = {
    "glm_moe_dsa": {"indexer_types": ["full", "shared"] * 39},  # blocks that attend to the keys that another one chose
    "deepseek_v4": {},  # several residual streams, compressed keys
    "qwen4_exp_text": {  # streams, a table of n-grams inside a block, queries that choose their keys
        "ple_layer_ids": [2],
        "eos_token_id": 1,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 128,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    },
}
VOCABULARY = 97


def config_of(kind: str) -> Any:
    if kind in MODELS:
        return CONFIG_MAPPING[kind](**MODELS[kind])
    values = json.loads(architecture_key(CONFIG_MAPPING[kind](**SHRUNK[kind])))
    return CONFIG_MAPPING[kind](**{name: value for name, value in values.items() if name != "transformers_version"})


def saved(kind: str, path: Path) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(kind), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    return path


def batches_of() -> tuple[list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]]]:
    """Return three steps with each sample in a row of its own, and the same packed."""
    mask = torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None]
    padded = [batch_of(len(LENGTHS), LENGTH, seed, vocabulary=VOCABULARY) for seed in range(3)]
    padded = [batch | {"labels": batch["labels"].where(mask, -100), "attention_mask": mask.long()} for batch in padded]
    return padded, [packed(batch, LENGTHS, ROWS) for batch in padded]


@pytest.mark.parametrize(
    ("kind", "rows"),
    sampled([(kind, rows) for kind in (*MODELS, *SHRUNK) for rows in (1, 4)], [("mamba2", 4)]),
)
def test_packed_samples_are_trained_as_by_plain_pytorch_in_rows_of_their_own(kind: str, rows: int, tmp_path: Path) -> None:
    """With `rows` of the four in a micro-batch; of one micro-batch too the samples' gradients are summed in float32."""
    path = saved(kind, tmp_path / "model")
    alone, together = batches_of()
    plain = PlainTrainer(path, 0.0, 0.0, None)
    # Not AdamW: it makes full steps of what is rounding alone, such as gradients of routers that a hash overrules.
    plain.optimizer = torch.optim.SGD(plain.model.parameters(), lr=0.1)
    expected = [plain.step(batch)[0] for batch in alone]
    seen: list[bool] = []

    def inspect(engine: Engine) -> None:
        assert engine.plan is not None
        assert engine.plan.batch.micro_batch_sequences == rows
        seen.append(engine.plan.gradients.accumulate)

    losses, _ = short_run(
        path,
        tmp_path / "run",
        together,
        inspect=inspect,
        export=tmp_path / "out",
        adjust={
            "micro_batch_sequences": rows,
            "num_micro_batches": len(ROWS) // rows,
            "accumulate": lambda plan: plan.gradients.accumulate or rows < len(ROWS),
        },
        compute_dtype="float32",
        optimizer="sgd:momentum=0",
        learning_rate=0.1,
        weight_decay=0.0,
    )
    assert seen == [rows < len(ROWS) or kind != "glm_moe_dsa"]
    assert losses == pytest.approx(expected, rel=5e-6)
    before, ours = (AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32) for name in ("model", "out"))
    for (name, got), want, old in zip(ours.named_parameters(), plain.model.parameters(), before.parameters(), strict=True):
        assert (got - want).norm().item() <= 1e-3 * (want - old).norm().item() + 1e-6, name
