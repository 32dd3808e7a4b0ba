"""Frozen blocks that come in parts, module by module, give the bits of whole blocks, wherever things live."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import LENGTH, SPLIT, batch_of, train
from tiers import sampled

import headrace
from headrace.engine.subject import Subject
from headrace.engine.trainer import Engine
from headrace.model.block_parts import PartSlots
from headrace.plan.plan import Plan
from headrace.terms.block_parts import BlockParts
from headrace.terms.errors import PlanInfeasible

STEPS = 2
DEVICE = {"device_memory": "1GiB"}


def same(path: Path, tmp_path: Path, adapter: str, change: dict[str, Any], **options: Any) -> None:
    """Assert that a run with blocks in parts has the losses and adapters of one with whole blocks."""
    options = DEVICE | {"steps": STEPS, "adapter": adapter, "compute_dtype": "bfloat16"} | options
    parts: list[BlockParts | None] = []
    whole = tmp_path / "whole"
    expected = train(path, whole, adjust=SPLIT, inspect=lambda engine: parts.append(engine._subject.cuts()), **options)
    brought: list[int] = []
    own = PartSlots.bring

    def counting(slots: PartSlots, *given: Any) -> Any:
        brought.append(1)
        return own(slots, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PartSlots, "bring", counting)
        found = train(path, tmp_path / "cut", adjust=SPLIT | {"parts": parts[0]} | change, **options)
    assert brought
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    assert all(torch.equal(found[1][name], expected[1][name]) for name in expected[1])


@pytest.mark.parametrize("interpreter", ["lanes", "plain"])
@pytest.mark.parametrize("name", sampled(("llama", "gemma3", "phi3", "gpt2-dropout", "mamba2", "deepseek"), ("llama", "phi3")))
def test_blocks_in_parts_train_as_whole_ones(
    name: str, interpreter: str, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    change = {} if interpreter == "lanes" else {"stash_tiers": lambda plan: ("ssd",) * plan.num_blocks, "stash_slots": 2}
    same(model_dir(name, "bfloat16"), tmp_path, "lora:rank=4", change, **({"interpreter": "plain"} if change else {}))


@pytest.mark.parametrize("adapter", ["dora:rank=4", pytest.param("lora:rank=4,dropout=0.25", marks=pytest.mark.deep)])
def test_what_reads_weights_beside_a_module_finds_them(adapter: str, model_dir: Callable[..., Path], tmp_path: Path) -> None:
    same(model_dir("gemma3", "bfloat16"), tmp_path, adapter, {"host_slots": 2, "prefetch": 1, "device_slots": 2})


def test_a_block_without_room_comes_in_parts_also_in_a_run_that_goes_on(
    model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan takes what parts need, and a run in them has the losses of whole blocks: evaluated, closed, resumed."""
    path, batches = model_dir("wide", "bfloat16"), [batch_of(2, LENGTH, seed) for seed in range(3)]
    more: dict[str, Any] = {"adapter": "lora:rank=4", "tokens_per_step": 2 * LENGTH, "sequence_length": LENGTH}

    def asks(run: Path) -> int:
        with pytest.raises(PlanInfeasible) as refused:
            Engine.open(path, headrace.Options(output=run, device_memory="1MiB", **more))
        return refused.value.needed_bytes

    least = asks(tmp_path / "least")
    with monkeypatch.context() as patch:
        patch.setattr(Subject, "cuts", lambda subject: None)
        # Of three large matrices two have slots; those of attention take turns in these.
        assert asks(tmp_path / "refused") - least == 2 * (64 * 4096 + 64 * 2 * (64 + 32))
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
    return replace(plan, **changes)
