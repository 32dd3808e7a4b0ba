"""SGD with momentum trains through every placement: the same bits wherever its planes lie, and plain PyTorch's numbers.

Each row differs from the base in several things at once, so that with few runs every pair of homes, order of updates, device
and interpreter is there.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import LENGTH, ROWS, SPLIT, PlainTrainer, batch_of, everything, train
from safetensors.torch import load_file
from tiers import sampled
from transformers import AutoModelForCausalLM

import headrace
from headrace.engine.trainer import Engine

SGD: dict[str, Any] = {
    "optimizer": "sgd:momentum=0.9,nesterov=true",
    "learning_rate": 1e-2,
    "weight_decay": 0.1,
}


PLACEMENTS: dict[str, dict[str, Any]] = {
    "states on SSD, small chunks, plain, clipped": {
        "adjust": {"chunk_elements": 2048, "resident_states": (), "host_slots": 2, "prefetch": 1, "state_slots": 1},
        "interpreter": "plain",
        "max_grad_norm": 0.5,
    },
    "states in memory, each second chunk on the device, clipped": {
        "adjust": {"resident_states": everything, "device_update_every": 2, "chunk_elements": 4096},
        "device_memory": "1GiB",
        "max_grad_norm": 0.5,
    },
    "speculative, some late, on the device, clipped": {
        "adjust": {"update_policy": "speculative", "late_units": (0, 2), "resident_states": (), "device_update_every": 1},
        "device_memory": "1GiB",
        "max_grad_norm": 0.5,
    },
    "states on SSD, at once": {"adjust": {"resident_states": (), "chunk_elements": 3 * 2048}, "max_grad_norm": None},
    "each third chunk on the device, late": {
        "adjust": {"late_units": (1, 2), "resident_states": (), "device_update_every": 3, "chunk_elements": 4096},
        "device_memory": "1GiB",
        "max_grad_norm": None,
    },
}


@pytest.mark.deep
def test_placement_changes_nothing(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    path, bases = model_dir("llama", "bfloat16"), {}
    for number, (placement, options) in enumerate(PLACEMENTS.items()):
        clip = options["max_grad_norm"]
        if clip not in bases:
            bases[clip] = train(path, tmp_path / f"base{number}", **SGD, max_grad_norm=clip, adjust=SPLIT)
        options = options | {"adjust": SPLIT | options["adjust"]}
        losses, weights = train(path, tmp_path / f"run{number}", **SGD, **options)
        assert losses == bases[clip][0], placement
        for key, want in bases[clip][1].items():
            assert torch.equal(weights[key], want), f"{placement}: {key} differs"
    assert bases[None][0] != bases[0.5][0], "nothing was clipped"


def test_it_is_plain_pytorch(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    """Five steps with clipping: losses, and weights at the end."""
    path = model_dir("llama")
    plain = PlainTrainer(path, 1e-2, 0.1, 0.5)
    options: dict[str, Any] = {"lr": 1e-2, "momentum": 0.9}
    groups = [{key: group[key] for key in ("params", "weight_decay")} for group in plain.optimizer.param_groups]
    plain.optimizer = torch.optim.SGD(groups, **options)
    expected = [plain.step(batch_of(ROWS, LENGTH, seed))[0] for seed in range(5)]
    given: dict[str, Any] = {**SGD, "optimizer": "sgd", "compute_dtype": "float32", "max_grad_norm": 0.5}
    losses, _ = train(path, tmp_path / "run", steps=5, export=tmp_path / "out", **given)
    assert losses == pytest.approx(expected, rel=2e-6)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    for (key, got), want in zip(ours.named_parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-6, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.wide
def test_a_resumed_run_goes_on_as_if_nothing_had_been(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    path, batches = model_dir("llama-tied", "bfloat16"), [batch_of(ROWS, LENGTH, seed) for seed in range(4)]
    losses, weights = train(path, tmp_path / "whole", steps=4, **SGD, max_grad_norm=0.5)
    lengths: dict[str, Any] = {"tokens_per_step": ROWS * LENGTH, "sequence_length": LENGTH, "host_memory": "4GiB"}
    with Engine.open(path, headrace.Options(**SGD, **lengths, output=tmp_path / "run", max_grad_norm=0.5)) as engine:
        got = [engine.step(batch).loss for batch in batches[:2]]
    with Engine.resume(tmp_path / "run") as engine:
        assert engine.plan is not None
        assert engine.plan.rule.name == "SGD with Nesterov's momentum"
        got += [engine.step(batch).loss for batch in batches[2:]]
        engine.save_pretrained(tmp_path / "out")
    assert got == losses
    for key, want in load_file(tmp_path / "out" / "model.safetensors").items():
        assert torch.equal(weights[key], want), f"{key} differs"


STATELESS = SGD | {"optimizer": "sgd:momentum=0"}


@pytest.mark.wide
@pytest.mark.parametrize("dtype", sampled(["float32", "bfloat16"], ["float32"]))
def test_a_rule_without_states_trains_through_every_placement(
    dtype: str, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    """In float32 there is nothing beside the weights: no family of states on the drives, nothing read or written of it."""
    path, options = model_dir("llama", dtype), STATELESS | {"compute_dtype": dtype, "max_grad_norm": 0.5}
    base, weights = train(path, tmp_path / "base", **options, adjust=SPLIT)
    plan = {"chunk_elements": 4096, "host_slots": 2, "prefetch": 1}
    for number, (adjust, more) in enumerate(
        [
            (plan | {"held_gradients": "ssd"}, {"interpreter": "plain"}),
            (plan | {"device_update_every": 2}, {"device_memory": "1GiB"}),
            (plan | {"update_policy": "speculative", "late_units": (0, 2)}, {}),
        ]
    ):
        losses, got = train(path, tmp_path / f"run{number}", **options | more, adjust=SPLIT | adjust)
        assert losses == base
        assert all(torch.equal(got[key], want) for key, want in weights.items())


@pytest.mark.wide
def test_a_rule_without_states_is_plain_pytorch_and_resumes(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    path = model_dir("llama")
    plain = PlainTrainer(path, 1e-2, 0.1, 0.5)
    groups = [{key: group[key] for key in ("params", "weight_decay")} for group in plain.optimizer.param_groups]
    plain.optimizer = torch.optim.SGD(groups, lr=1e-2)
    expected = [plain.step(batch_of(ROWS, LENGTH, seed))[0] for seed in range(4)]
    lengths: dict[str, Any] = {"tokens_per_step": ROWS * LENGTH, "sequence_length": LENGTH, "host_memory": "4GiB"}
    given = STATELESS | lengths | {"compute_dtype": "float32", "max_grad_norm": 0.5, "output": tmp_path / "run"}
    with Engine.open(path, headrace.Options(**given)) as engine:
        losses = [engine.step(batch_of(ROWS, LENGTH, seed)).loss for seed in range(2)]
        assert all(unit.family("states") is None for unit in engine.store.manifest.units)
    with Engine.resume(tmp_path / "run") as engine:
        losses += [engine.step(batch_of(ROWS, LENGTH, seed)).loss for seed in range(2, 4)]
        engine.save_pretrained(tmp_path / "out")
    assert losses == pytest.approx(expected, rel=2e-6)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    for (key, got), want in zip(ours.named_parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-6, msg=lambda text, key=key: f"{key}: {text}")
