"""A run goes on under another plan between two steps: with the same bits, and with the memory of one plan at a time."""

import dataclasses
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from first_plans import first_that_fits
from plain import LENGTH, ROWS, SPLIT, batch_of, everything, exported
from tiers import sampled

import headrace
import headrace.ask.planner
import headrace.engine.beginning
from headrace.engine.trainer import Engine
from headrace.flow.weights.buffers import Buffers
from headrace.peers.node.node import NodeEngine
from headrace.peers.ranks.sharded import ShardedEngine
from headrace.peers.stages.staged import StagedEngine
from headrace.plan.clock.nominal import nominal_machine
from headrace.plan.clock.simulate import union_seconds
from headrace.plan.forecast.forecast import forecast
from headrace.plan.forecast.own_rates import Seen
from headrace.plan.value.plan import Plan
from headrace.terms.errors import ConfigError, DiskFull, PlanInfeasible
from headrace.terms.events import Notice, OpDone
from headrace.terms.lanes import Lane

STEPS = 5
# Plans that have nothing in common but what decides bits; each step takes the next one.
ON_SSD = {"stash_tiers": ("ssd",) * 4, "stash_slots": 2, "host_slots": 2, "prefetch": 1, "resident_states": ()}
KEPT = {"kept": lambda plan: tuple(tuple(range(len(names))) for names in plan.operators), "host_slots": 4}
DEFERRED_ADAPTERS = {"late_units": lambda plan: plan.trained_units, "resident_states": lambda plan: plan.trained_units}
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
            {
                "stash_tiers": ("host", "ssd", "ssd", "device"),
                "stash_slots": 2,
                "device_slots": 2,
                "host_slots": 2,
                "prefetch": 1,
            },
            {"device_update_every": 2, "resident_states": ()},
            {"resident_states": everything, "stash_tiers": ("device",) * 4},
        ),
    ),
    "adapters": (
        {"max_grad_norm": 0.5, "adapter": "dora:rank=2"},
        (
            {"update_policy": "deferred", "late_units": lambda plan: plan.trained_units, "resident_states": ()},
            {"host_slots": 2, "prefetch": 1, **DEFERRED_ADAPTERS},
            {"stash_tiers": ("ssd",) * 4, "stash_slots": 2, **DEFERRED_ADAPTERS},
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
        engine.save_pretrained(tmp_path / "one-out")
    with opened(path, tmp_path / "many", **options) as engine:
        assert list(stepped(engine, variants)) == expected
        engine.save_pretrained(tmp_path / "many-out")
    files = list((tmp_path / "one-out").glob("*.safetensors"))
    assert files
    for file in files:
        assert (tmp_path / "many-out" / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.wide
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


@pytest.mark.wide
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


def test_plans_that_would_change_bits_are_refused(path: Path, tmp_path: Path) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"micro_batch_sequences": 3, "num_micro_batches": 2}, "rows of a micro-batch 3 in the plan, 2 in the run"),
        ({"loss_chunk_tokens": 16}, "tokens of a chunk of the loss 16 in the plan, 32 in the run"),
        ({"compute_threads": 99}, "threads of compute 99"),
        ({"chunk_elements": 2048}, "chunk_elements 2048 in the plan"),
        ({"checkpoint_every": 7}, "checkpoint_every 7 in the plan"),
        ({"host_slots": 0}, "host_slots 0"),
    ]
    with opened(path, tmp_path / "run", max_grad_norm=None) as engine:
        with pytest.raises(ConfigError, match="rows of a micro-batch"):
            engine.take_plan(changed(in_use(engine), refused[0][0]))
        list(stepped(engine, (), last=1))
        now = in_use(engine)
        for changes, words in refused:
            with pytest.raises(ConfigError, match=words):
                engine.take_plan(changed(now, changes))
            assert engine.plan == now
        assert len(list(stepped(engine, (), last=2))) == 1, "it goes on"


def in_use(engine: Engine) -> Plan:
    assert engine.plan is not None
    return engine.plan


@pytest.mark.wide
@pytest.mark.parametrize("kind", [NodeEngine, ShardedEngine, StagedEngine])
def test_engines_on_whose_plan_others_rely_keep_it(kind: type[Engine]) -> None:
    engine = object.__new__(kind)
    with pytest.raises(ConfigError, match=r"plan: (a node keeps its plan|ranks and stages keep the plan)"):
        engine.take_plan(None)  # type: ignore[arg-type]  # which is not even looked at
    assert engine.plan_again() is None


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


class Searches:
    """A search that finds these plans one after the other: of the first placement that fits, with changes."""

    def __init__(self, *changes: dict[str, Any]) -> None:
        self.changes = list(changes)

    def __call__(self, problem: Any, ceilings: Any = None) -> Plan:
        plan = first_that_fits(problem)
        assert plan is not None
        return changed(plan, SPLIT | self.changes.pop(0))


SLOW_DRIVE = nominal_machine(1, host_bytes=4 << 30, device_bytes=None)
SLOW_DRIVE = dataclasses.replace(
    SLOW_DRIVE,
    drives=tuple(
        dataclasses.replace(drive, read_bytes_per_second=1e6, write_bytes_per_second=9e6, mixed_bytes_per_second=9e6)
        for drive in SLOW_DRIVE.drives
    ),
)
IN_MEMORY = {
    "update_policy": "deferred",
    "late_units": everything,
    "resident_states": everything,
    "host_slots": 4,
    "prefetch": 1,
}
DEFERRED = {"update_policy": "deferred", "late_units": everything}


def show_a_slow_drive(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the engine's steps show that its drive is slow, whatever they took."""

    def seen() -> tuple[dict[Lane, Seen], int]:
        assert engine.plan is not None
        lanes = forecast(engine.plan, SLOW_DRIVE).timeline.lanes
        return {lane: Seen(use.busy_seconds, use.bytes, 1) for lane, use in lanes.items()}, 1

    monkeypatch.setattr(engine._lanes, "seen", seen)


@pytest.mark.wide
def test_a_run_takes_faster_plans_twice_at_most_with_the_same_bits(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(path, tmp_path / "one", max_grad_norm=None) as engine:
        expected = list(stepped(engine, ()))
        weights = exported(engine, tmp_path / "one-out")
    search = Searches(ON_SSD | DEFERRED, {"host_slots": 3} | ON_SSD | DEFERRED, IN_MEMORY, IN_MEMORY)
    monkeypatch.setattr(headrace.ask.planner, "make_plan", search)
    given = {"host_memory": "4GiB", "learning_rate": 1e-3, "tokens_per_step": ROWS * LENGTH, "sequence_length": LENGTH}
    options = headrace.Options(output=tmp_path / "many", max_grad_norm=None, **given)
    with Engine.open(path, options, lambda event: None) as engine:
        assert engine.plan_again() is None, "no step has shown anything"
        found = list(stepped(engine, (), last=2))
        show_a_slow_drive(engine, monkeypatch)
        before = engine.plan
        assert engine.plan_again() is None, "nothing is gained"
        assert engine.plan == before
        taken = engine.plan_again()
        assert taken is not None
        assert engine.plan == taken.plan
        assert taken.seconds * 1.1 < taken.seconds_before
        assert len(engine.plan.resident_states) == len(engine.plan.units)
        found += list(stepped(engine, (), last=3))
    search.changes = [ON_SSD | DEFERRED, IN_MEMORY]
    with Engine.resume(tmp_path / "many", sink=lambda event: None) as engine:
        assert engine.plan is not None
        assert engine.plan.updates == taken.plan.updates
        assert engine.take_plan(changed(engine.plan, ON_SSD))  # so that there is something to gain once more
        found += list(stepped(engine, (), last=4))
        show_a_slow_drive(engine, monkeypatch)
        assert engine.plan_again() is None
        assert engine.plan_again() is not None
        found += list(stepped(engine, ()))
        search.changes = [IN_MEMORY]
        assert engine.take_plan(changed(engine.plan, ON_SSD))
        assert engine.plan_again() is None
        assert search.changes, "it was not even looked for"
        assert found == expected
        for name, want in exported(engine, tmp_path / "many-out").items():
            assert weights[name].equal(want), name


@pytest.mark.wide
def test_a_given_plan_is_never_changed_by_itself_nor_after_a_resume(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(path, tmp_path / "one", max_grad_norm=None) as engine:
        plan = engine.plan
    given = {"host_memory": "4GiB", "tokens_per_step": ROWS * LENGTH, "sequence_length": LENGTH, "max_grad_norm": None}
    monkeypatch.setattr(headrace.ask.planner, "make_plan", lambda *given: pytest.fail("a plan was looked for"))
    with Engine.open(path, headrace.Options(output=tmp_path / "run", **given), lambda event: None, plan=plan) as engine:
        list(stepped(engine, (), last=2))
        assert engine.plan_again() is None
    with Engine.resume(tmp_path / "run", sink=lambda event: None) as engine:
        list(stepped(engine, (), last=4))
        assert engine.plan_again() is None


def test_totals_of_lanes_are_those_of_operations(path: Path, tmp_path: Path) -> None:
    """Without the first step; and two operations of one lane that overlap are busy once."""
    events: list[Any] = []
    with opened(path, tmp_path / "run", events.append, max_grad_norm=None) as engine:
        list(stepped(engine, (), last=3))
        engine.flush()
        assert engine._lanes is not None
        seen, steps = engine._lanes.seen()
    assert steps == 2
    ops = [event for event in events if isinstance(event, OpDone) and event.step > 0]
    assert set(seen) == {op.lane for op in ops}
    for lane, has in seen.items():
        mine = [op for op in ops if op.lane == lane]
        assert (has.bytes, has.operations) == (sum(op.bytes for op in mine), len(mine)), lane
        busy = union_seconds((op.start_seconds, op.stop_seconds) for op in mine)
        assert has.seconds == pytest.approx(busy, rel=1e-6) if lane is Lane.COMPUTE else has.seconds <= busy * (1 + 1e-6), lane
        assert has.seconds > 0, lane
