"""A run goes on under another plan between two steps: with the same bits, and with the memory of one plan at a time."""

import dataclasses
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from plain import LENGTH, ROWS, SPLIT, batch_of, everything, exported
from tiers import sampled

import headrace
import headrace.engine.beginning
from headrace.engine.trainer import Engine
from headrace.flow.buffers import Buffers
from headrace.plan.plan import Plan
from headrace.terms.errors import ConfigError, DiskFull, PlanInfeasible
from headrace.terms.events import Notice

STEPS = 5
# Plans that have nothing in common but what decides bits; each step takes the next one.
ON_SSD = {"stash_tiers": ("ssd",) * 4, "stash_slots": 2, "host_slots": 2, "prefetch": 1, "resident_states": ()}
KEPT = {"kept": lambda plan: tuple(tuple(range(len(names))) for names in plan.operators), "host_slots": 4}
KINDS: dict[str, tuple[dict[str, Any], tuple[dict[str, Any], ...]]] = {
    "unclipped": (
        {"max_grad_norm": None},
        (
            ON_SSD,
            {"update_policy": "deferred", "late_units": everything, "resident_states": everything, "host_slots": 4},
            {"late_units": (0, 2), **KEPT},
            {"late_units": (1, 3, 4), "held_gradients": "ssd", "gradient_slots": 1},
        ),
    ),
    "clipped": (
        {"max_grad_norm": 0.5},
        (
            {"resident_states": everything, "host_slots": 4},
            {"held_gradients": "ssd", **ON_SSD},
            {"update_policy": "speculative", "late_units": (0, 2), "resident_states": ()},
            {"resident_states": (1, 3), **KEPT},
        ),
    ),
    "a device": (
        {"max_grad_norm": 0.5, "device_memory": "1GiB"},
        (
            {"stash_tiers": ("host", "ssd", "ssd", "device"), "stash_slots": 2, "device_slots": 2, "host_slots": 2, "prefetch": 1},
            {"device_update_every": 2, "resident_states": ()},
            {"resident_states": everything, "stash_tiers": ("device",) * 4},
        ),
    ),
    "few commits": (
        {"max_grad_norm": 0.5, "checkpoint_every": 3},
        (
            {"resident_states": everything, "host_slots": 4},
            ON_SSD,
        ),
    ),
}


def changed(plan: Plan, changes: dict[str, Any]) -> Plan:
    given = {name: value(plan) if callable(value) else value for name, value in changes.items()}
    return dataclasses.replace(plan.with_results(speculation=None), **given)


def opened(path: Path, folder: Path, sink: Any = None, **options: Any) -> Engine:
    def split(plan: Plan) -> Plan:
        return changed(plan, SPLIT)

    given = {"host_memory": "4GiB", "learning_rate": 1e-3, "tokens_per_step": ROWS * LENGTH, "sequence_length": LENGTH}
    return Engine.open(path, headrace.Options(output=folder, **given | options), sink, adjust_plan=split)


def stepped(engine: Engine, variants: tuple[dict[str, Any], ...], last: int = STEPS) -> Iterator[tuple[float, float | None]]:
    """Step to `last`, and go on under another plan after each step, if there are any; yield losses and norms."""
    first = engine.plan
    while engine.step_index < last:
        number = engine.step_index
        result = engine.step(batch_of(ROWS, LENGTH, number), position=number + 1)
        yield result.loss, result.grad_norm
        if variants and first is not None:
            plan = changed(first, variants[number % len(variants)])
            assert engine.take_plan(plan)
            assert engine.plan is not None
            assert engine.plan.with_results(**vars_of(plan)) == plan, "its choices are those that were given"


def vars_of(plan: Plan) -> dict[str, Any]:
    return {field.name: getattr(plan.results, field.name) for field in dataclasses.fields(plan.results)}


@pytest.fixture
def path(model_dir: Callable[..., Path]) -> Path:
    return model_dir("llama", "bfloat16")


@pytest.mark.parametrize("kind", sampled(KINDS, ["unclipped", "clipped"]))
def test_another_plan_after_each_step_gives_the_same_bits(kind: str, path: Path, tmp_path: Path) -> None:
    options, variants = KINDS[kind]
    with opened(path, tmp_path / "one", **options) as engine:
        expected = list(stepped(engine, ()))
        weights = exported(engine, tmp_path / "one-out")
    with opened(path, tmp_path / "many", **options) as engine:
        assert list(stepped(engine, variants)) == expected
        for name, want in exported(engine, tmp_path / "many-out").items():
            assert weights[name].equal(want), name


def test_a_resumed_run_goes_on_under_the_plan_of_its_last_commit(path: Path, tmp_path: Path) -> None:
    options, variants = KINDS["unclipped"]
    with opened(path, tmp_path / "one", **options) as engine:
        expected = list(stepped(engine, ()))
        weights = exported(engine, tmp_path / "one-out")
    with opened(path, tmp_path / "many", **options) as engine:
        found = list(stepped(engine, variants, last=2))
        before = engine.plan
        found += list(stepped(engine, (), last=3))
    with Engine.resume(tmp_path / "many") as engine:
        assert before is not None
        assert engine.plan is not None
        assert engine.plan.stash == before.stash
        assert engine.plan.updates == before.updates
        assert [*found, *stepped(engine, ())] == expected
        for name, want in exported(engine, tmp_path / "many-out").items():
            assert weights[name].equal(want), name


def test_buffers_of_two_plans_never_exist_at_once(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Buffers]] = []

    def make(*given: Any) -> Buffers:
        assert not [each for each in made if each() is not None], "buffers of a plan before are still there"
        buffers = Buffers(*given)
        made.append(weakref.ref(buffers))
        return buffers

    monkeypatch.setattr(headrace.engine.beginning, "Buffers", make)
    options, variants = KINDS["unclipped"]
    with opened(path, tmp_path / "run", **options) as engine:
        list(stepped(engine, variants, last=4))
    assert len(made) == 4


def test_without_space_on_the_drives_the_plan_stays(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(num_bytes: int) -> None:
        raise DiskFull("no space")

    events: list[Any] = []
    with opened(path, tmp_path / "run", events.append, max_grad_norm=None) as engine:
        losses = [loss for loss, _ in stepped(engine, (), last=1)]
        now = engine.plan
        assert now is not None
        monkeypatch.setattr(engine.store._parts.volume, "extend", full)
        assert not engine.take_plan(changed(now, ON_SSD))
        assert engine.plan == now
        assert [event.text for event in events if isinstance(event, Notice) and "the plan stays" in event.text]
        losses += [loss for loss, _ in stepped(engine, ())]
    with opened(path, tmp_path / "other", max_grad_norm=None) as engine:
        assert [loss for loss, _ in stepped(engine, ())] == losses


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"micro_batch_sequences": 3, "num_micro_batches": 2}, "rows of a micro-batch 3 in the plan, 2 in the run"),
        ({"loss_chunk_tokens": 16}, "tokens of a chunk of the loss 16 in the plan, 32 in the run"),
        ({"compute_threads": 99}, "threads of compute 99"),
        ({"chunk_elements": 2048}, "chunk_elements 2048 in the plan"),
        ({"checkpoint_every": 7}, "checkpoint_every 7 in the plan"),
        ({"host_slots": 0}, "host_slots 0"),
    ],
)
def test_a_plan_that_would_change_bits_is_refused(path: Path, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with opened(path, tmp_path / "run", max_grad_norm=None) as engine:
        losses = [loss for loss, _ in stepped(engine, (), last=1)]
        now = engine.plan
        assert now is not None
        with pytest.raises(ConfigError, match=words):
            engine.take_plan(changed(now, changes))
        assert engine.plan == now
        losses += [loss for loss, _ in stepped(engine, (), last=2)]
        assert len(losses) == 2


def test_a_plan_above_the_budgets_is_refused_and_the_run_goes_on(path: Path, tmp_path: Path) -> None:
    with opened(path, tmp_path / "run", max_grad_norm=None) as engine:
        list(stepped(engine, (), last=1))
        now = engine.plan
        assert now is not None
        engine.plan = now.with_results(allowed_bytes={**now.results.allowed_bytes, "host": now.peak("host") // 2})
        with pytest.raises(PlanInfeasible, match="host memory"):
            engine.take_plan(now)
        engine.plan = now
        assert len(list(stepped(engine, (), last=2))) == 1
