"""Models whose code does what few do: writes into what operators return, goes another way with a graph, keeps tables of a run.

Run: pytest tests/equivalence/test_unusual_models.py
"""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import LENGTH, ROWS, PlainTrainer, batch_of
from plan_changes import changed
from tiers import sampled
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from versions import CAUSAL_DOGE, LONG_ROPE_IN_A_PLAN

import headrace
from headrace.engine.trainer import Engine
from headrace.plan.value.plan import Plan
from headrace.terms.events import Event, Notice

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
    "has a rotary table that grows with the row": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}},
    ),
}


NEWER = {"doge": CAUSAL_DOGE, "phi3": LONG_ROPE_IN_A_PLAN}

# Models whose rows have one sample each, so that these are padded.
UNPACKED: dict[str, dict[str, Any]] = {"opt": {"dropout": 0.0, "ffn_dim": 96, "word_embed_proj_dim": 64}, "falcon": {}}


def saved(kind: str, values: dict[str, Any], path: Path) -> Path:
    """Save a model with weights far from their first values: small ones hide what is wrong."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**SHAPE, **values), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    return path


def recomputing_everything(plan: Plan) -> Plan:
    return changed(plan, kept=tuple(() for _ in plan.stash.operators))


def keeping_everything(plan: Plan) -> Plan:
    return changed(plan, kept=tuple(tuple(range(len(names))) for names in plan.stash.operators))


def for_other_operators(plan: Plan) -> Plan:
    """As if planned where a mask makes a block run others."""
    return changed(keeping_everything(plan), operators=tuple((*names[:-1], "other") for names in plan.stash.operators))


def trained(
    model: Path, run: Path, batches: list[dict[str, torch.Tensor]], adjust: Callable[[Plan], Plan] | None
) -> tuple[list[tuple[float, float]], list[str]]:
    """Return losses and norms of two steps of the engine, and what it said of replay."""
    said: list[Event] = []
    with Engine.open(
        model,
        headrace.Options(
            host_memory="4GiB",
            learning_rate=1e-3,
            output=run,
            max_grad_norm=None,
            compute_dtype="float32",
            tokens_per_step=ROWS * LENGTH,
            sequence_length=LENGTH,
        ),
        adjust_plan=adjust,
        sink=said.append,
    ) as engine:
        steps = [engine.step(batch) for batch in batches]
    told = [event.text for event in said if isinstance(event, Notice) and event.text.startswith("replay:")]
    return [(step.loss, step.grad_norm) for step in steps], told


def assert_as_plain(got: list[tuple[float, float]], model: Path, batches: list[dict[str, torch.Tensor]]) -> None:
    plain = PlainTrainer(model, 1e-3, 0.0, None)
    expected = [plain.step(batch) for batch in batches]
    assert [loss for loss, _ in got] == pytest.approx([loss for loss, _ in expected], rel=5e-6)
    assert [norm for _, norm in got] == pytest.approx([norm for _, norm in expected], rel=1e-5)


@pytest.mark.wide
@pytest.mark.parametrize("kept", sampled(["planned", "everything"], ["everything"]))
@pytest.mark.parametrize("name", [pytest.param(name, marks=NEWER.get(UNUSUAL[name][0], ())) for name in UNUSUAL])
def test_it_trains_as_with_plain_pytorch(name: str, kept: str, tmp_path: Path) -> None:
    kind, values = UNUSUAL[name]
    model = saved(kind, values, tmp_path / "model")
    batches = [batch_of(ROWS, LENGTH, seed) for seed in range(2)]
    got, told = trained(model, tmp_path / "run", batches, keeping_everything if kept == "everything" else None)
    assert_as_plain(got, model, batches)
    assert len(told) == (kept == "everything" and kind == "doge")


@pytest.mark.wide
@pytest.mark.parametrize(
    ("kind", "padded"), sampled(itertools.product(UNPACKED, [True, False]), [("opt", True), ("falcon", False)])
)
def test_models_that_cannot_pack_replay_with_masks_and_without(kind: str, padded: bool, tmp_path: Path) -> None:
    """A plan counts on masks. Where operators are others than planned, nothing is kept, and it trains all the same."""
    model = saved(kind, UNPACKED[kind], tmp_path / "model")
    batches = [batch_of(ROWS, LENGTH, seed, padded=padded) for seed in range(2)]
    recomputed, told = trained(model, tmp_path / "recomputed", batches, recomputing_everything)
    assert not told
    assert_as_plain(recomputed, model, batches)
    for adjust in (keeping_everything, for_other_operators):
        got, told = trained(model, tmp_path / adjust.__name__, batches, adjust)
        assert got == recomputed
        assert len(told) == (adjust is for_other_operators)
