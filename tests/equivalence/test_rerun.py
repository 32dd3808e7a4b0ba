"""A step that is run again where its gradients must be clipped holds none of them: the bits of one that waits for the norm."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import SPLIT, batch_of
from plan_changes import changed
from safetensors.torch import load_file
from tiers import sampled

import headrace
from headrace.engine.trainer import Engine
from headrace.plan.value.plan import Plan
from headrace.terms.events import StepResult
from headrace.terms.families import STATES
from headrace.update import LossScale

ROWS, LENGTH, STEPS = 4, 32, 5
HELD: dict[str, Any] = {"update_policy": "deferred", "late_units": lambda plan: plan.updated_units}


def train(
    path: Path, folder: Path, changes: dict[str, Any] | None = None, *, scale: float | None = None, **options: Any
) -> tuple[list[StepResult], dict[str, torch.Tensor]]:
    """Return results and final weights of a short run under LOMO; `changes` are of its plan."""

    def adjust(plan: Plan) -> Plan:
        found = {name: value(plan) if callable(value) else value for name, value in (SPLIT | (changes or {})).items()}
        return changed(plan, **found)

    lengths: dict[str, Any] = {"tokens_per_step": ROWS * LENGTH, "sequence_length": LENGTH, "host_memory": "4GiB"}
    given = {"learning_rate": 1e-2, "weight_decay": 0.1, "optimizer": "lomo", "output": folder} | lengths | options
    with Engine.open(path, headrace.Options(**given), adjust_plan=adjust) as engine:
        plan = engine.plan
        assert plan is not None
        if not changes and given["max_grad_norm"]:
            assert plan.updates.policy == "rerun"
            assert not plan.held_units
        # Nothing is kept beside the rest of the master.
        families = [unit.family(STATES) for unit in engine.store.manifest.units]
        kept = [[plane.name for plane in family.planes] for family in families if family]
        assert kept in ([], [["lo"]] * len(plan.units), [["w"]] * len(plan.units)), given
        if scale is not None:
            engine._loss_scale = LossScale(scale=scale)
        results = [engine.step(batch_of(ROWS, LENGTH, seed)) for seed in range(STEPS)]
        engine.save_pretrained(folder.parent / f"{folder.name}-out")
    return results, load_file(folder.parent / f"{folder.name}-out" / "model.safetensors")


def assert_same(got: Any, want: Any) -> None:
    said = [[f"{each.loss} {each.grad_norm} {each.skipped}" for each in results] for results in (got[0], want[0])]
    assert said[0] == said[1]
    assert all(torch.equal(got[1][name], tensor) for name, tensor in want[1].items())


@pytest.mark.parametrize(
    ("share", "interpreter"), sampled([("some", "overlapped"), ("all", "plain")], [("some", "overlapped")])
)
def test_a_step_that_must_be_clipped_is_run_again(
    share: str, interpreter: str, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    path = model_dir("gpt2-dropout", "bfloat16")
    norms = sorted(result.grad_norm or 0.0 for result in train(path, tmp_path / "free", max_grad_norm=None)[0])
    bound = norms[0] / 2 if share == "all" else (norms[-2] + norms[-1]) / 2
    want = train(path, tmp_path / "held", HELD, max_grad_norm=bound)
    got = train(path, tmp_path / "again", max_grad_norm=bound, interpreter=interpreter)
    assert_same(got, want)
    redone = [result.redone for result in got[0]]
    assert all(redone) if share == "all" else any(redone) and not all(redone)
    assert not any(result.redone for result in want[0])


@pytest.mark.deep
def test_weights_without_a_master_are_rounded_alike_again(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    """Nothing but the weights is written, in another cut; the losses are near those of the whole master."""
    path, options = model_dir("llama", "bfloat16"), {"optimizer": "lomo:master=none", "max_grad_norm": 0.5}
    whole = train(path, tmp_path / "whole", max_grad_norm=0.5)
    want = train(path, tmp_path / "held", HELD, **options)
    got = train(path, tmp_path / "rerun", {"chunk_elements": 4096}, **options)
    assert_same(got, want)
    assert any(result.redone for result in got[0])
    assert [result.loss for result in got[0]] == pytest.approx([result.loss for result in whole[0]], rel=1e-2)
    assert any(not torch.equal(got[1][name], tensor) for name, tensor in whole[1].items())


@pytest.mark.deep
def test_a_step_that_overflows_is_left_out(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    path = model_dir("llama", "float16")
    options: dict[str, Any] = {"compute_dtype": "float16", "scale": 2.0**22, "max_grad_norm": 0.5}
    want = train(path, tmp_path / "held", HELD, **options)
    got = train(path, tmp_path / "rerun", **options)
    assert_same(got, want)
    assert got[0][0].skipped
    assert not got[0][-1].skipped
