"""`--train matrices`: against plain PyTorch with the same parameters frozen; cut short; wherever planes live."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import LENGTH, ROWS, SPLIT, batch_of, train
from plan_changes import changed
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import headrace
from headrace.engine.trainer import Engine
from headrace.terms.families import STATES
from headrace.terms.options.optimizer import is_matrix

LR, DECAY = 1e-2, 0.1
OPTIONS: dict[str, Any] = {"learning_rate": LR, "weight_decay": DECAY, "max_grad_norm": 0.5, "train": "matrices"}


def is_trained(name: str, dimensions: int) -> bool:
    return (".layers." in name or ".h." in name) and is_matrix(name, dimensions)


def plain(path: Path, steps: int, out: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses and weights of stock transformers and `torch.optim.AdamW` with all else frozen."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_trained(name, parameter.dim()))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=DECAY, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for seed in range(steps):
        optimizer.zero_grad()
        loss = model(**batch_of(ROWS, LENGTH, seed)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
        losses.append(loss.item())
    model.save_pretrained(out)
    return losses, load_file(out / "model.safetensors")


@pytest.mark.parametrize(
    "model", ["llama-tied", *(pytest.param(each, marks=pytest.mark.deep) for each in ("llama", "gpt2-dropout", "mixtral-aux"))]
)
def test_plain_pytorch_with_all_else_frozen_gives_the_same(model: str, model_dir: Callable[..., Path], tmp_path: Path) -> None:
    """Tied embeddings, biases beside matrices, stacks of experts; the norm is that of what is trained."""
    path = model_dir(model)
    losses, weights = train(path, tmp_path / "run", steps=4, compute_dtype="float32", adjust=SPLIT, **OPTIONS)
    stored = load_file(path / "model.safetensors")
    for name, tensor in weights.items():
        changed = not torch.equal(tensor, stored[name])
        assert changed == is_trained(name, 3 if "experts" in name else tensor.dim()), name
    if model == "gpt2-dropout":  # other random numbers than plain PyTorch's
        return
    expected, reference = plain(path, 4, tmp_path / "plain")
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, reference[name], rtol=1e-3, atol=2e-4, msg=lambda text, name=name: f"{name}: {text}")


PLACED: dict[str, Any] = {
    "adjust": {"update_policy": "deferred", "late_units": lambda plan: plan.trained_units, "host_slots": 4}
    | {"resident_states": lambda plan: plan.trained_units},
    "device_memory": "1GiB",
}


@pytest.mark.deep
@pytest.mark.parametrize("gradient", ["lsp:dimension=32,nonzeros=4,check=2,alpha=0.1", "dense"])
def test_killed_it_goes_on_and_placement_changes_nothing(gradient: str, model_dir: Callable[..., Path], tmp_path: Path) -> None:
    path = model_dir("llama-tied", "bfloat16")
    common: dict[str, Any] = {**OPTIONS, "gradient": gradient, "steps": 4}
    losses, weights = train(path, tmp_path / "base", adjust=SPLIT, **common)
    placed = dict(PLACED)
    again, other = train(path, tmp_path / "other", adjust=SPLIT | placed.pop("adjust"), **common, **placed)
    assert again == losses
    stored = load_file(path / "model.safetensors")
    for name, want in weights.items():
        assert torch.equal(other[name], want), f"{name} differs"
        assert torch.equal(want, stored[name]) == (not is_trained(name, want.dim())), name
    assert common.pop("steps") == 4
    given = {"host_memory": "4GiB", "tokens_per_step": ROWS * LENGTH, "sequence_length": LENGTH} | common
    options = headrace.Options(output=tmp_path / "run", **given)
    engine = Engine.open(path, options, adjust_plan=lambda plan: changed(plan, **SPLIT))
    assert engine.store.manifest.units[0].family(STATES) is None
    for seed in range(2):
        engine.step(batch_of(ROWS, LENGTH, seed))
    engine.flush()
    engine._shut_down()
    engine._closers.close()  # without a commit, as a killed process
    with Engine.resume(tmp_path / "run") as engine:
        assert engine.options.train == "matrices"
        assert [engine.step(batch_of(ROWS, LENGTH, seed)).loss for seed in range(2, 4)] == losses[2:]
        engine.save_pretrained(tmp_path / "out")
    for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items():
        assert torch.equal(tensor, weights[name]), name
