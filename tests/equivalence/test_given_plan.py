"""The plan of another run: the same bits within another budget, and a clear word where it is not for this run.

Run: pytest tests/equivalence/test_given_plan.py
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import batch_of
from plan_changes import changed
from tiers import sampled

from headrace import Options
from headrace.ask.answer import plan_model
from headrace.engine.trainer import Engine
from headrace.plan.clock.nominal import nominal_machine
from headrace.plan.search.given import load_plan
from headrace.plan.value.plan import Plan
from headrace.terms.errors import ConfigError, PlanInfeasible

ROWS, LENGTH = 6, 32
STEP = {"host_memory": "4GiB", "max_grad_norm": None, "tokens_per_step": ROWS * LENGTH, "sequence_length": LENGTH}


def run(
    path: Path, folder: Path, host: str = "4GiB", *, hooks: dict[str, Any] | None = None, **options: Any
) -> tuple[Plan, list[float], bytes]:
    """Return the plan, losses and final weights of a run of three steps."""
    given = STEP | {"host_memory": host, "learning_rate": 1e-3} | options
    with Engine.open(path, Options(output=folder, **given), **hooks or {}) as engine:
        losses = [engine.step(batch_of(ROWS, LENGTH, seed)).loss for seed in range(3)]
        engine.save_pretrained(folder / "out")
        assert engine.plan is not None
        return engine.plan, losses, (folder / "out" / "model.safetensors").read_bytes()


@pytest.fixture
def path(model_dir: Callable[..., Path]) -> Path:
    return model_dir("llama")


def one_row_at_a_time(plan: Plan) -> Plan:
    """Another plan than the planner's, so that a run that made its own would not have it by chance."""
    return changed(plan, micro_batch_sequences=1, num_micro_batches=ROWS, accumulate=True, loss_chunk_tokens=16)


def on_the_same_drive(plan: Plan, other: Plan) -> Plan:
    """Return the plan with what was free on the SSD for the other: by then it is another figure, no choice of the planner's."""
    return plan.with_results(allowed_bytes={**plan.results.allowed_bytes, "ssd": other.results.allowed_bytes["ssd"]})


@pytest.mark.wide
def test_the_same_plan_is_the_same_bits(path: Path, tmp_path: Path) -> None:
    first, *bits = run(path, tmp_path / "first", hooks={"adjust_plan": one_row_at_a_time})
    (tmp_path / "first" / "plan.json").write_text(json.dumps(first.to_json()))
    given = load_plan(tmp_path / "first")
    assert given == first
    second, *same = run(path, tmp_path / "second", "5GiB", hooks={"plan": given})
    assert second.batch.micro_batch_sequences == 1
    assert same == bits
    third, *other = run(path, tmp_path / "third")
    assert third.batch.micro_batch_sequences > 1
    assert other != bits, "the test shows nothing if every plan has the same bits"


@pytest.mark.wide
def test_a_process_with_other_libraries_has_the_same_plan(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the interpreter takes differs by a mebibyte or two from process to process, and the budget is just enough."""

    def takes(mebibytes: float) -> None:
        monkeypatch.setattr("headrace.ask.place.anonymous_bytes", lambda: int(mebibytes * (1 << 20)))

    takes(401.0)
    least, *_ = run(path, tmp_path / "least")
    just_enough = str(least.peak("host"))
    first, *bits = run(path, tmp_path / "first", just_enough, hooks={"plan": least})
    takes(403.5)
    second, *same = run(path, tmp_path / "second", just_enough, hooks={"plan": first})
    assert on_the_same_drive(second, first) == first
    assert same == bits
    takes(440.0)
    with pytest.raises(PlanInfeasible, match="host memory: the plan that was given needs"):
        run(path, tmp_path / "third", just_enough, hooks={"plan": first})
    assert not (tmp_path / "third").exists()


@pytest.mark.wide
def test_what_headrace_plan_says_can_be_run(path: Path, tmp_path: Path) -> None:
    report = plan_model(path / "config.json", Options(**STEP | {"max_grad_norm": 1.0}))
    (tmp_path / "plan.json").write_text(json.dumps(report.to_json()))
    plan, losses, _ = run(path, tmp_path / "run", max_grad_norm=1.0, hooks={"plan": load_plan(tmp_path / "plan.json")})
    assert report.plan is not None
    assert plan.batch.micro_batch_sequences == report.plan.batch.micro_batch_sequences
    assert all(torch.isfinite(torch.tensor(losses)))


@pytest.mark.wide
@pytest.mark.parametrize(
    ("planned_with", "options", "words"),
    [
        ({}, {"tokens_per_step": 3 * LENGTH}, "tokens_per_step 192 in the plan, 96 here"),
        ({}, {"sequence_length": LENGTH // 2}, "sequence_length 32 in the plan, 16 here"),
        ({"update_policy": "immediate", "late_units": ()}, {"max_grad_norm": 1.0}, "clipping no in the plan, yes here"),
        ({}, {"compute_dtype": "float32"}, "compute_dtype bfloat16 in the plan, float32 here"),
        ({}, {"optimizer": "adamw8bit"}, "rule AdamW in the plan, AdamW with int8 moments here"),
        ({"checkpoint_every": 7}, {"checkpoint_every": 3}, "checkpoint_every 7 in the plan, 3 here"),
    ],
)
def test_another_runs_plan_is_refused(
    path: Path, tmp_path: Path, planned_with: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    given = changed(planned(path, tmp_path), **planned_with)
    with pytest.raises(ConfigError, match=words):
        run(path, tmp_path / "run", hooks={"plan": given}, **options)
    assert not (tmp_path / "run").exists()


def test_a_figure_that_is_no_number_is_refused(path: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(planned(path, tmp_path).to_json() | {"host_slots": "3"}))
    with pytest.raises(ConfigError, match="host_slots is '3'"):
        load_plan(tmp_path / "plan.json")


def test_a_plan_for_more_cores_or_another_model_is_refused(path: Path, tmp_path: Path, model_dir: Callable[..., Path]) -> None:
    given = planned(path, tmp_path)
    with pytest.raises(ConfigError, match=r"parameters .* in the plan, .* here; units differ"):
        run(model_dir("llama-tied"), tmp_path / "run", hooks={"plan": given})
    larger = Plan.from_json(given.to_json() | {"compute_threads": 999})
    with pytest.raises(ConfigError, match="999 threads in the plan"):
        run(path, tmp_path / "run", hooks={"plan": larger})


@pytest.mark.parametrize(
    ("changes", "words"),
    sampled(
        [
            ({"micro_batch_sequences": 0}, "micro_batch_sequences 0"),
            ({"num_micro_batches": 5}, "5 micro-batches"),
            ({"host_slots": 0}, "host_slots 0"),
            ({"chunk_elements": -4}, "chunk_elements -4"),
            ({"stash_tiers": ["device"]}, "stash_tiers of 1 blocks, where there are 4"),
            ({"stash_tiers": ["tape"] * 4}, "block inputs on 'tape'"),
            ({"kept": [[99], [], [], []]}, "kept or skipped operators of block 1"),
            ({"operators": [["aten.mm.default"]] * 4, "skipped": [[]] * 4, "kept": [[]] * 4}, "blocks with other operators"),
        ]
    ),
)
def test_a_plan_that_was_edited_is_refused(path: Path, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    damaged = Plan.from_json(json.loads(json.dumps(changed(planned(path, tmp_path), **changes).to_json())))
    with pytest.raises(ConfigError, match=words):
        run(path, tmp_path / "run", hooks={"plan": damaged})
    assert not (tmp_path / "run").exists()


def planned(path: Path, folder: Path) -> Plan:
    with Engine.open(path, Options(output=folder / "planned", **STEP)) as engine:
        assert engine.plan is not None
        return engine.plan


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read"),
        ("{", "not JSON"),
        ("[1]", "no plan of this version"),
        ('{"units": [{"name": "block"}]}', "no plan of this version"),
        ('{"fits": false, "plan": null}', "does not fit"),
        ('{"fits": true}', "no plan of this version"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "plan.json").write_text(content)
    with pytest.raises(ConfigError, match=words):
        load_plan(tmp_path / "plan.json")


@pytest.mark.wide
def test_a_run_that_was_measured_is_planned_and_resumed_by_that(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that was given the same figures; and resumed by its record, whatever would be measured then."""
    # What the interpreter takes grows a little from run to run, and is part of a plan's peak.
    monkeypatch.setattr("headrace.ask.place.anonymous_bytes", lambda: 401 << 20)
    figures = dataclasses.replace(nominal_machine(2, host_bytes=4 << 30, device_bytes=None), name="measured", cores=2)
    asked: list[Plan] = []

    def measure(plan: Plan, machine: object) -> Any:
        asked.append(plan)
        return figures

    planned, *bits = run(path, tmp_path / "given", machine=figures)
    found, *same = run(path, tmp_path / "measured", hooks={"measure": measure})
    assert on_the_same_drive(found, planned) == planned
    assert same == bits
    assert len(asked) == 1
    with Engine.resume(tmp_path / "measured") as engine:
        assert engine.plan is not None
        assert engine.plan.to_json() | {"results": None} == found.to_json() | {"results": None}
        assert engine.options.machine == figures
    run(path, tmp_path / "again", hooks={"measure": measure}, machine=figures)
    assert len(asked) == 1
