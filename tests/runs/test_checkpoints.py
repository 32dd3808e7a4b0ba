"""Models that a run keeps: when, which of them go, on request, and what a resumed run writes again.

Run: pytest tests/runs/test_checkpoints.py
"""

import json
import os
import signal
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from training_fakes import FakeHost, Screen, run_options

from headrace.report.metrics import best_of
from headrace.runs import Interrupted, RunOptions, resume, train
from headrace.runs.checkpoints import Checkpoints
from headrace.terms.errors import ConfigError, ExportFailed, StepFailed
from headrace.terms.events import Notice


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return run_options(tmp_path, max_steps=8, measure=False)


def kept(run: Path) -> list[int]:
    return sorted(int(path.name.rpartition("-")[2]) for path in run.glob("checkpoint-*"))


def killed(*given: Any) -> None:
    raise StepFailed("killed")


class TestWhen:
    @pytest.mark.parametrize(
        ("more", "steps"),
        [
            ({}, []),
            ({"save_steps": 3}, [3, 6, 8]),
            ({"save_steps": 4}, [4, 8]),
            ({"save_steps": 99}, [8]),
            ({"save_steps": 3, "save_total_limit": 2}, [6, 8]),
            ({"save_total_limit": 9, "eval_split": 0.2, "eval_steps": 3}, [3, 6, 8]),
            ({"save_total_limit": 2, "eval_split": 0.2, "eval_steps": 3}, [6, 8]),
            ({"save_total_limit": 9, "packing": False, "tokens_per_step": 320, "eval_split": 0.2}, [4, 7, 8]),
            ({"save_total_limit": 9, "packing": False, "tokens_per_step": 320}, [4, 8]),
        ],
    )
    def test_by_the_interval_or_with_evaluations_or_epochs_and_the_last(
        self, options: dict[str, Any], more: dict[str, Any], steps: list[int]
    ) -> None:
        train(RunOptions.of(options | more), engines=FakeHost().engines())
        assert kept(options["output"]) == steps
        assert not list(options["output"].glob(".*"))

    def test_each_is_the_model_of_its_step_and_final_that_of_the_last(self, options: dict[str, Any]) -> None:
        train(RunOptions.of(options | {"save_steps": 3}), engines=FakeHost().engines())
        run = options["output"]
        for step in (3, 6, 8):
            assert json.loads((run / f"checkpoint-{step}" / "headrace.json").read_text())["steps"] == step
        contents = {step: (run / f"checkpoint-{step}" / "weights").read_text() for step in (3, 6, 8)}
        assert len({*contents.values()}) == 3
        assert (run / "final" / "weights").read_text() == contents[8]
        assert (run / "final" / "README.md").exists()
        assert not (run / "checkpoint-8" / "README.md").exists()

    def test_training_is_the_same(self, options: dict[str, Any], tmp_path: Path) -> None:
        hosts = [FakeHost(), FakeHost()]
        train(RunOptions.of(options), engines=hosts[0].engines())
        train(RunOptions.of(options | {"save_steps": 1, "output": tmp_path / "other"}), engines=hosts[1].engines())
        first, other = ([each["input_ids"].tolist() for each in host.made[0].batches] for host in hosts)
        assert first == other

    @pytest.mark.parametrize("wrong", [{"save_steps": 0}, {"save_total_limit": 0}, {"save_steps": 1.5}])
    def test_what_cannot_be_is_refused(self, options: dict[str, Any], wrong: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            train(RunOptions.of(options | wrong), engines=FakeHost().engines())
        assert not options["output"].exists()


class TestTheBest:
    LOSSES = {2: 1.2, 4: 1.5, 6: 1.4, 8: 1.3}

    def asked(self, options: dict[str, Any], **more: Any) -> RunOptions:
        return RunOptions.of(options | {"eval_steps": 2, "eval_split": 0.2} | more)

    @pytest.mark.parametrize(("limit", "steps"), [(1, [2, 8]), (2, [2, 8]), (3, [2, 6, 8]), (4, [2, 4, 6, 8])])
    def test_is_spared(self, options: dict[str, Any], limit: int, steps: list[int]) -> None:
        host = FakeHost()
        host.losses.update(self.LOSSES)
        train(self.asked(options, save_total_limit=limit), engines=host.engines())
        assert kept(options["output"]) == steps

    def test_is_final_and_stays_a_checkpoint(self, options: dict[str, Any]) -> None:
        host, run = FakeHost(), options["output"]
        host.losses.update(self.LOSSES)
        train(self.asked(options, save_steps=4, load_best_model_at_end=True), engines=host.engines())
        assert kept(run) == [2, 4, 8]
        assert json.loads((run / "final" / "headrace.json").read_text())["steps"] == 2
        assert "weights after step 2" in (run / "final" / "README.md").read_text()

    def test_once_best_goes_unless_it_was_due(self, options: dict[str, Any]) -> None:
        host = FakeHost()
        host.losses.update({2: 1.5, 4: 1.4, 6: 1.3, 8: 1.35})
        train(self.asked(options, save_steps=4, load_best_model_at_end=True), engines=host.engines())
        assert kept(options["output"]) == [4, 6, 8]

    def test_of_a_run_that_stops_early_the_last_is_kept(self, options: dict[str, Any]) -> None:
        host = FakeHost()
        host.losses.update(self.LOSSES)
        train(self.asked(options, save_steps=5, early_stopping_patience=1), engines=host.engines())
        assert kept(options["output"]) == [4]

    @given(st.sets(st.integers(1, 30), min_size=1), st.dictionaries(st.integers(1, 30), st.floats(0, 2)), st.integers(1, 5))
    def test_and_the_newest_are_never_superseded(self, steps: set[int], losses: dict[int, float], limit: int) -> None:
        evaluations = [{"step": step, "eval_loss": loss} for step, loss in sorted(losses.items())]
        config = SimpleNamespace(save_total_limit=limit, load_best_model_at_end=False, saves=True)
        plan: Any = Checkpoints(config, None)  # type: ignore[arg-type]
        going = plan.superseded(steps, evaluations)
        left = steps - going
        assert max(steps) in left
        best = best_of(each for each in evaluations if each["step"] in steps)
        assert best is None or best["step"] in left
        assert len(left) <= max(limit, 2)
        assert len(left) >= min(limit, len(steps))
        assert not plan.superseded(left, evaluations)


class TestOnRequest:
    def test_by_a_signal(self, options: dict[str, Any]) -> None:
        screen, host = Screen(), FakeHost(script={2: lambda: signal.raise_signal(signal.SIGUSR1)})
        train(RunOptions.of(options), display=screen, engines=host.engines())
        assert kept(options["output"]) == [3]
        assert any(isinstance(event, Notice) and "model kept" in event.text for event in screen.events)
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL

    def test_by_a_file_which_goes(self, options: dict[str, Any]) -> None:
        host = FakeHost(script={4: lambda: (options["output"] / "save").touch()})
        train(RunOptions.of(options), engines=host.engines())
        assert kept(options["output"]) == [5]
        assert not (options["output"] / "save").exists()

    def test_already_while_the_model_is_imported(self, options: dict[str, Any]) -> None:
        host = FakeHost()
        host.while_importing = lambda: os.kill(os.getpid(), signal.SIGUSR1)
        train(RunOptions.of(options), engines=host.engines())
        assert kept(options["output"]) == [1]

    def test_beside_others_it_counts_against_the_limit(self, options: dict[str, Any]) -> None:
        host = FakeHost(script={4: lambda: signal.raise_signal(signal.SIGUSR1)})
        train(RunOptions.of(options | {"save_steps": 4, "save_total_limit": 2}), engines=host.engines())
        assert kept(options["output"]) == [5, 8]


class TestAResumedRun:
    @pytest.mark.parametrize("at", [3, 6, 8])
    @pytest.mark.parametrize("function", ["loop.keep_model", "checkpoints.remove_superseded"])
    def test_writes_again_what_was_broken_off(
        self, options: dict[str, Any], at: int, function: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        host, run, calls = FakeHost(), options["output"], list[int]()
        name = f"headrace.runs.{function}"
        own = _attribute(name)

        def sometimes(*given: Any) -> Any:
            if host.made[-1].step_index == at:
                calls.append(at)
                killed()
            return own(*given)

        with monkeypatch.context() as patch:
            patch.setattr(name, sometimes)
            with pytest.raises(StepFailed):
                train(RunOptions.of(options | {"save_steps": 3, "save_total_limit": 2}), engines=host.engines())
        assert calls == [at]
        resume(run, engines=host.engines())
        assert kept(run) == [6, 8]
        assert (run / "final" / "headrace.json").exists()

    def test_stopped_in_a_step_that_is_due_keeps_it_first(self, options: dict[str, Any]) -> None:
        host = FakeHost(script={3: lambda: signal.raise_signal(signal.SIGINT)})
        with pytest.raises(Interrupted):
            train(RunOptions.of(options | {"save_steps": 4}), engines=host.engines())
        assert kept(options["output"]) == []
        resume(options["output"], engines=host.engines())
        assert kept(options["output"]) == [4, 8]
        assert json.loads((options["output"] / "checkpoint-4" / "headrace.json").read_text())["steps"] == 4


class TestWithoutSpace:
    def test_training_goes_on_and_says_so(self, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        screen, host = Screen(), FakeHost()
        own = _attribute("headrace.runs.loop.keep_model")

        def full(engine: Any, path: Path, *given: Any) -> Any:
            if path.name == "checkpoint-3":
                raise ExportFailed("no space")
            return own(engine, path, *given)

        monkeypatch.setattr("headrace.runs.loop.keep_model", full)
        train(RunOptions.of(options | {"save_steps": 3}), display=screen, engines=host.engines())
        assert kept(options["output"]) == [6, 8]
        assert any(isinstance(event, Notice) and "checkpoint-3 was not written" in event.text for event in screen.events)

    @pytest.mark.parametrize(
        ("more", "models"),
        [
            ({}, 1),
            ({"save_steps": 3}, 4),
            ({"save_steps": 3, "save_total_limit": 1}, 2),
            ({"save_total_limit": 3}, 4),
            ({"save_total_limit": 1, "eval_split": 0.2}, 3),
            ({"save_steps": 4, "eval_split": 0.2, "load_best_model_at_end": True}, 4),
            ({"eval_split": 0.2, "load_best_model_at_end": True}, 2),
        ],
    )
    def test_no_run_begins(self, options: dict[str, Any], more: dict[str, Any], models: int) -> None:
        assert RunOptions.of(options | more).models_at_once == models

    @given(st.integers(1, 9), st.none() | st.integers(1, 4), st.booleans(), st.lists(st.floats(0, 2), min_size=8, max_size=8))
    def test_never_more_are_there_than_were_asked_for(
        self, every: int, limit: int | None, best: bool, losses: list[float]
    ) -> None:
        """A run of eight steps, each evaluated, by the rules alone."""
        more = {"eval_split": 0.1, "eval_steps": 1, "load_best_model_at_end": best}
        config = RunOptions.of(
            {"model": "m", "data": "d", "max_steps": 8, "save_steps": every, "save_total_limit": limit} | more
        )
        evaluations = SimpleNamespace(total_steps=8)
        plan = Checkpoints(config, evaluations)  # type: ignore[arg-type]
        there: Collection[int] = set()
        most, records = 0, list[dict[str, Any]]()
        for step, loss in enumerate(losses, start=1):
            records.append({"step": step, "eval_loss": loss})
            newest = best_of(records)
            if plan.due(step) or (best and newest is records[-1]):
                there = {*there, step}
                most = max(most, len(there))
                there = {*there} - plan.superseded(there, records)
        assert max(most, len(there) + 1) <= config.models_at_once


def _attribute(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(__import__(module, fromlist=[attribute]), attribute)
