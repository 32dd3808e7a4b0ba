"""Models whose code does what few do: writes into what operators return, goes another way with a graph, keeps tables of a run.

Run: pytest tests/equivalence/test_unusual_models.py
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import LENGTH, ROWS, PlainTrainer, batch_of
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import headrace
from headrace.engine import Engine
from headrace.spec.events import Event, Notice

SHAPE = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LONG_ROWS = {
    "original_max_position_embeddings": LENGTH // 2,
    "pad_token_id": 0,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "long_factor": [4.0 + index for index in range(8)],
        "short_factor": [1.0] * 8,
        "original_max_position_embeddings": LENGTH // 2,
    },
}
UNUSUAL: dict[str, tuple[str, dict[str, Any]]] = {
    "clips queries, keys and values in place": ("olmo", {"clip_qkv": 0.3}),
    "adds biases of experts in place": (
        "gpt_oss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "layer_types": ["full_attention"] * 3},
    ),
    "attends by other operators with a graph": ("doge", {}),
    "has another rotary table for long rows": ("phi3", LONG_ROWS),
}


@pytest.mark.parametrize("kept", ["planned", "everything"])
@pytest.mark.parametrize("name", UNUSUAL)
def test_it_trains_as_with_plain_pytorch(name: str, kept: str, tmp_path: Path) -> None:
    kind, values = UNUSUAL[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**SHAPE, **values), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():  # small first values hide what is wrong
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path / "model")
    plain = PlainTrainer(tmp_path / "model", 1e-3, 0.0, None)
    expected = [plain.step(batch_of(ROWS, LENGTH, seed)) for seed in range(2)]

    def everything(plan: Any) -> Any:
        return dataclasses.replace(plan, kept=tuple(tuple(range(len(names))) for names in plan.operators))

    said: list[Event] = []
    with Engine.open(
        tmp_path / "model",
        headrace.Budget(host="4GiB"),
        headrace.AdamW(lr=1e-3),
        run_directory=tmp_path / "run",
        compute_dtype="float32",
        tokens_per_step=ROWS * LENGTH,
        sequence_length=LENGTH,
        adjust_plan=everything if kept == "everything" else None,
        sink=said.append,
    ) as engine:
        got = [engine.step(batch_of(ROWS, LENGTH, seed)) for seed in range(2)]
    assert [step.loss for step in got] == pytest.approx([loss for loss, _ in expected], rel=5e-6)
    assert [step.grad_norm for step in got] == pytest.approx([norm for _, norm in expected], rel=1e-5)
    told = [event.text for event in said if isinstance(event, Notice) and event.text.startswith("replay:")]
    assert len(told) == (kept == "everything" and kind == "doge")
