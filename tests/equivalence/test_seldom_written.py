"""Where states and weights stay in memory and checkpoints are rare, only these write them: and lose nothing."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import LENGTH, ROWS, batch_of, train
from plan_changes import changed
from safetensors.torch import load_file
from tiers import sampled

import headrace
from headrace.engine.trainer import Engine
from headrace.flow.step import drain
from headrace.plan.value.plan import Plan
from headrace.terms.events import Event, StepResult

STEPS = 9


def in_memory(every: int) -> dict[str, Any]:
    return {
        "update_policy": "deferred",
        "late_units": lambda plan: plan.trained_units,
        "resident_states": lambda plan: plan.trained_units,
        "host_slots": lambda plan: plan.num_blocks,
        "speculation": None,
        "checkpoint_every": every,
        "chunk_elements": 8192,
    }


@pytest.mark.parametrize("device_memory", sampled([None, "1GiB"]))
def test_steps_between_checkpoints_write_nothing_that_stays(
    device_memory: str | None, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    path, written, results, ends = model_dir("llama", "bfloat16"), {}, {}, []
    for every in (1, 4):
        seen: list[int] = []
        sizes: list[int] = []

        def look(event: Event, seen: list[int] = seen) -> None:
            if isinstance(event, StepResult):
                seen.append(event.bytes_written["ssd"])

        def measure(engine: Engine, sizes: list[int] = sizes) -> None:
            assert engine.plan is not None
            sizes.append(sum(unit.num_elements for unit in engine.plan.units))
            ends.append(sum(engine.plan.units[unit].num_elements for unit in engine.plan.ends) / sizes[-1])

        options = {"max_grad_norm": 0.5, "device_memory": device_memory, "interpreter": "plain"}
        run = tmp_path / f"run{every}"
        results[every] = train(path, run, steps=STEPS, adjust=in_memory(every), sink=look, inspect=measure, **options)
        written[every] = sum(seen[1:]) / sizes[0]
    assert results[1][0] == results[4][0]
    assert all(torch.equal(results[4][1][name], tensor) for name, tensor in results[1][1].items())
    assert written[1] == pytest.approx(12 * (STEPS - 1), rel=0.01)
    # The device holds the weights around the blocks: in host memory they only pass by, and so are written with each update.
    staged = 0 if device_memory is None else 2 * ends[0] * (STEPS - 1 - 2)
    assert written[4] == pytest.approx(12 * 2 + staged, rel=0.01)


@pytest.mark.wide
@pytest.mark.parametrize("skipped", [1, 3])
def test_a_checkpoint_without_effect_makes_the_steps_before_it_durable(
    skipped: int, model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 3 is a checkpoint: what steps 0 to 2 did lies in memory alone until then, also where its own gradient is thrown
    away. A copy of the run, taken when it is committed as if the machine had stopped there, ends with the same bytes.
    """
    path, clip, asked = model_dir("llama", "bfloat16"), drain.clip_factor, iter(())

    def clipped(norm: float, most: float | None) -> float | None:
        return None if next(asked, -1) == skipped else clip(norm, most)

    monkeypatch.setattr(drain, "clip_factor", clipped)

    def ended(engine: Engine, out: Path) -> dict[str, torch.Tensor]:
        for seed in range(engine.step_index, 7):
            engine.step(batch_of(ROWS, LENGTH, seed))
        engine.save_pretrained(out)
        return load_file(out / "model.safetensors")

    found = {}
    for every in (1, 4):
        asked = iter(range(100))
        with Engine.open(path, options(tmp_path / f"run{every}"), adjust_plan=in_memory_plan(every)) as engine:
            results = [engine.step(batch_of(ROWS, LENGTH, seed)) for seed in range(5)]
            assert [bool(result.skipped) for result in results] == [step == skipped for step in range(5)]
            if every == 4:
                assert (engine.store.committed_version, engine.store.record["num_steps"]) == (2, 4), "the import, and step 3"
                shutil.copytree(tmp_path / "run4", tmp_path / "copy")
            found[every] = ended(engine, tmp_path / f"out{every}")
    asked = iter(())
    with Engine.resume(tmp_path / "copy") as engine:
        assert engine.step_index == 4
        found[0] = ended(engine, tmp_path / "out")
    for name, want in found[1].items():
        assert torch.equal(found[4][name], want), name
        assert torch.equal(found[0][name], want), name


def options(run: Path) -> headrace.Options:
    shape = {"tokens_per_step": ROWS * LENGTH, "sequence_length": LENGTH}
    return headrace.Options(output=run, host_memory="4GiB", max_grad_norm=0.5, learning_rate=1e-2, interpreter="plain", **shape)


def in_memory_plan(every: int) -> Callable[[Plan], Plan]:
    def adjust(plan: Plan) -> Plan:
        changes = {name: value(plan) if callable(value) else value for name, value in in_memory(every).items()}
        return changed(plan.with_results(speculation=changes.pop("speculation")), **changes)

    return adjust
