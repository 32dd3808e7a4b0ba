"""A resumed run's plan counts what libraries take in the process that goes on, not in the one that began.

Run: pytest tests/memory/test_resumed_plan.py
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import headrace
from headrace.engine.trainer import Engine
from headrace.plan.value.allowance import planned_runtime_bytes
from headrace.terms.events import Event, Notice

GIB = 1 << 30


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step."""
    folder = tmp_path_factory.mktemp("begun")
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / "model")
    options = {"tokens_per_step": 64, "sequence_length": 32, "max_grad_norm": None}
    with Engine.open(folder / "model", headrace.Options(host_memory="4GiB", output=folder / "run", **options)) as engine:
        engine.step(batch())
    return folder / "run"


def batch() -> dict[str, torch.Tensor]:
    ids = torch.arange(64).reshape(2, 32)
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize(("runtime_bytes", "warned"), [(GIB, False), (5 * GIB, True)])
def test_the_runtime_row_is_this_processs(
    begun: Path, monkeypatch: pytest.MonkeyPatch, runtime_bytes: int, warned: bool
) -> None:
    monkeypatch.setattr("headrace.ask.place.anonymous_bytes", lambda: runtime_bytes)
    events: list[Event] = []
    with Engine.resume(begun, sink=events.append) as engine:
        assert engine.plan is not None
        assert engine.plan.results.peak_bytes["host"]["runtime"] == planned_runtime_bytes(runtime_bytes)
        assert "import and export" in engine.plan.results.peak_bytes["host"]
        engine.step(batch())  # said, but not refused
    notices = [event.text for event in events if isinstance(event, Notice) and event.text.startswith("host memory")]
    assert bool(notices) == warned
    assert not warned or ("5." in notices[0] and "4 GiB allowed" in notices[0])


@pytest.mark.parametrize("more_bytes", [-2 << 20, 2 << 20])
def test_a_difference_between_processes_is_no_other_plan(begun: Path, monkeypatch: pytest.MonkeyPatch, more_bytes: int) -> None:
    monkeypatch.setattr("headrace.ask.place.anonymous_bytes", lambda: 3 * GIB)
    with Engine.resume(begun) as engine:
        engine.step(batch())
        before = engine.plan
    monkeypatch.setattr("headrace.ask.place.anonymous_bytes", lambda: 3 * GIB + more_bytes)
    with Engine.resume(begun) as engine:
        assert engine.plan == before


def test_the_record_keeps_what_was_measured_last(begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.ask.place.anonymous_bytes", lambda: 2 * GIB)
    with Engine.resume(begun) as engine:
        engine.step(batch())
    with Engine.resume(begun) as engine:
        assert engine.plan is not None
        assert engine.plan.to_json()["placement"]["results"]["peak_bytes"]["host"]["runtime"] == planned_runtime_bytes(2 * GIB)
