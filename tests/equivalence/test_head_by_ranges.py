"""With the head taken by ranges of its rows the engine trains like plain PyTorch; placement and splits change no bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import FAR_PLACEMENTS, LENGTH, MODELS, ROWS, SPLIT, PlainTrainer, batch_of, check_close, train
from plan_changes import changed
from tiers import sampled
from transformers import AutoModelForCausalLM

import headrace
from headrace.engine.trainer import Engine
from headrace.model.parts import head_rows
from headrace.plan.value.plan import Plan

_RANGES = {"head_rows": 160}  # of 384: two ranges and a smaller one


@pytest.mark.parametrize(
    ("name", "clip"),
    sampled(
        [(name, clip) for name in MODELS if "dropout" not in name for clip in (None, 0.5)],
        [("llama", None), ("gemma3", 0.5)],
    ),
)
def test_float32_training_by_ranges_is_plain_pytorch(
    name: str, clip: float | None, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    path = model_dir(name)
    plain = PlainTrainer(path, 1e-3, 0.1, clip)
    expected = [plain.step(batch_of(ROWS, LENGTH, seed))[0] for seed in range(3)]
    out = tmp_path / "out"
    options: dict[str, Any] = {"compute_dtype": "float32", "max_grad_norm": clip, "export": out}
    losses, _ = train(path, tmp_path / "run", adjust=SPLIT | _RANGES, **options)
    assert losses == pytest.approx(expected, rel=2e-6)
    ours = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    for (key, got), want in zip(ours.named_parameters(), plain.model.parameters(), strict=True):
        check_close(got, want, key)


@pytest.mark.deep
@pytest.mark.parametrize("name", ["llama-tied", "llama"])
def test_where_things_are_placed_changes_no_bit_of_ranges(name: str, model_dir: Callable[..., Path], tmp_path: Path) -> None:
    path = model_dir(name, "bfloat16")
    losses, weights = train(path, tmp_path / "run", adjust=SPLIT | _RANGES)
    for number, options in enumerate(FAR_PLACEMENTS.values()):
        placed = options | {"adjust": {**SPLIT, **_RANGES, **options["adjust"]}}
        got = train(path, tmp_path / f"run{number}", **placed)
        assert got[0] == losses
        assert all(torch.equal(got[1][key], want) for key, want in weights.items())


@pytest.mark.wide
def test_a_run_that_began_with_the_whole_head_goes_on_with_it(
    model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_rows, "_RANGE_ELEMENTS", 160 * 64)  # so that this version would take ranges
    path, options = model_dir("llama", "bfloat16"), {"tokens_per_step": ROWS * LENGTH, "sequence_length": LENGTH}

    def run(folder: Path, adjust: Callable[[Plan], Plan] | None) -> list[float]:
        asked = headrace.Options(output=folder, host_memory="4GiB", learning_rate=1e-3, **options)
        with Engine.open(path, asked, adjust_plan=adjust) as engine:
            losses = [engine.step(batch_of(ROWS, LENGTH, 0)).loss]
        with Engine.resume(folder) as engine:
            assert engine.plan is not None
            return [*losses, engine.step(batch_of(ROWS, LENGTH, 1)).loss, engine.plan.batch.head_rows]

    whole = run(tmp_path / "whole", lambda plan: changed(plan, head_rows=0))
    older = run(tmp_path / "older", lambda plan: Plan.from_json(_older(plan.to_json())))
    ranges = run(tmp_path / "ranges", None)
    assert older == whole
    assert whole[-1] == 0
    assert ranges[-1] == 128
    assert ranges[:2] == pytest.approx(whole[:2], rel=1e-3)


def _older(values: dict[str, Any]) -> dict[str, Any]:
    """Return a plan of format 3 as it was before heads were taken by ranges."""
    batch = {key: value for key, value in values["batch"].items() if key != "head_rows"}
    return {**values, "batch": batch}
