"""A node and one worker give the bits of one machine under the same plan, whatever the policy, the tiers and the model."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import crew, node_options, node_run, weights_of
from plain import LENGTH, ROWS, SPLIT, batch_of
from short_run import short_run
from tiers import sampled

from headrace.engine.seams import Seams
from headrace.engine.trainer import Engine
from headrace.peers.node.node import NodeEngine
from headrace.plan.value.plan import Plan
from headrace.terms.errors import PlanInfeasible
from headrace.terms.events import Event, Planned
from headrace.terms.sizes import MIB

STEPS = 3
LEAST = "as little as a plan can do with"  # libraries take most of it, and more from release to release
SETTINGS: dict[str, dict[str, Any]] = {
    "immediate": {"model": "llama"},
    "deferred": {"model": "llama-tied", "max_grad_norm": 0.5},
    "deferred, gradients on the drives": {"model": "llama", "max_grad_norm": 0.5, "host_memory": LEAST},
    "deferred, a device of its own": {"model": "llama", "max_grad_norm": 0.5, "worker": {"device_memory": "1GiB"}},
    "dropout": {"model": "gpt2-dropout"},
    "router losses": {"model": "mixtral-aux", "max_grad_norm": 1.0},
    "float16": {"model": "llama", "compute_dtype": "float16"},
    "float32, sgd": {"model": "llama", "compute_dtype": "float32", "optimizer": "sgd:momentum=0.9"},
    "rows of factors": {"model": "llama", "optimizer": "adafactor"},
    "matrices, as they come": {"model": "llama", "optimizer": "adalomo", "max_grad_norm": None},
    "nothing kept": {"model": "llama", "optimizer": "lomo", "max_grad_norm": 0.5},
    "products of matrices": {"model": "llama", "optimizer": "muon", "max_grad_norm": 0.5},
    "plain": {"model": "llama", "max_grad_norm": 0.5, "interpreter": "plain"},
}

QUICK = ("deferred, a device of its own",)


@pytest.mark.parametrize("setting", sampled(SETTINGS, QUICK))
def test_one_worker_gives_the_bits_of_one_machine(setting: str, model_dir: Callable[..., Path], tmp_path: Path) -> None:
    options = dict(SETTINGS[setting])
    path, own = model_dir(options.pop("model"), "bfloat16"), options.pop("worker", {})
    batches, plans = [batch_of(ROWS, LENGTH, seed) for seed in range(STEPS)], list[Plan]()
    local = {name: value for name, value in options.items() if name != "host_memory"}

    losses, weights = short_run(
        path, tmp_path / "local", batches, adjust=SPLIT, inspect=lambda engine: plans.append(engine.plan), **local | own
    )
    if options.get("host_memory") == LEAST:
        with crew(**own) as made, pytest.raises(PlanInfeasible) as refusal:
            node_run(path, tmp_path / "refused", batches, made, plan=plans[0], **options | {"host_memory": "1MiB"})
        options["host_memory"] = refusal.value.needed_bytes + MIB
    with crew(**own) as made:
        found_losses, found = node_run(path, tmp_path / "node", batches, made, plan=plans[0], **options)
    assert found_losses == losses
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)


@pytest.mark.wide
@pytest.mark.parametrize("workers", sampled([2, 3], (2,)))
def test_workers_with_a_micro_batch_each_give_the_bits_of_one_machine(
    workers: int, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    """One machine adds micro-batches one after the other, in fp32; workers are added in the order of their ranks."""
    path, rows = model_dir("llama"), 2
    batches, plans = [batch_of(workers * rows, LENGTH, seed) for seed in range(STEPS)], list[Plan]()
    how = {"max_grad_norm": 0.5, "compute_dtype": "float32"}
    split = {**SPLIT, "num_micro_batches": workers, "loss_chunk_tokens": rows * LENGTH}
    losses, weights = short_run(
        path,
        tmp_path / "local",
        batches,
        adjust=split,
        inspect=lambda engine: plans.append(engine.plan),
        **how,
    )
    with crew(workers) as made:
        found_losses, found = node_run(path, tmp_path / "node", batches, made, plan=plans[0], **how)
    assert found_losses == losses
    assert all(torch.equal(found[name], weights[name]) for name in weights)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "workers"), sampled(itertools.product(("llama", "llama-tied"), (1, 2, 3, 4)), [("llama", 1), ("llama-tied", 2)])
)
def test_under_a_tree_any_number_of_workers_gives_the_same_bits(
    name: str, workers: int, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    path, plans = model_dir(name), list[Plan]()
    batches = [batch_of(10, LENGTH, seed) for seed in range(STEPS)]
    # In float32, where another order of additions shows.
    alike = {"max_grad_norm": 0.5, "compute_dtype": "float32"}
    how = {**alike, "gradient_sum": "tree"}
    split = {**SPLIT, "num_micro_batches": 5}
    _, weights = short_run(
        path, tmp_path / "local", batches, adjust=split, inspect=lambda engine: plans.append(engine.plan), **how
    )
    if workers == 1:  # and the sum is that of all micro-batches: but for rounding, the usual one
        _, usual = short_run(path, tmp_path / "usual", batches, adjust=split, **alike)
        assert any(not torch.equal(usual[name], weights[name]) for name in weights), "it is another order"
        assert all(torch.allclose(usual[name], weights[name], rtol=1e-3, atol=1e-4) for name in weights)
    with crew(workers) as made:
        _, found = node_run(path, tmp_path / "node", batches, made, plan=plans[0], **how)
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_one_machine_takes_its_sums_in_the_groups_of_a_node_s_plan(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    """What two workers have agreed upon is in the node's plan; a machine alone would take all rows together."""
    path, told = model_dir("llama-tied"), list[Event]()
    batches = [batch_of(8, LENGTH, seed) for seed in range(2)]
    how = {"max_grad_norm": 0.5, "compute_dtype": "float32", "gradient_sum": "tree"}
    with crew(2) as made:
        _, weights = node_run(path, tmp_path / "node", batches, made, sink=told.append, **how)
    agreed = [event.plan for event in told if isinstance(event, Planned)][-1]
    assert agreed.serves
    with Engine.open(path, node_options(tmp_path / "alone", batches, **how), plan=Plan.from_json(agreed.to_json())) as engine:
        for batch in batches:
            engine.step(batch)
        assert engine.plan is not None
        assert engine.plan.num_micro_batches == agreed.num_micro_batches > 1
        engine.save_pretrained(tmp_path / "out")
    found = weights_of(tmp_path / "out")
    assert all(torch.equal(found[name], weights[name]) for name in weights)


@pytest.mark.wide
@pytest.mark.parametrize("workers", sampled([((2, 1),), ((1, 3, 2),)], [((2, 1),)]), ids=str)
def test_under_a_tree_a_run_goes_on_with_fewer_or_more_workers(
    workers: tuple[int, ...], model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    path, plans = model_dir("llama"), list[Plan]()
    batches = [batch_of(6, LENGTH, seed) for seed in range(len(workers))]
    how = {"max_grad_norm": 0.5, "compute_dtype": "float32", "gradient_sum": "tree"}
    split = {**SPLIT, "num_micro_batches": 3}
    losses, weights = short_run(
        path, tmp_path / "local", batches, adjust=split, inspect=lambda engine: plans.append(engine.plan), **how
    )
    found_losses = []
    for number, batch in zip(workers, batches, strict=True):
        with crew(number) as made:
            seams = Seams(workers=made.crowd)
            if not found_losses:
                engine = NodeEngine.open(path, node_options(tmp_path / "node", batches, **how), plan=plans[0], seams=seams)
            else:
                engine = NodeEngine.resume(tmp_path / "node", seams=seams)
            with engine:
                found_losses.append(engine.step(batch).loss)
                engine.save_pretrained(out := tmp_path / f"out-{len(found_losses)}")
    found = weights_of(out)
    assert found_losses == pytest.approx(losses, rel=1e-6), "sums of losses are added worker by worker"
    assert all(torch.equal(found[name], weights[name]) for name in weights)
