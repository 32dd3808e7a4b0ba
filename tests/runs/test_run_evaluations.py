"""Evaluation within a run: when, what is recorded, what is kept, and what a resumed run does again.

Run: pytest tests/runs/test_run_evaluations.py
"""

import json
import math
import re
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from training_fakes import FakeHost, Screen, run_options, write_data
from transformers import TrainerState

from headrace.data.batches.open_data import open_stream, with_lengths
from headrace.report.metrics import MetricsFile, best_of, evaluations_since_best, read_metrics, read_records
from headrace.runs import Interrupted, RunOptions, resume, train
from headrace.runs.evaluating import Evaluations
from headrace.terms.errors import ConfigError, DataError, ExportFailed, RunDirectoryError, StepFailed
from headrace.terms.events import Evaluated, Notice, StepResult


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return run_options(tmp_path, max_steps=8, measure=False, eval_split=0.2)


def evaluations(run: Path) -> list[dict[str, Any]]:
    return [record for record in read_records(run / "metrics.jsonl") if "eval_loss" in record]


def killed() -> None:
    raise StepFailed("killed")


class TestWhen:
    @pytest.mark.parametrize(
        ("more", "steps"), [({"eval_steps": 3}, [3, 6, 8]), ({"eval_steps": 4}, [4, 8]), ({"eval_steps": 99}, [8])]
    )
    def test_by_the_interval_and_at_the_last_step(
        self, options: dict[str, Any], more: dict[str, Any], steps: list[int]
    ) -> None:
        train(RunOptions.of(options | more), engines=FakeHost().engines())
        assert [each["step"] for each in evaluations(options["output"])] == steps

    def test_after_each_epoch_and_at_the_last_step(self, options: dict[str, Any]) -> None:
        config = RunOptions.of(options | {"packing": False, "tokens_per_step": 320, "max_steps": 8})  # 32 samples, 10 rows
        train(config, engines=FakeHost().engines())
        assert [each["step"] for each in evaluations(options["output"])] == [4, 7, 8]

    @given(st.integers(1, 200), st.integers(1, 30), st.integers(1, 50), st.none() | st.integers(1, 60))
    def test_as_often_as_the_plan_says(self, total: int, rows: int, per_step: int, every: int | None) -> None:
        class Stream:
            held_out = None

            @staticmethod
            def epochs_ended(steps: int) -> int:
                return steps * per_step // rows

        class Config:
            eval_steps = every

        found = Evaluations(Config(), Stream(), total)  # type: ignore[arg-type]
        found.__dict__["rows"] = object()
        due = [step for step in range(total + 1) if found.due(step)]
        assert len(due) == found.count
        assert due[-1] == total

    def test_nothing_is_evaluated_unasked(self, options: dict[str, Any]) -> None:
        host = FakeHost()
        del options["eval_split"]
        train(RunOptions.of(options), engines=host.engines())
        assert not host.made[0].evaluated
        assert not evaluations(options["output"])


class TestWhatIsHeldOut:
    def test_is_every_sample_once_and_none_of_them_is_trained(self, options: dict[str, Any]) -> None:
        host = FakeHost()
        train(RunOptions.of(options | {"packing": False, "epochs": 1, "max_steps": None}), engines=host.engines())

        def samples(batches: list[Any]) -> list[tuple[int, ...]]:
            return [
                tuple(row[mask.bool()].tolist())
                for each in batches
                for row, mask in zip(each["input_ids"], each["attention_mask"], strict=True)
            ]

        trained, held_out = samples(host.made[0].batches), samples(host.made[0].evaluated)
        assert len(set(held_out)) == len(held_out) == 8
        assert len({*trained, *held_out}) == 40
        assert not {*trained} & {*held_out}

    @given(st.one_of(st.floats(1e-6, 0.97), st.integers(1, 39)), st.integers(0, 1 << 70))
    def test_the_share_is_kept_by_seed(self, share: float, seed: int) -> None:
        import numpy as np

        from headrace.data.batches.held_out import split_off
        from headrace.data.values.tokens import TokenSet

        offsets = np.arange(0, 164, 4)
        info = _info(samples=40)
        tokens = TokenSet(None, None, offsets, info)  # type: ignore[arg-type]
        first, again = (split_off(tokens, share, seed) for _ in range(2))
        assert first.held_out is not None
        assert again.held_out is not None
        assert len(first.held_out) == (share if share >= 1 else math.ceil(share * 40))
        assert first.picked is not None
        assert first.held_out.picked is not None
        assert sorted([*first.picked, *first.held_out.picked]) == list(range(40))
        assert (first.info.digest, first.held_out.info.digest) == (again.info.digest, again.held_out.info.digest)
        assert len({first.info.digest, first.held_out.info.digest, info.digest}) == 3

    def test_a_file_of_its_own(self, options: dict[str, Any], tmp_path: Path) -> None:
        host = FakeHost()
        del options["eval_split"]
        other = write_data(tmp_path / "other.jsonl", 5)
        train(RunOptions.of(options | {"eval_data": str(other), "packing": False}), engines=host.engines())
        assert sum(len(each["input_ids"]) for each in host.made[0].evaluated) == 5

    @pytest.mark.parametrize("share", [40, 41, 0.99, 1000])
    def test_something_must_be_left_to_train(self, options: dict[str, Any], share: float) -> None:
        with pytest.raises(DataError, match="eval_split"):
            train(RunOptions.of(options | {"eval_split": share}), engines=FakeHost().engines())

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            ({"eval_split": 0.1, "eval_data": "x"}, "eval_split and eval_data"),
            ({"eval_split": None, "eval_steps": 5}, "eval_steps: nothing is held out"),
            ({"eval_split": None, "load_best_model_at_end": True}, "load_best_model_at_end: nothing is held out"),
            ({"eval_split": None, "early_stopping_patience": 1}, "early_stopping_patience: nothing is held out"),
            ({"eval_split": 1.5}, "whole number of samples"),
            ({"eval_split": 0}, "eval_split"),
            ({"eval_steps": 0}, "eval_steps"),
            ({"val_set_size": 0.1}, "did you mean 'eval_split'"),
            ({"val_size": 0.1}, "did you mean 'eval_split'"),
        ],
    )
    def test_what_cannot_be_is_refused(self, options: dict[str, Any], given: dict[str, Any], words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            train(RunOptions.of(options | given), engines=FakeHost().engines())
        assert not options["output"].exists()


def _info(samples: int) -> Any:
    from headrace.data.values.tokens import TokenInfo

    counts = dict.fromkeys(
        (
            "tokens",
            "trained_tokens",
            "cut_samples",
            "cut_tokens",
            "dropped_samples",
            "unmarked_samples",
            "pad_id",
            "largest_id",
        ),
        0,
    )
    return TokenInfo(sequence_length=8, samples=samples, kinds={}, digest="d", remarks=[], version=4, **counts)


class TestWhatIsRecorded:
    def test_a_line_of_its_own(self, options: dict[str, Any]) -> None:
        train(RunOptions.of(options | {"eval_steps": 4}), engines=FakeHost().engines())
        run = options["output"]
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert [(line["step"], "eval_loss" in line) for line in lines] == [
            (1, False),
            (2, False),
            (3, False),
            (4, False),
            (4, True),
            (5, False),
            (6, False),
            (7, False),
            (8, False),
            (8, True),
        ]
        assert set(lines[4]) == {"step", "eval_loss", "eval_tokens", "eval_seconds"}
        assert lines[4]["eval_loss"] == pytest.approx(1.96)
        assert [record["step"] for record in read_metrics(run / "metrics.jsonl")] == list(range(1, 9))

    def test_in_the_form_of_the_trainer(self, options: dict[str, Any]) -> None:
        host = FakeHost()
        host.losses.update({4: 1.5, 8: 1.75})
        train(RunOptions.of(options | {"eval_steps": 4}), engines=host.engines())
        state = TrainerState.load_from_json(str(options["output"] / "trainer_state.json"))
        assert (state.best_metric, state.best_global_step, state.eval_steps) == (1.5, 4, 4)
        assert [entry["eval_loss"] for entry in state.log_history if "eval_loss" in entry] == [1.5, 1.75]

    def test_on_the_screen_in_the_card_and_the_summary(self, options: dict[str, Any]) -> None:
        screen = Screen()
        train(RunOptions.of(options | {"eval_steps": 4}), display=screen, engines=FakeHost().engines())
        assert [event.step for event in screen.events if isinstance(event, Evaluated)] == [4, 8]
        assert "7 held-out rows, 2 times" in next(line for line in screen.said[1].splitlines() if line.startswith("evaluate"))
        assert "1.9200 after step 8, the lowest" in (options["output"] / "final" / "README.md").read_text()
        summary = json.loads((options["output"] / "summary.json").read_text())
        assert summary["planned_and_measured"]["evaluation_seconds"]["planned"] > 0

    def test_a_loss_that_is_no_number_is_null_and_said(self, options: dict[str, Any]) -> None:
        screen, host = Screen(), FakeHost()
        host.losses.update({8: math.nan})
        train(RunOptions.of(options), display=screen, engines=host.engines())
        assert evaluations(options["output"])[-1]["eval_loss"] is None
        assert any(isinstance(event, Notice) and "no finite loss" in event.text for event in screen.events)

    def test_tensorboard(self, options: dict[str, Any]) -> None:
        pytest.importorskip("tensorboard")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        train(RunOptions.of(options | {"eval_steps": 4, "report_to": ["tensorboard"]}), engines=FakeHost().engines())
        found = EventAccumulator(str(options["output"] / "tensorboard")).Reload()
        assert [each.step for each in found.Scalars("eval/loss")] == [4, 8]


class TestTraining:
    def test_is_the_same_with_and_without_evaluations(self, options: dict[str, Any], tmp_path: Path) -> None:
        seen = []
        for number, more in enumerate(({}, {"eval_steps": 1}, {"eval_steps": 3, "load_best_model_at_end": True})):
            host, output = FakeHost(), tmp_path / f"run-{number}"
            train(RunOptions.of(options | more | {"output": output}), engines=host.engines())
            seen.append([each["input_ids"].tolist() for each in host.made[0].batches])
        assert seen[0] == seen[1] == seen[2]


class TestAResumedRun:
    @pytest.mark.parametrize("at", [3, 6, 8])
    def test_does_an_evaluation_again_first(self, options: dict[str, Any], tmp_path: Path, at: int) -> None:
        config = options | {"eval_steps": 3, "load_best_model_at_end": True}
        whole = tmp_path / "whole"
        train(RunOptions.of(config | {"output": whole}), engines=FakeHost().engines())
        host = FakeHost()
        host.evaluating[at] = killed
        with pytest.raises(StepFailed):
            train(RunOptions.of(config), engines=host.engines())
        host.evaluating.clear()
        resume(options["output"], engines=host.engines())
        again = [each for each in (3, 6, 8) if each >= at]
        assert len(host.made[1].evaluated) == _passes(config) * len(again)
        assert [_plain(each) for each in evaluations(options["output"])] == [_plain(each) for each in evaluations(whole)]
        assert (options["output"] / "final" / "weights").read_text() == (whole / "final" / "weights").read_text()

    def test_a_stop_signal_breaks_an_evaluation_off(self, options: dict[str, Any]) -> None:
        host = FakeHost()
        host.evaluating[4] = lambda: signal.raise_signal(signal.SIGINT)
        config = RunOptions.of(options | {"eval_steps": 4, "eval_split": 0.5})
        with pytest.raises(Interrupted, match="after step 4"):
            train(config, engines=host.engines())
        assert not evaluations(options["output"])
        host.evaluating.clear()
        resume(options["output"], engines=host.engines())
        assert [each["step"] for each in evaluations(options["output"])] == [4, 8]

    def test_refuses_other_held_out_data(self, options: dict[str, Any], tmp_path: Path) -> None:
        del options["eval_split"]
        other = write_data(tmp_path / "other.jsonl", 5)
        host = FakeHost(script={5: killed})
        with pytest.raises(StepFailed):
            train(RunOptions.of(options | {"eval_data": str(other)}), engines=host.engines())
        write_data(other, 6)
        with pytest.raises(DataError, match="held_out_digest"):
            resume(options["output"], engines=host.engines())

    def test_refuses_another_split(self, options: dict[str, Any]) -> None:
        host = FakeHost(script={5: killed})
        with pytest.raises(StepFailed):
            train(RunOptions.of(options), engines=host.engines())
        config = options["output"] / "config.yaml"
        config.write_text(config.read_text().replace("eval_split: 0.2", "eval_split: 0.3"))
        with pytest.raises(DataError, match="cannot continue the data"):
            resume(options["output"], engines=host.engines())


def _plain(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != "eval_seconds"}


def _passes(options: dict[str, Any]) -> int:
    config = with_lengths(RunOptions.of(options))
    rows = Evaluations(config, open_stream(config), 8).rows
    assert rows is not None
    return rows.num_batches


class TestTheBest:
    LOSSES = {2: 1.5, 4: 1.2, 6: 1.3, 8: 1.4}

    def asked(self, options: dict[str, Any]) -> dict[str, Any]:
        return options | {"eval_steps": 2, "load_best_model_at_end": True}

    def test_becomes_final(self, options: dict[str, Any]) -> None:
        host, run = FakeHost(), options["output"]
        host.losses.update(self.LOSSES)
        train(RunOptions.of(self.asked(options)), engines=host.engines())
        assert json.loads((run / "final" / "headrace.json").read_text())["steps"] == 4
        card = (run / "final" / "README.md").read_text()
        assert "1.2000 after step 4, the lowest" in card
        assert "weights after step 4" in card
        assert not list(run.glob("*checkpoint-*"))

    @pytest.mark.parametrize(("killed_in", "at"), [("keep", 2), ("keep", 4), ("move", 2), ("move", 4), ("remove", 2)])
    def test_is_kept_or_kept_again_whenever_it_is_killed(
        self, options: dict[str, Any], killed_in: str, at: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        host, run = FakeHost(), options["output"]
        host.losses.update(self.LOSSES)
        names = {
            "keep": "headrace.runs.loop.keep_model",
            "move": "headrace.runs.finish._became_final",
            "remove": "headrace.runs.checkpoints.remove_tree",
        }
        calls = []

        def fail(*given: Any) -> None:
            calls.append(given)
            raise StepFailed("killed")

        with monkeypatch.context() as patch:
            patch.setattr(names[killed_in], fail)
            with pytest.raises(StepFailed):
                train(RunOptions.of(self.asked(options) | {"eval_steps": at}), engines=host.engines())
        assert calls
        resume(run, engines=host.engines())
        assert json.loads((run / "final" / "headrace.json").read_text())["steps"] == 4
        assert not list(run.glob("*checkpoint-*"))

    def test_that_somebody_removed_is_replaced_by_the_last(self, options: dict[str, Any]) -> None:
        screen, host, run = (
            Screen(),
            FakeHost(script={6: lambda: shutil.rmtree(options["output"] / "checkpoint-4")}),
            options["output"],
        )
        host.losses.update(self.LOSSES)
        train(RunOptions.of(self.asked(options)), display=screen, engines=host.engines())
        assert json.loads((run / "final" / "headrace.json").read_text())["steps"] == 8
        assert any("is gone" in text for text in screen.said)

    def test_what_others_put_in_its_place_stays(self, options: dict[str, Any]) -> None:
        def put() -> None:
            (options["output"] / "checkpoint-9").mkdir()
            (options["output"] / "checkpoint-9" / "mine").write_text("")

        host = FakeHost(script={1: put})
        host.losses.update(self.LOSSES)
        train(RunOptions.of(self.asked(options)), engines=host.engines())
        assert (options["output"] / "checkpoint-9" / "mine").exists()

    def test_without_space_the_run_is_intact(self, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        host = FakeHost()

        def full(*given: Any) -> None:
            raise ExportFailed("no space")

        with monkeypatch.context() as patch:
            patch.setattr("training_fakes.FakeEngine.save_pretrained", full)
            with pytest.raises(ExportFailed, match="headrace resume"):
                train(RunOptions.of(self.asked(options)), engines=host.engines())
        resume(options["output"], engines=host.engines())
        assert (options["output"] / "final" / "headrace.json").exists()


class TestStoppingEarly:
    @pytest.mark.parametrize(("patience", "steps"), [(1, 3), (2, 6), (3, 7), (4, 8)])
    def test_after_so_many_without_a_lower_loss(self, options: dict[str, Any], patience: int, steps: int) -> None:
        host, screen = FakeHost(), Screen()
        host.losses.update({1: 1.5, 2: 1.4, 3: 1.4, 4: 1.3, 5: 1.4, 6: 1.3, 7: 1.35, 8: 1.36})
        config = RunOptions.of(options | {"eval_steps": 1, "early_stopping_patience": patience})
        done = train(config, display=screen, engines=host.engines())
        assert done.steps == steps
        assert any("stopped early" in text for text in screen.said) is (steps < 8)

    def test_also_when_it_was_killed_then(self, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        host = FakeHost()
        host.losses.update(dict.fromkeys(range(9), 1.0))
        config = RunOptions.of(options | {"eval_steps": 1, "early_stopping_patience": 2})
        with monkeypatch.context() as patch:
            patch.setattr("headrace.runs.loop.write_final", lambda *given: killed())
            with pytest.raises(StepFailed):
                train(config, engines=host.engines())
        assert resume(options["output"], engines=host.engines()).steps == 3
        assert not host.made[1].batches

    @given(st.lists(st.none() | st.floats(0, 4), max_size=9))
    def test_the_count_is_that_of_a_loop(self, losses: list[float | None]) -> None:
        best, since = math.inf, 0
        for loss in losses:
            better = loss is not None and loss < best
            best, since = (loss, 0) if better and loss is not None else (best, since + 1)
        records = [{"step": step, "eval_loss": loss} for step, loss in enumerate(losses, start=1)]
        assert evaluations_since_best(records) == since
        found = best_of(records)
        assert (found["eval_loss"] if found else math.inf) == best


class TestReaders:
    STEP, SCORED = {"step": 1}, {"step": 1, "eval_loss": 2.5, "eval_tokens": 3, "eval_seconds": 0.5}

    @pytest.mark.parametrize(
        ("second", "words"),
        [
            ([SCORED, SCORED], "line 3: an evaluation of step 1 after the evaluation of step 1"),
            ([SCORED, STEP], "line 3: step 1 after the evaluation of step 1"),
            ([SCORED | {"step": 2}], "line 2: an evaluation of step 2 after step 1"),
            ([SCORED | {"eval_loss": "low"}], "line 2: no evaluation"),
            ([SCORED | {"eval_tokens": None}], "line 2: no evaluation"),
            ([{"step": 1, "eval_loss": 2.5}], "line 2: no evaluation"),
        ],
    )
    def test_refuse_what_no_run_writes(self, second: list[dict[str, Any]], words: str, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in [self.STEP, *second, {"step": 9}]))
        with pytest.raises(RunDirectoryError, match=re.escape(words)):
            read_records(path)

    @given(st.integers(0, 6), st.integers(0, 6), st.booleans())
    def test_what_was_not_committed_is_purged_and_done_again(self, committed: int, every: int, torn: bool) -> None:
        """Whatever the commit that a run resumes from, each step and each evaluation has one line in the end."""

        def write(first: int, path: Path) -> None:
            metrics = MetricsFile(path, committed_steps=first)
            for step in range(first, 7):
                if step > first:
                    metrics(
                        StepResult(step=step, loss=1.0, grad_norm=None, learning_rate=0, tokens=1, trained_tokens=1, seconds=1)
                    )
                if step and every and step % every == 0 and all(each["step"] != step for each in metrics.evaluations):
                    metrics(Evaluated(step=step, loss=2.0, tokens=1, seconds=1))
            metrics.close()

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "metrics.jsonl"
            write(0, path)
            whole = [(each["step"], "eval_loss" in each) for each in read_records(path)]
            if torn:
                path.write_text(path.read_text() + '{"step": 7, "eval_lo')
            write(committed, path)
            assert [(each["step"], "eval_loss" in each) for each in read_records(path)] == whole
