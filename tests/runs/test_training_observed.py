"""A run records its lanes and its plan, so that `headrace report` has what it needs.

Run: pytest tests/runs/test_training_observed.py
"""

import json
from pathlib import Path

import pytest
from training_fakes import FakeHost, write_data, write_model

from headrace.report import read_recording
from headrace.report.metrics import read_metrics
from headrace.runs import RunOptions, resume, train


@pytest.fixture
def options(tmp_path: Path) -> dict[str, object]:
    model = tmp_path / "model"
    model.mkdir()
    return {
        "model": write_model(model),
        "data": str(write_data(tmp_path / "data.jsonl")),
        "output": tmp_path / "run",
        "cache": tmp_path / "cache",
        "tokens_per_step": 64,
        "sequence_length": 32,
        "max_steps": 6,
    }


def test_lanes_and_plan_are_written_and_count_steps_from_one(options: dict[str, object], tmp_path: Path) -> None:
    train(RunOptions.of(options), engines=FakeHost().engines())
    lines = read_metrics(tmp_path / "run" / "lanes.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[2]["lanes"]["compute"] == {"busy_seconds": 0.5, "idle_seconds": 0.5, "bytes": 0}
    recording = read_recording(tmp_path / "run" / "timeline.json")
    assert [step.step for step in recording.steps] == [5, 6]
    assert all(sizes["host"] > 0 for _, sizes in recording.memory)
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["placement"]["results"]["peak_bytes"]


def test_a_resumed_run_has_each_step_once_and_says_where_it_went_on(options: dict[str, object], tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("the power is gone")

    with pytest.raises(RuntimeError):
        train(RunOptions.of(options), engines=FakeHost(script={3: fail}).engines())
    resume(tmp_path / "run", engines=FakeHost().engines())
    lines = read_metrics(tmp_path / "run" / "lanes.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if line.get("resumed")] == [4]
