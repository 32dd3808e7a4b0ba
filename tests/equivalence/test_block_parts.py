"""Frozen blocks that come in parts, module by module, give the bits of whole blocks, wherever things live."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import LENGTH, ROWS, SPLIT, batch_of, train
from plan_changes import changed
from tiers import sampled

import headrace
from headrace.engine.subject import Subject
from headrace.engine.trainer import Engine
from headrace.machine.cpu import CpuMachine
from headrace.model.streams.block_parts import PartSlots
from headrace.plan.value.plan import Plan
from headrace.terms.block_parts import BlockParts
from headrace.terms.errors import PlanInfeasible
from headrace.terms.sizes import PAGE_BYTES

STEPS = 2
DEVICE = {"device_memory": "1GiB"}
ONE_MICRO_BATCH = {"micro_batch_sequences": ROWS, "num_micro_batches": 1, "accumulate": False, "loss_chunk_tokens": LENGTH}
# What else may be planned or asked of a run whose blocks come in parts: changes of its plan, and options of both runs.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one micro-batch": (ONE_MICRO_BATCH, {}),
    "sums as a tree": (SPLIT, {"gradient_sum": "tree"}),
    "clipped, seldom a checkpoint": (SPLIT, {"max_grad_norm": 0.05, "checkpoint_every": 3, "steps": 4}),
    "updates on the device": (SPLIT | {"device_update_every": 2, "chunk_elements": 2048}, {}),
    "two accumulators, float16": (SPLIT | {"accumulators": 2}, {"compute_dtype": "float16"}),
    "float32, Muon": (SPLIT, {"compute_dtype": "float32", "optimizer": "muon"}),
    "LOMO": (SPLIT, {"optimizer": "lomo", "max_grad_norm": 0.5}),
    "some blocks": (SPLIT, {"train": "matrices"}),
}


def same(path: Path, tmp_path: Path, change: dict[str, Any], sums: dict[str, Any] = SPLIT, **options: Any) -> None:
    """Assert that a run with blocks in parts has the losses and the result of one with whole blocks and the same sums."""
    options = DEVICE | {"steps": STEPS, "compute_dtype": "bfloat16"} | options
    parts: list[BlockParts | None] = []
    whole = tmp_path / "whole"
    expected = train(path, whole, adjust=sums, inspect=lambda engine: parts.append(engine._subject.cuts()), **options)
    brought: list[int] = []
    own = PartSlots.bring

    def counting(slots: PartSlots, *given: Any) -> Any:
        brought.append(1)
        return own(slots, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PartSlots, "bring", counting)
        found = train(path, tmp_path / "cut", adjust=sums | {"parts": parts[0]} | change, **options)
    assert brought
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    assert all(torch.equal(found[1][name], expected[1][name]) for name in expected[1])


@pytest.mark.parametrize("interpreter", sampled(["lanes", "plain"]))
@pytest.mark.parametrize("name", sampled(("llama", "gemma3", "phi3", "gpt2-dropout", "mamba2", "deepseek"), ("llama", "phi3")))
def test_blocks_in_parts_train_as_whole_ones(
    name: str, interpreter: str, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    change = {} if interpreter == "lanes" else {"stash_tiers": lambda plan: ("ssd",) * plan.num_blocks, "stash_slots": 2}
    same(model_dir(name, "bfloat16"), tmp_path, change, adapter="lora:rank=4", **({"interpreter": "plain"} if change else {}))


@pytest.mark.wide
@pytest.mark.parametrize("adapter", ["dora:rank=4", pytest.param("lora:rank=4,dropout=0.25", marks=pytest.mark.deep)])
def test_what_reads_weights_beside_a_module_finds_them(adapter: str, model_dir: Callable[..., Path], tmp_path: Path) -> None:
    same(model_dir("gemma3", "bfloat16"), tmp_path, {"host_slots": 2, "prefetch": 1, "device_slots": 2}, adapter=adapter)


@pytest.mark.wide
@pytest.mark.parametrize("interpreter", ["lanes", "plain"])
@pytest.mark.parametrize("name", sampled(("llama", "gemma3", "phi3", "gpt2-dropout", "mamba2", "deepseek"), ("llama", "phi3")))
def test_trained_blocks_in_parts_have_the_weights_of_whole_ones(
    name: str, interpreter: str, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    change = {} if interpreter == "lanes" else {"stash_tiers": lambda plan: ("ssd",) * plan.num_blocks, "stash_slots": 2}
    same(model_dir(name, "bfloat16"), tmp_path, change, **({"interpreter": "plain"} if change else {}))


@pytest.mark.wide
@pytest.mark.parametrize("way", sampled(tuple(WAYS), ("one micro-batch", "sums as a tree", "clipped, seldom a checkpoint")))
def test_trained_blocks_in_parts_go_with(way: str, model_dir: Callable[..., Path], tmp_path: Path) -> None:
    sums, options = WAYS[way]
    same(model_dir("llama", "bfloat16"), tmp_path, {}, sums, **options)


@pytest.mark.wide
@pytest.mark.parametrize("adapter", ["lora:rank=4", None])
def test_a_block_without_room_comes_in_parts_also_in_a_run_that_goes_on(
    adapter: str | None, model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan takes what parts need, and a run in them has the losses of whole blocks: evaluated, closed, resumed."""
    monkeypatch.setattr(CpuMachine, "multiplies", lambda machine, dtype: False)  # working memory is that of any processor
    path, batches = model_dir("wide", "bfloat16"), [batch_of(2, LENGTH, seed) for seed in range(3)]
    more: dict[str, Any] = {"adapter": adapter, "tokens_per_step": 2 * LENGTH, "sequence_length": LENGTH}

    def asks(run: Path) -> int:
        with pytest.raises(PlanInfeasible) as refused:
            Engine.open(path, headrace.Options(output=run, device_memory="1MiB", **more))
        return refused.value.needed_bytes

    least = asks(tmp_path / "least")
    with monkeypatch.context() as patch:
        patch.setattr(Subject, "cuts", lambda subject: None)
        # Of three large matrices two have slots; those of attention take turns in these. A trained block's gradient leaves.
        block = 3 * 64 * 4096 + 64 * 2 * (64 + 32)
        gradient = 0 if adapter else 4 * (block + 2 * 64)
        spared = asks(tmp_path / "refused") - least
        assert abs(spared - 2 * (block - 2 * 64 * 4096) - gradient) < 4 * PAGE_BYTES  # buffers begin on pages
    found = []
    for memory, run in (("1GiB", tmp_path / "whole"), (f"{least}B", tmp_path / "cut")):
        with Engine.open(path, headrace.Options(output=run, device_memory=memory, **more), adjust_plan=of_one_row) as engine:
            plan = engine.plan
            assert plan is not None
            assert (plan.parts is not None) == (memory != "1GiB")
            assert any("blocks come in parts" in note for note in plan.results.notes) == (plan.parts is not None)
            said = [engine.step(batches[0]).loss, engine.evaluate(batches[2]).loss]
        with Engine.resume(run) as engine:
            said += [engine.step(batches[1]).loss, engine.evaluate(batches[2]).loss]
        found.append(said)
    assert found[0] == found[1]


def of_one_row(plan: Plan) -> Plan:
    """Return a plan whose sums are in the order of micro-batches of a row."""
    changes: dict[str, Any] = {
        "micro_batch_sequences": 1,
        "num_micro_batches": 2,
        "accumulate": True,
        "loss_chunk_tokens": LENGTH,
    }
    return changed(plan, **changes)
