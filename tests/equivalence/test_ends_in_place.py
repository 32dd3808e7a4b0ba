"""Where a step has one micro-batch and one chunk of the loss, gradients of both ends need no sums of their own: same bits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import LENGTH, ROWS, batch_of, train
from tiers import sampled

import headrace
from headrace.engine.trainer import Engine
from headrace.model.parts import head_rows
from headrace.plan.value.plan import Plan

ONCE: dict[str, Any] = {
    "micro_batch_sequences": ROWS, "num_micro_batches": 1, "accumulate": False, "loss_chunk_tokens": ROWS * LENGTH
}  # fmt: skip
HELD: dict[str, Any] = {"late_units": lambda plan: plan.trained_units, "held_gradients": "ssd"}
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "at once": ({}, {}),
    "held on drives": (HELD, {"max_grad_norm": 0.5, "checkpoint_every": 2}),
    "held in memory": (HELD | {"held_gradients": "host"}, {"max_grad_norm": 0.5}),
    "plain": (HELD, {"max_grad_norm": 0.5, "interpreter": "plain"}),
    "float16": ({}, {"compute_dtype": "float16"}),
    "float32": ({}, {"compute_dtype": "float32"}),
    "Muon": ({}, {"optimizer": "muon"}),
    "LOMO": ({}, {"optimizer": "lomo", "max_grad_norm": 0.5}),
    "embedding by rows": ({}, {"gradient": "rows"}),
}
NAMES = ("llama", "llama-tied", "gpt2-dropout", "gemma3", "mamba2")


def wanted(name: str, way: str) -> bool:
    return not (way == "embedding by rows" and name != "llama")


CASES = [(name, way) for name in NAMES for way in WAYS if wanted(name, way)]


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have three ranges of a tiny model's head."""
    monkeypatch.setattr(head_rows, "_RANGE_ELEMENTS", 128 * 64)


@pytest.mark.wide
@pytest.mark.parametrize(("name", "way"), sampled(CASES, (("llama", "held on drives"), ("llama-tied", "held in memory"))))
def test_no_sums_are_needed(
    name: str, way: str, model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, options = WAYS[way]
    plans: list[Plan | None] = []

    def trained(folder: str) -> tuple[list[float], dict[str, torch.Tensor]]:
        return train(
            model_dir(name, "bfloat16"),
            tmp_path / folder,
            adjust=ONCE | change,
            inspect=lambda engine: plans.append(engine.plan),
            **{"compute_dtype": "bfloat16", **options},
        )

    found = trained("in place")
    assert plans[0] is not None
    assert plans[0].ends_in_place
    with monkeypatch.context() as patch:
        patch.setattr(Plan, "ends_in_place", False)
        expected = trained("summed")
    assert found[0] == expected[0]
    assert all(torch.equal(found[1][each], expected[1][each]) for each in expected[1])


@pytest.mark.parametrize("name", sampled(["llama", "llama-tied"]))
def test_a_run_without_sums_goes_on_where_it_was(name: str, model_dir: Callable[..., Path], tmp_path: Path) -> None:
    """Closed and resumed, it says what one that was not closed says, evaluations among it."""
    path, options = model_dir(name, "bfloat16"), {"tokens_per_step": LENGTH, "sequence_length": LENGTH}

    def losses(folder: str, stops: tuple[int, ...]) -> list[float]:
        found = list[float]()
        for start, stop in zip((0, *stops), (*stops, 4), strict=True):
            own = headrace.Options(output=tmp_path / folder, host_memory="1GiB", max_grad_norm=0.5, **options)
            with Engine.open(path, own) if not start else Engine.resume(tmp_path / folder) as engine:
                assert engine.plan is not None
                assert engine.plan.ends_in_place
                found += [engine.step(batch_of(1, LENGTH, seed)).loss for seed in range(start, stop)]
                found.append(engine.evaluate(batch_of(1, LENGTH, 9)).loss)
        return found

    whole, resumed = losses("whole", ()), losses("resumed", (2,))
    assert whole == [*resumed[:2], *resumed[3:]]
