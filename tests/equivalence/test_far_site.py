"""Units that live at a far site, all of them or some: the norm is that of all, commits and resumes are of both."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import LENGTH, ROWS, batch_of
from plan_changes import changed
from safetensors.torch import load_file
from tiers import sampled
from transformers import AutoModelForCausalLM

import headrace
from headrace.engine.seams import Seams
from headrace.engine.trainer import Engine
from headrace.testing import FarSite

LR, CLIP, STEPS = 5e-2, 0.5, 4


def options(run: Path, **more: Any) -> headrace.Options:
    values = {"tokens_per_step": ROWS * LENGTH, "sequence_length": LENGTH, "host_memory": "4GiB", "max_grad_norm": CLIP}
    return headrace.Options(output=run, learning_rate=LR, optimizer="sgd:momentum=0", **(values | more))


def ended(engine: Engine, out: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    losses = [engine.step(batch_of(ROWS, LENGTH, seed)).loss for seed in range(engine.step_index, STEPS)]
    engine.save_pretrained(out)
    return losses, load_file(out / "model.safetensors")


def plain(path: Path) -> tuple[list[float], float, dict[str, torch.Tensor]]:
    """Return losses, the loss of a batch that is held out, and weights."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=LR), []
    for seed in range(STEPS):
        optimizer.zero_grad()
        loss = model(**batch_of(ROWS, LENGTH, seed)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        held_out = model(**batch_of(ROWS, LENGTH, 9)).loss.item()
    return losses, held_out, {name: tensor.detach() for name, tensor in model.state_dict().items()}


SETTINGS: dict[str, dict[str, Any]] = {
    "all": {"units": None},
    "some, beside deferred updates": {"units": (0, 2, 3)},
    "some, with a device": {"units": (0, 2, 5), "device_memory": "1GiB"},
    "some, plain": {"units": (1, 4), "interpreter": "plain", "device_memory": "1GiB"},
}


@pytest.mark.parametrize("setting", sampled(SETTINGS))
def test_far_units_are_trained_as_plain_pytorch_does(setting: str, model_dir: Callable[..., Path], tmp_path: Path) -> None:
    path, more = model_dir("llama"), dict(SETTINGS[setting])
    site = FarSite(tmp_path / "far", "float32", more.pop("units"))
    with Engine.open(path, options(tmp_path / "run", compute_dtype="float32", **more), seams=Seams(site=site)) as engine:
        far = [unit for unit in range(len(engine.chain.layouts)) if site.holds(unit)]
        assert engine.plan is not None
        assert engine.plan.far_units == tuple(far)
        losses, weights = ended(engine, tmp_path / "out")
        held_out = engine.evaluate(batch_of(ROWS, LENGTH, 9)).loss
    expected, expected_held_out, merged = plain(path)
    assert losses == pytest.approx(expected, rel=2e-6)
    assert held_out == pytest.approx(expected_held_out, rel=2e-6)
    for name, want in merged.items():
        torch.testing.assert_close(weights[name], want, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.wide
def test_a_run_with_far_units_goes_on_where_both_were_committed(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    """The site is one commit ahead, as after a crash between its commit and the record's: it goes back."""
    path, run, units = model_dir("llama", "bfloat16"), tmp_path / "run", (0, 2)
    with Engine.open(
        path, options(tmp_path / "whole"), seams=Seams(site=FarSite(tmp_path / "far", "bfloat16", units))
    ) as engine:
        whole = ended(engine, tmp_path / "out")
    site = FarSite(tmp_path / "far2", "bfloat16", units)
    with Engine.open(path, options(run), seams=Seams(site=site)) as engine:
        losses = [engine.step(batch_of(ROWS, LENGTH, seed)).loss for seed in range(2)]
    site.begin(2, torch.zeros_like(site._masters[2], dtype=torch.bfloat16).view(torch.uint8).numpy())
    site.commit(3)
    with Engine.resume(run, seams=Seams(site=FarSite(tmp_path / "far2", "bfloat16", units))) as engine:
        assert engine.step_index == 2
        more, weights = ended(engine, tmp_path / "out2")
    assert losses + more == whole[0]
    assert all(torch.equal(weights[name], tensor) for name, tensor in whole[1].items())


def test_a_second_accumulator_changes_nothing(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    found, given = [], tmp_path / "plan.json"
    for accumulators in (1, 2):
        more = {"plan": given} if given.exists() else {}
        values = options(tmp_path / str(accumulators), compute_dtype="float32", device_memory="1GiB", **more)
        site = FarSite(tmp_path / f"far{accumulators}", "float32")
        with Engine.open(model_dir("llama"), values, seams=Seams(site=site)) as engine:
            assert engine.plan.gradients.accumulators == accumulators
            found.append(ended(engine, tmp_path / f"out{accumulators}"))
            given.write_text(json.dumps(changed(engine.plan, accumulators=2).to_json()))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(tensor, found[1][1][name]) for name, tensor in found[0][1].items())
