"""Weights that come in pages, and block inputs that are read from drives early, change no bit, wherever else things live."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import LENGTH, ROWS, SPLIT, batch_of, everything, train
from plan_changes import changed
from tiers import sampled

import headrace
from headrace.engine.trainer import Engine
from headrace.plan.value.choices import Hosted
from headrace.plan.value.plan import Plan
from headrace.terms.events import OpDone
from headrace.terms.program import Verb
from headrace.terms.sizes import PAGE_BYTES

STEPS = 2
ONE_ROW = SPLIT | {"micro_batch_sequences": 1, "num_micro_batches": ROWS}
# As a plan has them that comes in pages: two blocks on the device, and inputs of a whole block under way from the drives.
PAGED: dict[str, Any] = {
    "pages": True,
    "prefetch": 1,
    "device_slots": 2,
    "host_slots": 4,
    "stash_tiers": lambda plan: ("ssd",) * plan.num_blocks,
    "stash_slots": ROWS + 2,
}
HOSTED = {"hosted": Hosted(coming=2, going=2)}
ON_HOST = {"stash_tiers": lambda plan: ("host",) * plan.num_blocks, "stash_slots": 0}
LATE = {"update_policy": "deferred", "late_units": everything, "checkpoint_every": 1}
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "two accumulators": ({"accumulators": 2}, {}),
    "hosted": (HOSTED, {}),
    "hosted, plain": (HOSTED, {"interpreter": "plain"}),
    "few slots in host memory": ({"host_slots": 2, "stash_slots": 3}, {}),
    "inputs in host memory": (ON_HOST, {}),
    "late, clipped": (LATE, {"max_grad_norm": 0.1}),
    "late, on the drives": (LATE | {"held_gradients": "ssd"}, {"max_grad_norm": 0.1}),
    "speculative": ({"update_policy": "speculative", "late_units": lambda plan: (2,)}, {"max_grad_norm": 0.05}),
    "updates on the device": ({"device_update_every": 2, "chunk_elements": 2048}, {}),
    "all blocks on the device": ({"device_slots": 4, "stash_tiers": lambda plan: ("device",) * plan.num_blocks}, {}),
    "adapters": ({}, {"adapter": "lora:rank=4"}),
    "dora": ({}, {"adapter": "dora:rank=4"}),
    "AdaLomo": ({}, {"optimizer": "adalomo"}),
}


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let blocks of tiny models have several pages."""
    monkeypatch.setattr("headrace.plan.value.placement.LEAST_PAGE_BYTES", PAGE_BYTES)


def same(path: Path, tmp_path: Path, change: dict[str, Any], **options: Any) -> None:
    """Assert that a run with pages has the losses and weights of one without. Pages take turns with micro-batches."""
    options = {"steps": STEPS, "compute_dtype": "bfloat16", "device_memory": "1GiB"} | options
    expected = train(path, tmp_path / "whole", adjust=ONE_ROW, **options)
    diary: list[OpDone] = []

    def note(event: Any) -> None:
        if isinstance(event, OpDone):
            diary.append(event)

    found = train(path, tmp_path / "pages", adjust=ONE_ROW | PAGED | change, sink=note, **options)
    pages = {event.chunk for event in diary if event.verb is Verb.UPLOAD and event.unit == 2}
    assert pages >= {0, 1, 2} or change.get("device_slots") == 4
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    assert all(torch.equal(found[1][name], expected[1][name]) for name in expected[1])


@pytest.mark.parametrize("interpreter", sampled(["lanes", "plain"]))
@pytest.mark.parametrize("name", sampled(("llama-tied", "gpt2-dropout", "gemma3", "phi3", "mixtral-aux"), ("llama-tied",)))
def test_weights_in_pages_change_no_bit(name: str, interpreter: str, model_dir: Callable[..., Path], tmp_path: Path) -> None:
    same(model_dir(name, "bfloat16"), tmp_path, {}, **({"interpreter": "plain"} if interpreter == "plain" else {}))


@pytest.mark.parametrize("way", sampled(tuple(WAYS), ("two accumulators", "hosted", "late, clipped", "adapters")))
def test_pages_go_with(way: str, model_dir: Callable[..., Path], tmp_path: Path) -> None:
    change, options = WAYS[way]
    same(model_dir("llama", "bfloat16"), tmp_path, change, **options)


@pytest.mark.wide
def test_a_run_with_pages_goes_on_and_evaluates(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    path, batches = model_dir("llama-tied", "bfloat16"), [batch_of(ROWS, LENGTH, seed) for seed in range(3)]
    more: dict[str, Any] = {"tokens_per_step": ROWS * LENGTH, "sequence_length": LENGTH, "device_memory": "1GiB"}
    found = []
    for name, change in (("whole", {}), ("pages", PAGED | HOSTED)):

        def adjusted(plan: Plan, change: dict[str, Any] = change) -> Plan:
            changes = {name: value(plan) if callable(value) else value for name, value in (ONE_ROW | change).items()}
            return changed(plan, **changes)

        with Engine.open(path, headrace.Options(output=tmp_path / name, **more), adjust_plan=adjusted) as engine:
            said = [engine.step(batches[0]).loss, engine.evaluate(batches[2]).loss]
        with Engine.resume(tmp_path / name) as engine:
            assert engine.plan is not None
            assert engine.plan.batch.pages == (name == "pages")
            said += [engine.step(batches[1]).loss, engine.evaluate(batches[2]).loss]
            # A step of fewer rows, as the last of a run may be.
            said.append(engine.step({key: value[:2] for key, value in batches[2].items()}).loss)
        found.append(said)
    assert found[0] == found[1]
