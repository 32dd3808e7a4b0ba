"""Models for which a padded length decides numbers: each packed sample is trained as a fresh model trains it, by itself.

Run: pytest tests/equivalence/test_sample_lengths.py
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain import LENGTH, SHAPE, batch_of, packed
from short_run import short_run
from tiers import sampled
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import headrace
from headrace.engine.trainer import Engine
from headrace.model.blocks.sample_groups import sample_groups_of
from headrace.model.trials.probe import probe
from headrace.terms.errors import RunDirectoryError
from headrace.terms.events import Event, StepResult

# Samples on both sides of so many tokens, which a group of about one length would pad together.
EDGE = 12
LENGTHS = (LENGTH, 13, 11, 8, 12, 10, 10)
ROWS = ((0,), (1, 2, 3), (4, 5, 6))
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "long_factor": [4.0 + index for index in range(8)],
    "short_factor": [1.0] * 8,
    "original_max_position_embeddings": EDGE,
}
DYNAMIC = {"max_position_embeddings": EDGE, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("phi3", {"original_max_position_embeddings": EDGE, "pad_token_id": 0, "rope_parameters": LONG}),
    "phimoe": (
        "phimoe",
        {
            **EXPERTS,
            "router_jitter_noise": 0.0,
            "input_jitter_noise": 0.0,
            "original_max_position_embeddings": EDGE,
            "rope_parameters": {**LONG, "short_mscale": 1.0, "long_mscale": 1.0},
        },
    ),
    "dynamic": ("llama", DYNAMIC),
    "minimax": ("minimax", {**EXPERTS, "head_dim": 16, "block_size": 8}),
}


def saved(name: str, path: Path) -> Path:
    kind, values = MODELS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**SHAPE, **values}), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(path)
    return path


def alone(path: Path, batch: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Return loss and norm of the gradient, with each sample in a fresh model."""
    trained = sum(int((batch["labels"][row, 1:length] != -100).sum()) for row, length in enumerate(LENGTHS))
    loss, total = 0.0, dict[str, torch.Tensor]()
    for row, length in enumerate(LENGTHS):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        logits = model(input_ids=batch["input_ids"][row : row + 1, :length]).logits[0, :-1]
        part = torch.nn.functional.cross_entropy(logits, batch["labels"][row, 1:length], reduction="sum") / trained
        part.backward()
        loss += part.item()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                total[name] = total.get(name, 0) + parameter.grad.double()
    return loss, torch.stack([gradient.norm() for gradient in total.values()]).norm().item()


@pytest.mark.parametrize(("name", "rows"), sampled([(n, r) for n in MODELS for r in (1, 3)], [("phi3", 3), ("dynamic", 3)]))
def test_a_packed_sample_is_trained_as_by_itself(name: str, rows: int, tmp_path: Path) -> None:
    path, batch = saved(name, tmp_path / "model"), batch_of(len(LENGTHS), LENGTH, 0)
    events: list[Event] = []
    losses, _ = short_run(
        path,
        tmp_path / "run",
        [packed(batch, LENGTHS, ROWS)],
        sink=events.append,
        adjust={"micro_batch_sequences": rows, "num_micro_batches": 3 // rows, "accumulate": True},
        compute_dtype="float32",
        max_grad_norm=1e9,
    )
    loss, norm = alone(path, batch)
    assert losses[0] == pytest.approx(loss, rel=2e-6)
    assert [event.grad_norm for event in events if isinstance(event, StepResult)] == [pytest.approx(norm, rel=2e-6)]


@pytest.mark.parametrize(
    ("kind", "values", "exact"),
    [
        ("phi3", {}, False),
        (
            "phi3",
            {"original_max_position_embeddings": 4096, "rope_parameters": {**LONG, "original_max_position_embeddings": 4096}},
            True,
        ),
        ("llama", {**DYNAMIC, "max_position_embeddings": 4096}, True),
        ("mamba", {}, False),
        ("qwen3_next", {"num_experts": 4}, False),
    ],
)
def test_only_where_it_decides_numbers_groups_are_of_one_length(kind: str, values: dict[str, Any], exact: bool) -> None:
    traits = probe(CONFIG_MAPPING[kind](**(values and {**SHAPE, **values})))
    assert traits.by_exact_lengths == exact
    if exact:
        assert (traits.packing_limit, traits.samples_from) == (4096, 4096)  # shorter rows are packed as ever


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12), rows=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_exact_groups_hold_samples_of_one_length_and_every_position_once(lengths: list[int], rows: int) -> None:
    positions = torch.cat([torch.arange(length) for length in (*lengths, 1)]).repeat(rows, 1)
    groups = sample_groups_of(positions, exact=True)
    assert all(bool(group.real.all()) for group in groups)
    places = torch.cat([group.places.flatten() for group in groups]).sort().values
    assert torch.equal(places, torch.arange(positions.numel()))


@pytest.mark.wide
def test_a_run_begun_with_other_groups_says_so_at_resume(tmp_path: Path) -> None:
    path, batch = saved("phi3", tmp_path / "model"), packed(batch_of(len(LENGTHS), LENGTH, 0), LENGTHS, ROWS)
    options = headrace.Options(output=tmp_path / "run", tokens_per_step=3 * LENGTH, sequence_length=LENGTH, host_memory="4GiB")
    with Engine.open(path, options) as engine:
        engine.step(batch)
    with Engine.resume(tmp_path / "run") as engine:
        engine.step(batch)
    manifest = tmp_path / "run" / "state.json"
    values = json.loads(manifest.read_text())
    del values["identity"]["groups"]
    manifest.write_text(json.dumps(values))
    with pytest.raises(RunDirectoryError, match="padded samples of similar length together"):
        Engine.resume(tmp_path / "run")
    # Rows in which nothing was grouped are gone on with.
    short = dataclasses.replace(options, output=tmp_path / "short", sequence_length=8, tokens_per_step=3 * 8)
    with Engine.open(path, short) as engine:
        engine.step({"input_ids": batch["input_ids"][:, :8], "labels": batch["labels"][:, :8]})
    values = json.loads((tmp_path / "short" / "state.json").read_text())
    assert "groups" not in values["identity"]
    Engine.resume(tmp_path / "short").close()
