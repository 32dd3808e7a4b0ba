"""A model that is written while the next step is under way has the bits of one that is written between steps.

Run: pytest tests/equivalence/test_saving.py
"""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import sampled
from transformers import AutoModelForCausalLM, LlamaConfig

from headrace.engine.subject import Subject
from headrace.engine.trainer import Engine
from headrace.store import StateStore
from headrace.terms.errors import ExportFailed
from headrace.terms.options.run_options import RunOptions

WAYS: dict[str, dict[str, Any]] = {
    "deferred": {},
    "immediate": {"max_grad_norm": None},
    "adapters": {"adapter": "lora:rank=2"},
    "device tier": {"device_memory": "64MiB"},
    "lomo": {"optimizer": "lomo"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(
        vocab_size=160,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    return path


def options(model: Path, output: Path, **more: Any) -> RunOptions:
    sizes = {"tokens_per_step": 64, "sequence_length": 16, "host_memory": "4GiB", "learning_rate": 1e-3, "save_steps": 1}
    return RunOptions.of({"model": model, "data": "none", "output": output} | sizes | more)


def batch(seed: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, 160, (4, 16), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def weights(directory: Path) -> dict[str, bytes]:
    found = {path.name: path.read_bytes() for path in directory.glob("*.safetensors")}
    assert found
    return found


@pytest.mark.parametrize("way", sampled(WAYS, ["deferred"]))
def test_the_bits_are_those_of_the_step_though_the_next_one_has_written_all_of_its_own(
    way: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread begins to read when the next step asks to be committed, which is as late as it can be."""
    asked = options(model, tmp_path / "run", **WAYS[way])
    expected = []
    with Engine.open(model, asked.__class__.of(asked.to_json() | {"output": str(tmp_path / "other")})) as engine:
        for step in range(3):
            engine.step(batch(step))
            engine.save_pretrained(tmp_path / f"other-{step}")
            expected.append(weights(tmp_path / f"other-{step}"))
    committing, export, commit = threading.Event(), Subject.export, StateStore.commit

    def committed(self: StateStore, record: Any) -> None:
        committing.set()
        commit(self, record)

    def exported(self: Subject, store: Any, *given: Any) -> None:
        if not isinstance(store, StateStore):
            committing.wait()
        export(self, store, *given)

    with Engine.open(model, asked) as engine:
        engine.step(batch(0))
        engine.flush()
        monkeypatch.setattr(StateStore, "commit", committed)
        monkeypatch.setattr(Subject, "export", exported)
        committing.clear()
        saving = engine.begin_saving(tmp_path / "beside-0", {"note.txt": "mine"})
        assert not saving.done
        assert not (tmp_path / "beside-0").exists()
        engine.step(batch(1))
        engine.flush()
        saving.wait()
        assert (tmp_path / "beside-0" / "note.txt").read_text() == "mine"
        assert weights(tmp_path / "beside-0") == expected[0]
        engine.begin_saving(tmp_path / "beside-1").wait()  # nothing is under way
        engine.step(batch(2))
        engine.save_pretrained(tmp_path / "beside-2")
    assert [weights(tmp_path / f"beside-{step}") for step in (1, 2)] == expected[1:]


@pytest.mark.wide
def test_where_weights_are_made_steps_wait(model: Path, tmp_path: Path) -> None:
    with Engine.open(model, options(model, tmp_path / "run", gradient="lsp:dimension=8")) as engine:
        engine.step(batch(0))
        assert engine.begin_saving(tmp_path / "whole").done
        assert weights(tmp_path / "whole")


@pytest.mark.wide
def test_without_memory_for_both_steps_wait(model: Path, tmp_path: Path) -> None:
    asked = options(model, tmp_path / "run", save_steps=None)
    with Engine.open(model, asked) as engine:
        engine.step(batch(0))
        assert engine.begin_saving(tmp_path / "whole").done


def test_what_fails_is_told_to_whom_it_was_begun_for_and_steps_go_on(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine.open(model, options(model, tmp_path / "run")) as engine:
        engine.step(batch(0))
        with monkeypatch.context() as patch:

            def full(*given: Any) -> None:
                raise ExportFailed("no space")

            patch.setattr(Subject, "export", full)
            saving = engine.begin_saving(tmp_path / "kept")
            engine.step(batch(1))
            engine.flush()
            with pytest.raises(ExportFailed, match="no space"):
                saving.wait()
        assert not (tmp_path / "kept").exists()
        engine.begin_saving(tmp_path / "kept").wait()
        assert weights(tmp_path / "kept")


@pytest.mark.wide
def test_after_a_failed_step_it_ends_and_leaves_nothing(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, export = threading.Event(), threading.Event(), Subject.export

    def exported(self: Subject, *given: Any) -> None:
        begun.set()
        go_on.wait()
        export(self, *given)

    monkeypatch.setattr(Subject, "export", exported)
    with Engine.open(model, options(model, tmp_path / "run")) as engine:
        engine.step(batch(0))
        saving = engine.begin_saving(tmp_path / "kept")
        begun.wait()
        engine._saver._under_way.stop()  # type: ignore[union-attr]
        go_on.set()
        engine.step(batch(1))
        engine.flush()
        with pytest.raises(Exception, match="ended before it was whole"):
            saving.wait()
    assert not list(tmp_path.glob("*kept*"))
