"""Ranks that share out every unit give the bits of one process under one plan and the tree sum, for any number of ranks."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import LENGTH, SPLIT, batch_of
from ranks import ranks_run
from short_run import short_run
from tiers import sampled

from headrace.engine.trainer import Engine
from headrace.flow.step.step import HANDLERS
from headrace.flow.step.step_state import StepState
from headrace.plan.value.plan import Plan
from headrace.terms.program import Op, Verb

STEPS = 3
SETTINGS: dict[str, dict[str, Any]] = (
    {
        "adamw": {"model": "llama", "max_grad_norm": 0.5},
        "tied, immediate": {"model": "llama-tied"},
        "lora": {"model": "llama", "adapter": "lora:rank=4", "max_grad_norm": 0.5},
        "dora": {"model": "llama", "adapter": "dora:rank=4"},
        "table": {"model": "llama", "adapter": "table:rows=36,layers=1+3,top=5,policy=dense", "max_grad_norm": 0.5},
        "a device of its own": {"model": "llama-tied", "max_grad_norm": 0.5, "device_memory": "1GiB"},
        "float16": {"model": "llama", "compute_dtype": "float16"},
        "float32": {"model": "llama", "compute_dtype": "float32", "max_grad_norm": 0.5},
        "plain": {"model": "llama", "max_grad_norm": 0.5, "interpreter": "plain"},
        "seldom": {"model": "llama", "max_grad_norm": 0.5, "checkpoint_every": 2},
    }
    | {
        rule: {"model": "llama", "optimizer": rule, "max_grad_norm": 0.5}
        for rule in ("adamw:moments=bfloat16", "adamw:moments=int8", "sgd:momentum=0.9", "lion", "lomo", "lomo:master=none")
    }
    | {rule: {"model": "llama", "optimizer": rule} for rule in ("adafactor", "adalomo", "muon")}
)
ALL_SIZES = ("adamw", "tied, immediate", "lora")
CASES = [(setting, size) for setting in SETTINGS for size in ((1, 2, 3, 4) if setting in ALL_SIZES else (3,))]


@pytest.mark.parametrize(("setting", "size"), sampled(CASES, [("adamw", 2)]))
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


# Ranks by machine: those of one machine have a host copy together.
MACHINES: dict[str, tuple[tuple[int, ...], ...]] = {
    "one": ((0, 1),),
    "one of three": ((0, 1, 2),),
    "two": ((0, 1), (2, 3)),
    "unlike": ((0, 1, 2), (3,)),
}
SHARED_CASES = [(setting, machines) for setting in SETTINGS for machines in (MACHINES if setting in ALL_SIZES else ("one",))]


@pytest.mark.wide
@pytest.mark.parametrize(("setting", "machines"), sampled(SHARED_CASES, [("lora", "unlike")]))
def test_ranks_of_a_machine_give_the_same_bits_with_one_host_copy(
    setting: str, machines: str, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    options, size = {"gradient_sum": "tree", **SETTINGS[setting]}, sum(map(len, MACHINES[machines]))
    path = model_dir(options.pop("model"), "bfloat16")
    *batches, last = [batch_of(8, LENGTH, seed) for seed in range(STEPS)]
    plans, scores = list[Plan](), list[float]()

    def go_on(engine: Engine) -> None:
        plans.append(engine.plan)
        scores.append(engine.evaluate(batches[0]).loss)
        engine.step(last)

    def look(engine: Engine) -> None:
        shares = {rank: len(each) for each in MACHINES[machines] for rank in each}
        assert engine._subject.seams.fleet.copy.sharers == shares[0]
        assert engine._subject.seams.fleet.copy.resident_bytes > 0
        go_on(engine)

    split = {**SPLIT, "num_micro_batches": 4}
    _, weights = short_run(path, tmp_path / "local", batches, adjust=split, inspect=go_on, **options)
    given: dict[str, Any] = {"machines": MACHINES[machines], "plan": plans[0], "drive": look}
    _, found = ranks_run(path, tmp_path / "ranks", batches, size, **given, **options)
    assert scores[1] == pytest.approx(scores[0], rel=1e-6)
    assert all(torch.equal(found[name], weights[name]) for name in weights)


@pytest.mark.wide
@pytest.mark.parametrize("policy", sampled(["immediate", "deferred"], ["immediate"]))
def test_a_slow_rank_finds_what_it_computes_with_in_the_host_copy(
    policy: str, model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two slots the next block is read where the last one lay, as soon as a rank that does not wait has done with it."""
    path, batches = model_dir("llama", "bfloat16"), [batch_of(8, LENGTH, seed) for seed in range(STEPS)]
    options: dict[str, Any] = {"gradient_sum": "tree", **({"max_grad_norm": 0.5} if policy == "deferred" else {})}
    split = {**SPLIT, "num_micro_batches": 4}
    plans = list[Plan]()
    _, weights = short_run(
        path, tmp_path / "local", batches, adjust=split, inspect=lambda engine: plans.append(engine.plan), **options
    )
    for verb in (Verb.FORWARD, Verb.BACKWARD):
        monkeypatch.setitem(HANDLERS, verb, slowed(HANDLERS[verb]))
    adjust = {"host_slots": 2, "prefetch": 1, "resident_states": ()}
    _, found = ranks_run(path, tmp_path / "ranks", batches, 2, machines=((0, 1),), plan=plans[0], adjust=adjust, **options)
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def slowed(handler: Any) -> Callable[[StepState, Op], None]:
    """Return a handler that takes its time on a rank that changes from step to step."""

    def slow(state: StepState, op: Op) -> None:
        if state.parts.peers is not None and state.parts.peers.rank == state.verdict.step % 2:
            time.sleep(0.03)
        handler(state, op)

    return slow
