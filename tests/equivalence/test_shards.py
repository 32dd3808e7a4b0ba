"""Ranks that share out every unit give the bits of one process under one plan and the tree sum, for any number of ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import LENGTH, SPLIT, batch_of
from ranks import ranks_run
from short_run import short_run

from headrace.plan.plan import Plan

STEPS = 3
SETTINGS: dict[str, dict[str, Any]] = {
    "adamw": {"model": "llama", "max_grad_norm": 0.5},
    "tied, immediate": {"model": "llama-tied"},
    "lora": {"model": "llama", "adapter": "lora:rank=4", "max_grad_norm": 0.5},
}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("setting", SETTINGS)
def test_ranks_give_the_bits_of_one_process(setting: str, size: int, model_dir: Callable[..., Path], tmp_path: Path) -> None:
    options = {"gradient_sum": "tree", **SETTINGS[setting]}
    path = model_dir(options.pop("model"), "bfloat16")
    batches, plans = [batch_of(8, LENGTH, seed) for seed in range(STEPS)], list[Plan]()
    split = {**SPLIT, "num_micro_batches": 4}
    losses, weights = short_run(
        path, tmp_path / "local", batches, adjust=split, inspect=lambda engine: plans.append(engine.plan), **options
    )
    found_losses, found = ranks_run(path, tmp_path / "ranks", batches, size, plan=plans[0], **options)
    assert found_losses == pytest.approx(losses, rel=1e-6)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
