"""Updates that begin on a guess, and updates that are held for the next forward: the bits of those that wait for the norm."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import batch_of
from plan_changes import changed
from safetensors.torch import load_file
from tiers import sampled

import headrace
from headrace.engine.trainer import Engine
from headrace.plan.value.plan import Plan
from headrace.plan.value.speculation import Speculation
from headrace.store import StateStore
from headrace.terms.events import StepResult
from headrace.update import LossScale

ROWS, LENGTH = 4, 32
SPECULATIVE: dict[str, Any] = {"update_policy": "speculative", "late_units": (0, 2), "resident_states": ()}
ON_SSD = {**SPECULATIVE, "held_gradients": "ssd"}
DEFERRED: dict[str, Any] = {"resident_states": ()}


def open_engine(
    path: Path,
    folder: Path,
    adjust_plan: Callable[[Plan], Plan] | None = None,
    max_grad_norm: float | None = None,
    **options: Any,
) -> Engine:
    return Engine.open(
        path,
        headrace.Options(
            host_memory="4GiB",
            learning_rate=1e-3,
            weight_decay=0.1,
            output=folder,
            tokens_per_step=ROWS * LENGTH,
            sequence_length=LENGTH,
            max_grad_norm=max_grad_norm,
            **options,
        ),
        adjust_plan=adjust_plan,
    )


def train(
    path: Path, folder: Path, changes: dict[str, Any], *, steps: int = 6, scale: float | None = None, **options: Any
) -> tuple[list[StepResult], dict[str, torch.Tensor]]:
    def adjust_plan(plan: Plan) -> Plan:
        return changed(plan.with_results(speculation=None), **{"checkpoint_every": 1, **changes})

    with open_engine(path, folder, adjust_plan=adjust_plan, **options) as engine:
        if scale is not None:
            engine._loss_scale = LossScale(scale=scale)
        results = [engine.step(batch_of(ROWS, LENGTH, seed)) for seed in range(steps)]
        engine.save_pretrained(folder.parent / f"{folder.name}-out")
    return results, load_file(folder.parent / f"{folder.name}-out" / "model.safetensors")


def assert_same(
    got: tuple[list[StepResult], dict[str, torch.Tensor]], want: tuple[list[StepResult], dict[str, torch.Tensor]]
) -> None:
    # As text: a skipped step's norm may be NaN.
    assert [f"{result.loss} {result.grad_norm} {result.skipped}" for result in got[0]] == [
        f"{result.loss} {result.grad_norm} {result.skipped}" for result in want[0]
    ]
    for name, tensor in want[1].items():
        assert torch.equal(got[1][name], tensor), name


@pytest.mark.parametrize(  # all guesses wrong, some, none
    ("quantile", "interpreter"),
    sampled(itertools.product([0.0, 0.5, 1.0], ["overlapped", "plain"]), [(0.0, "plain"), (0.5, "overlapped"), (1.0, "plain")]),
)
def test_wrong_guesses_cost_time_and_change_nothing(
    quantile: float, interpreter: str, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    path = model_dir("llama", "bfloat16")
    norms = sorted(result.grad_norm or 0.0 for result in train(path, tmp_path / "free", {})[0])
    # A bound between the norms that occur: so many of the guesses come out wrong.
    limit = {0.0: norms[0] / 2, 0.5: (norms[2] + norms[3]) / 2, 1.0: norms[-1] * 2}[quantile]
    want = train(path, tmp_path / "deferred", DEFERRED, max_grad_norm=limit)
    got = train(path, tmp_path / "speculative", SPECULATIVE, max_grad_norm=limit, interpreter=interpreter)
    assert_same(got, want)
    redone = [result.redone for result in got[0]]
    assert redone == [(result.grad_norm or 0.0) > limit - 1e-6 for result in got[0]]
    assert {0.0: all(redone), 0.5: any(redone) and not all(redone), 1.0: not any(redone)}[quantile]
    assert not any(result.redone for result in want[0])


@pytest.mark.wide
@pytest.mark.parametrize("changes", sampled([SPECULATIVE, ON_SSD], [ON_SSD]), ids=["memory", "ssd"])
def test_an_overflow_is_taken_back(changes: dict[str, Any], model_dir: Callable[..., Path], tmp_path: Path) -> None:
    path = model_dir("llama")
    options: dict[str, Any] = {"compute_dtype": "float16", "steps": 10, "scale": 2.0**24}
    want = train(path, tmp_path / "deferred", DEFERRED, **options)
    assert any(result.skipped for result in want[0])
    assert not all(result.skipped for result in want[0])
    assert_same(train(path, tmp_path / "speculative", changes, **options), want)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("late_units", "done"), sampled(itertools.product([(), (0, 2)], [False, True]), [((), True), ((0, 2), False)])
)
def test_a_step_that_cannot_be_taken_back_is_never_committed(
    late_units: tuple[int, ...], done: bool, model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt or a drive that fails between a wrong guess and its end: the run goes on from the step before."""
    path = model_dir("llama", "bfloat16")
    changes = {**SPECULATIVE, "late_units": late_units}
    want = train(path, tmp_path / "want", changes, steps=2, max_grad_norm=1e-6)
    abandon, times = StateStore.abandon, 0

    def interrupted(store: StateStore) -> None:
        nonlocal times
        times += 1
        if times < 3 or done:
            abandon(store)
        if times == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(StateStore, "abandon", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(path, tmp_path / "run", changes, steps=3, max_grad_norm=1e-6)
    with Engine.resume(tmp_path / "run") as engine:
        assert engine.step_index == 2
        engine.save_pretrained(tmp_path / "out")
    for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items():
        assert torch.equal(tensor, want[1][name]), name


@pytest.mark.wide
def test_late_updates_of_a_step_that_is_skipped_are_forgotten(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    path = model_dir("llama")
    options: dict[str, Any] = {"compute_dtype": "float16", "steps": 10, "scale": 2.0**24}
    late = {"update_policy": "immediate", "late_units": (1, 2, 5), "resident_states": ()}
    want = train(path, tmp_path / "deferred", DEFERRED, **options)
    assert_same(train(path, tmp_path / "late", late, **options), want)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("limit", "begin", "end"),
    sampled([(1e6, "deferred", "speculative"), (1e-6, "speculative", "deferred")], [(1e-6, "speculative", "deferred")]),
)
def test_the_policy_follows_the_hit_rate(
    limit: float, begin: str, end: str, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    path = model_dir("llama", "bfloat16")
    prices = Speculation(late_units=(1,), deferred_seconds=3.0, hit_seconds=2.0, redo_seconds=2.0)

    def adjust_plan(plan: Plan) -> Plan:
        late = prices.late_units if begin == "speculative" else plan.updates.late_units
        plan = plan.with_results(speculation=prices)
        return changed(plan, update_policy=begin, late_units=late, resident_states=())

    with open_engine(path, tmp_path / "run", max_grad_norm=limit, adjust_plan=adjust_plan) as engine:
        results = [engine.step(batch_of(ROWS, LENGTH, seed)) for seed in range(8)]
    with Engine.resume(tmp_path / "run") as engine:
        assert engine.plan is not None
        assert engine.plan.results.speculation == prices
        results += [engine.step(batch_of(ROWS, LENGTH, seed)) for seed in range(8, 18)]
        engine.save_pretrained(tmp_path / "out")
    assert [result.update_policy for result in results] == [begin] * 16 + [end] * 2
    want = train(path, tmp_path / "want", DEFERRED, steps=18, max_grad_norm=limit)
    assert_same((results, load_file(tmp_path / "out" / "model.safetensors")), want)


def test_break_even_is_where_both_take_equally_long() -> None:
    prices = Speculation(late_units=(), deferred_seconds=10.0, hit_seconds=7.0, redo_seconds=6.0)
    hits = prices.break_even
    assert hits * prices.hit_seconds + (1 - hits) * (prices.hit_seconds + prices.redo_seconds) == pytest.approx(10.0)
