"""Where host memory has no room for two blocks, they come one by one, with the bits of any other plan."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import LENGTH, SPLIT, batch_of, train
from tiers import sampled

import headrace
from headrace.engine.trainer import Engine
from headrace.plan.value.plan import Plan
from headrace.terms.errors import PlanInfeasible

ONE = {"host_slots": 1, "prefetch": 0}
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "at once": ({}, {}),
    "plain": ({"stash_tiers": lambda plan: ("ssd",) * plan.num_blocks, "stash_slots": 2}, {"interpreter": "plain"}),
    "late": ({"late_units": lambda plan: plan.trained_units, "held_gradients": "ssd"}, {"max_grad_norm": 0.5}),
    "seldom a checkpoint": ({}, {"max_grad_norm": 0.5, "checkpoint_every": 2}),
    "a device": ({"device_slots": 1}, {"device_memory": "1GiB"}),
    "adapters": ({}, {"adapter": "lora:rank=4"}),
    "LOMO": ({}, {"optimizer": "lomo", "max_grad_norm": 0.5}),
}


@pytest.mark.parametrize("way", sampled(WAYS, ("at once", "late")))
def test_blocks_come_one_by_one(way: str, model_dir: Callable[..., Path], tmp_path: Path) -> None:
    change, options = WAYS[way]
    path = model_dir("llama", "bfloat16")
    expected = train(path, tmp_path / "two", adjust=SPLIT, **options)
    plans: list[Plan | None] = []
    found = train(
        path, tmp_path / "one", adjust=SPLIT | change | ONE, inspect=lambda engine: plans.append(engine.plan), **options
    )
    assert plans[0] is not None
    assert plans[0].host_slots == 1
    assert found[0] == expected[0]
    assert all(torch.equal(found[1][name], expected[1][name]) for name in expected[1])


@pytest.mark.wide
def test_memory_for_one_block_is_enough(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    path = model_dir("wide", "bfloat16")
    more: dict[str, Any] = {"tokens_per_step": LENGTH, "sequence_length": LENGTH}
    memory = 1
    for _ in range(8):  # what the interpreter holds differs a little between two openings
        try:
            engine = Engine.open(path, headrace.Options(output=tmp_path / "run", host_memory=memory, **more))
            break
        except PlanInfeasible as refused:
            memory = refused.needed_bytes + (1 << 20)
    with engine:
        plan = engine.plan
        assert plan is not None
        assert plan.host_slots == 1
        assert any("one block at a time is in memory" in note for note in plan.results.notes)
        losses = [engine.step(batch_of(1, LENGTH, seed)).loss for seed in range(2)]
        assert engine.evaluate(batch_of(1, LENGTH, 9)).loss > 0
    with Engine.open(path, headrace.Options(output=tmp_path / "roomy", host_memory="2GiB", **more)) as engine:
        assert [engine.step(batch_of(1, LENGTH, seed)).loss for seed in range(2)] == losses
