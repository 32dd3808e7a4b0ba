"""Frozen experts that come one at a time give the bits of whole blocks, wherever things live."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import SPLIT, train
from tiers import sampled

import headrace
from headrace.engine.seams import Seams, seams_of
from headrace.plan.plan import Plan

EXPERTS, ATTENTION = "lora:rank=4,target_modules=o_proj+experts", "lora:rank=4"
STEPS = 2


def parted(adapter: str) -> Seams:
    return replace(seams_of(headrace.Options(adapter=adapter)), parted=True)


def together(count: int, in_round: int = 1) -> Callable[[Plan], Any]:
    """Return a change of plans: so many micro-batches are at a block's experts together."""

    def change(plan: Plan) -> Any:
        assert plan.experts is not None, "its experts are parts"
        return replace(plan.experts, together=count, in_round=in_round)

    return change


def runs(path: Path, tmp_path: Path, adapter: str, change: dict[str, Any], **options: Any) -> None:
    """Assert that a run with experts as parts has the losses and adapters of one with whole blocks."""
    expected = train(path, tmp_path / "whole", steps=STEPS, adapter=adapter, adjust=SPLIT, **options)
    found = train(
        path, tmp_path / "parted", steps=STEPS, adapter=adapter, adjust=SPLIT | change, seams=parted(adapter), **options
    )
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    assert all(torch.equal(found[1][name], expected[1][name]) for name in expected[1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("adapter", [EXPERTS, ATTENTION])
def test_experts_that_come_singly_train_as_whole_blocks(
    adapter: str, dtype: str, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    runs(model_dir("mixtral-aux", dtype), tmp_path, adapter, {"experts": together(2)}, compute_dtype=dtype)


PLACEMENTS: dict[str, dict[str, Any]] = {
    "SSD, plain": {
        "change": {"experts": together(3, 2), "stash_tiers": ("ssd",) * 4, "stash_slots": 2, "host_slots": 2, "prefetch": 1},
        "interpreter": "plain",
    },
    "a device": {"change": {"experts": together(2, 3)}, "device_memory": "1GiB"},
    "a device, inputs on the SSD, a tree": {
        "change": {"experts": together(2), "stash_tiers": ("ssd",) * 4, "stash_slots": 2},
        "device_memory": "1GiB",
        "gradient_sum": "tree",
    },
}


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", sampled(("gpt-oss", "deepseek"), ("gpt-oss",)))
def test_the_bits_are_the_same_wherever_things_live(
    name: str, placement: str, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    options = dict(PLACEMENTS[placement])
    runs(model_dir(name, "bfloat16"), tmp_path, EXPERTS, options.pop("change"), compute_dtype="bfloat16", **options)
