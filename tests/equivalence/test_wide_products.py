"""On a processor without products of 16-bit numbers: training is as near to float32 as with them, and places change no bit.

Both processors are feigned, so that this machine's own does not matter. Run: pytest tests/equivalence/test_wide_products.py
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import PlainTrainer, batch_of
from safetensors.torch import load_file

import headrace
from headrace.engine import Engine
from headrace.machine import CpuMachine
from headrace.plan.base import Plan

ROWS, LENGTH, STEPS = 4, 32, 3
PLACEMENTS: dict[str, dict[str, Any]] = {
    "one after the other": {"interpreter": "plain"},
    "few slots": {"adjust": {"host_slots": 2, "prefetch": 1, "state_slots": 1, "gradient_slots": 1, "resident_states": ()}},
    "all outputs kept": {"adjust": {"kept": lambda plan: tuple(tuple(range(len(names))) for names in plan.operators)}},
    "nothing kept or skipped": {"adjust": {"kept": ((),) * 4, "skipped": ((),) * 4}},
    "a device of its own": {"budget": headrace.Budget(host="4GiB", device="1GiB")},
}


def train(path: Path, run_directory: Path, **options: Any) -> tuple[Plan, list[float], dict[str, torch.Tensor]]:
    adjust = options.pop("adjust", {})

    def adjust_plan(plan: Plan) -> Plan:
        return dataclasses.replace(plan, **{name: value(plan) if callable(value) else value for name, value in adjust.items()})

    out = run_directory.parent / f"{run_directory.name}-out"
    with Engine.open(
        path,
        options.pop("budget", headrace.Budget(host="4GiB")),
        headrace.AdamW(lr=1e-3, weight_decay=0.1),
        run_directory=run_directory,
        tokens_per_step=ROWS * LENGTH,
        sequence_length=LENGTH,
        adjust_plan=adjust_plan,
        **options,
    ) as engine:
        losses = [engine.step(batch_of(ROWS, LENGTH, seed)).loss for seed in range(STEPS)]
        engine.save_pretrained(out)
        assert engine.plan is not None
        return engine.plan, losses, load_file(out / "model.safetensors")


def feign(monkeypatch: pytest.MonkeyPatch, multiplies: bool) -> None:
    monkeypatch.setattr(CpuMachine, "multiplies", lambda machine, dtype: multiplies)


@pytest.mark.parametrize("placement", list(PLACEMENTS))
def test_places_change_no_bit(
    placement: str, model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feign(monkeypatch, False)
    path = model_dir("llama", "bfloat16")
    plan, losses, weights = train(path, tmp_path / "as planned")
    assert any("computed in float32" in note for note in plan.notes)
    _, placed_losses, placed_weights = train(path, tmp_path / "placed", **PLACEMENTS[placement])
    assert placed_losses == losses
    assert all(torch.equal(placed_weights[name], value) for name, value in weights.items())


@pytest.mark.parametrize(("name", "dtype"), [("llama", "bfloat16"), ("llama", "float16"), ("mixtral-aux", "bfloat16")])
@pytest.mark.parametrize("multiplies", [True, False], ids=["with instructions", "without"])
def test_losses_are_those_of_float32(
    name: str, dtype: str, multiplies: bool, model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feign(monkeypatch, multiplies)
    path = model_dir(name, "bfloat16")
    plain = PlainTrainer(path, 1e-3, 0.1, None)
    expected = [plain.step(batch_of(ROWS, LENGTH, seed))[0] for seed in range(STEPS)]
    plan, losses, _ = train(path, tmp_path / "run", compute_dtype=dtype)
    assert losses == pytest.approx(expected, rel=3e-3)
    assert any("computed in float32" in note for note in plan.notes) is not multiplies


def test_compiled_blocks_multiply_as_the_compiler_does(
    model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feign(monkeypatch, False)
    plan, _, _ = train(model_dir("llama", "bfloat16"), tmp_path / "run", compile_blocks=True)
    assert not any("computed in float32" in note for note in plan.notes)
