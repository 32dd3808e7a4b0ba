"""The run from outside: what lies in the run directory, stops and resumes, steps and epochs, refusals.

Run: pytest tests/runs
"""

import errno
import json
import os
import shutil
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from training_fakes import FakeHost, Screen, fake_plan, run_options, write_data, write_model
from transformers import TrainerState

from headrace.ask.answer import report_of
from headrace.ask.plan_report import PlanReport
from headrace.data.batches import open_data
from headrace.data.tokens import tokenize
from headrace.files import DirectFile
from headrace.files.yaml_options import from_yaml
from headrace.machine.meter import MemoryMeter
from headrace.plan.clock.machine_profiles import load_profile
from headrace.plan.value.plan import Plan
from headrace.report import read_metrics
from headrace.runs import Interrupted, RunOptions, resume, train
from headrace.terms.errors import (
    ConfigError,
    DataError,
    DiskFull,
    ExportFailed,
    ModelError,
    PlanInfeasible,
    RunDirectoryError,
    StepFailed,
    StorageError,
)
from headrace.terms.events import Notice, OpDone, StepResult
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.options.optimizer import Schedule


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return run_options(tmp_path, max_steps=8, measure=False)


def broken() -> None:
    raise StepFailed("lane ssd-write failed")


class TestARun:
    def test_leaves_what_the_issue_promises(self, options: dict[str, Any]) -> None:
        screen, host = Screen(), FakeHost()
        done = train(RunOptions.of(options | {"report_to": ["trace"]}), display=screen, engines=host.engines())
        run = options["output"]
        assert (done.final, done.steps) == (run / "final", 8)
        assert [record["step"] for record in read_metrics(run / "metrics.jsonl")] == list(range(1, 9))
        state = TrainerState.load_from_json(str(run / "trainer_state.json"))
        assert (state.global_step, state.max_steps, len(state.log_history)) == (8, 8, 8)
        steps_in_trace = {entry["args"].get("step") for entry in json.loads((run / "trace.json").read_text())}
        assert set(range(1, 9)) <= steps_in_trace
        assert "library_name: transformers" in (run / "final" / "README.md").read_text()
        assert not (run / "fake.json").exists()
        assert host.made[0].closed

    def test_leaves_scalars_for_tensorboard(self, options: dict[str, Any]) -> None:
        pytest.importorskip("tensorboard")
        train(RunOptions.of(options | {"report_to": ["tensorboard"]}), engines=FakeHost().engines())
        assert list((options["output"] / "tensorboard").iterdir())

    def test_shows_plan_notices_and_steps(self, options: dict[str, Any]) -> None:
        screen = Screen()
        train(RunOptions.of(options), display=screen, engines=FakeHost().engines())
        assert screen.events[0] == Notice(text="a notice while opening")
        assert [event.step for event in screen.events if isinstance(event, StepResult)] == list(range(1, 9))
        assert [event.step for event in screen.events if isinstance(event, OpDone)] == list(range(1, 9))
        assert screen.events[-1] == Notice(text="closed")

    def test_the_table_before_the_run_is_that_of_the_plan_command(self, options: dict[str, Any]) -> None:
        screen = Screen()
        train(RunOptions.of(options), display=screen, engines=FakeHost().engines())
        report = report_of(fake_plan(), None, model="model", num_steps=8)
        before, expected = screen.said[0].splitlines(), report.explain().splitlines()
        assert before == expected
        assert next(line for line in before if line.startswith("allowed")).split()[1:] == ["4", "KiB", "8", "KiB"]

    def test_the_plan_is_shown_once_and_before_the_model_is_imported(self, options: dict[str, Any]) -> None:
        screen, host = Screen(), FakeHost()
        shown: list[list[str]] = []
        host.while_importing = lambda: shown.append(list(screen.said))
        train(RunOptions.of(options), display=screen, engines=host.engines())
        (before,) = shown
        assert before == screen.said[:1]
        assert "allowed" in before[0]
        assert sum("allowed" in text for text in screen.said) == 1
        assert json.loads((options["output"] / "plan.json").read_text())["placement"]["results"]["peak_bytes"]

    def test_an_import_that_fails_leaves_nothing_though_the_plan_was_shown(self, options: dict[str, Any]) -> None:
        def fail() -> None:
            raise ModelError("NaN")

        host = FakeHost()
        host.while_importing = fail
        with pytest.raises(ModelError):
            train(RunOptions.of(options), engines=host.engines())
        assert not options["output"].exists()

    @pytest.mark.parametrize("measured", [True, False])
    def test_planned_against_measured_after_the_run(
        self, options: dict[str, Any], measured: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(MemoryMeter, "peak_bytes", lambda self: 1000)  # this process has more than the plan of the fake
        screen = Screen()
        more = {"machine": "rtx4090-1ssd"} if measured else {}
        train(RunOptions.of(options | more), display=screen, engines=FakeHost().engines())
        table = next(text for text in screen.said if "measured" in text.splitlines()[0])
        rows = {line[:20].strip(): line[20:].split() for line in table.splitlines()}
        assert rows["peak, host"] == ["2", "KiB", "1.95", "KiB", "0.98"]
        assert rows["peak, ssd"] == ["4", "KiB", "-", "-"]
        assert ("bench machine" in table) is not measured
        values = json.loads((options["output"] / "summary.json").read_text())
        found = values["planned_and_measured"]
        assert found["host_peak_bytes"] == {"unit": "bytes", "planned": 2048, "measured": 2000, "ratio": 2000 / 2048}
        assert found["ssd_bytes_written_per_step"]["measured"] == 12
        assert found["step_seconds"]["measured"] == 0.25
        assert found["step_seconds"]["ratio"] == 0.25 / found["step_seconds"]["planned"]
        assert (values["steps"], values["measured_machine"]) == (8, measured)

    def test_is_told_with_the_drives_that_it_has(self, options: dict[str, Any]) -> None:
        screens = [Screen(), Screen()]
        for screen, machine in zip(screens, ("rtx4090-4ssd", "rtx4090-1ssd"), strict=True):
            changes = {"machine": machine, "output": options["output"].with_name(machine)}
            train(RunOptions.of(options | changes), display=screen, engines=FakeHost().engines())
        tables = [[line for line in screen.said[0].splitlines() if line[:4] in ("time", "run ", "ssd ")] for screen in screens]
        assert tables[0] == tables[1]
        kept = json.loads((options["output"].with_name("rtx4090-4ssd") / "machine.json").read_text())
        assert len(kept["drives"]) == 1

    def test_keeps_the_state_where_asked(self, options: dict[str, Any]) -> None:
        train(RunOptions.of(options | {"keep_state": True}), engines=FakeHost().engines())
        assert (options["output"] / "fake.json").exists()

    def test_hands_the_options_to_the_engine(self, options: dict[str, Any]) -> None:
        host = FakeHost()
        more = {"learning_rate": 3e-4, "warmup_steps": 2, "lr_schedule": "cosine", "max_grad_norm": 0, "host_memory": "2GiB"}
        train(RunOptions.of(options | more), engines=host.engines())
        model, opened = host.opened[0]
        assert model == options["model"]
        assert opened.learning_rate == 3e-4
        assert opened.schedule == Schedule("cosine", 2, 8)
        assert opened.max_grad_norm is None
        assert (opened.budget.host_bytes, opened.output) == (2 << 30, options["output"])
        assert (opened.tokens_per_step, opened.sequence_length) == (64, 32)

    def test_a_padding_token_that_the_model_has_no_embedding_for_fills_no_row(
        self, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        load_tokens = open_data.load_tokens

        def with_added_token(*arguments: Any) -> Any:
            tokens = load_tokens(*arguments)
            return replace(tokens, info=replace(tokens.info, pad_id=10**6))

        monkeypatch.setattr(open_data, "load_tokens", with_added_token)
        host = FakeHost(packing=False)
        train(RunOptions.of(options), engines=host.engines())
        assert max(int(batch["input_ids"].max()) for batch in host.made[0].batches) < 10**6

    def test_what_is_left_out_of_the_data_is_said_before_the_first_step(
        self, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        load_tokens = open_data.load_tokens
        monkeypatch.setattr(
            open_data, "load_tokens", lambda *given: replace(load_tokens(*given), notices=("2 samples are odd",))
        )
        screen = Screen()
        train(RunOptions.of(options), display=screen, engines=FakeHost().engines())
        assert screen.said[0] == "note: 2 samples are odd"

    def test_measures_the_whole_life_of_the_process_and_tells_of_it_when_the_model_is_written(
        self, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Tokenising comes before the first step, and the export after the last."""
        written, summary = options["output"] / "final" / "README.md", options["output"] / "summary.json"

        class Meter(MemoryMeter):
            def peak_bytes(self) -> int:
                assert summary.exists() == written.exists()  # once before the model, and once after it
                return 5 << 30 if written.exists() else 3 << 30

        monkeypatch.setattr("headrace.runs.loop.MemoryMeter", Meter)
        train(RunOptions.of(options), engines=FakeHost().engines())
        found = json.loads(summary.read_text())
        assert found["planned_and_measured"]["host_peak_bytes"]["measured"] == 5 << 30

    def test_one_epoch_is_the_default_and_shows_every_sample_once(self, options: dict[str, Any]) -> None:
        host = FakeHost(packing=False)
        del options["max_steps"]
        done = train(RunOptions.of(options), engines=host.engines())
        assert done.steps == 20  # 40 samples, unpacked, 2 rows a step
        records = read_metrics(options["output"] / "metrics.jsonl")
        assert records[-1]["epoch"] == 1.0

    def test_the_resolved_options_repeat_the_run(self, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(options["model"].parent)
        train(RunOptions.of(options | {"model": "model", "data": "data.jsonl"}), engines=FakeHost().engines())
        config = from_yaml(options["output"] / "config.yaml")
        assert (config.packing, config.max_steps) == (True, 8)
        assert config.model == options["model"]
        assert config.data == (options["data"],)
        again = train(
            RunOptions.of(vars(config) | {"output": options["output"].with_name("again")}), engines=FakeHost().engines()
        )
        assert (again.final / "weights").read_text() == (options["output"] / "final" / "weights").read_text()


class TestResume:
    def unbroken(self, options: dict[str, Any]) -> str:
        done = train(RunOptions.of(options | {"output": options["output"].with_name("unbroken")}), engines=FakeHost().engines())
        return (done.final / "weights").read_text()

    @pytest.mark.parametrize("at", [0, 3, 7])
    def test_after_a_broken_step_every_batch_comes_exactly_once(self, options: dict[str, Any], at: int) -> None:
        run = options["output"]
        with pytest.raises(StepFailed):
            train(RunOptions.of(options), engines=FakeHost(script={at: broken}).engines())
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 99, "loss": 0}\n{"st')  # a step that was never committed, and half a line
        done = resume(run, engines=FakeHost().engines())
        assert (done.final / "weights").read_text() == self.unbroken(options)
        assert [record["step"] for record in read_metrics(run / "metrics.jsonl")] == list(range(1, 9))

    @pytest.mark.parametrize("measured", [True, False])
    def test_says_in_one_line_what_goes_on(self, options: dict[str, Any], measured: bool) -> None:
        """Whoever began it was shown the plan."""
        more = {"machine": "rtx4090-1ssd"} if measured else {}
        with pytest.raises(StepFailed):
            train(RunOptions.of(options | more), engines=FakeHost(script={3: broken}).engines())
        screen = Screen()
        resume(options["output"], display=screen, engines=FakeHost().engines())
        first, table, done = screen.said
        assert first.startswith(f"resuming {options['output']} after step 3 of 8: the plan is unchanged, 2 KiB of host memory")
        assert ("left" in first) is measured
        assert "\n" not in first
        assert "measured" in table.splitlines()[0]
        assert done.startswith("done")

    @pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    def test_a_signal_lets_the_step_finish_and_says_how_to_go_on(
        self, options: dict[str, Any], number: signal.Signals, code: int
    ) -> None:
        before = signal.getsignal(number)
        host = FakeHost(script={2: lambda: os.kill(os.getpid(), number)})
        with pytest.raises(Interrupted, match=r"step 3 of 8.*headrace resume") as caught:
            train(RunOptions.of(options), engines=host.engines())
        assert (caught.value.exit_code, caught.value.step) == (code, 3)
        assert host.made[0].closed
        assert json.loads((options["output"] / "summary.json").read_text())["steps"] == 3
        assert signal.getsignal(number) is before
        done = resume(options["output"], engines=FakeHost().engines())
        assert (done.final / "weights").read_text() == self.unbroken(options)

    def test_a_run_whose_export_was_cut_off_is_finished_without_a_step(self, options: dict[str, Any]) -> None:
        train(RunOptions.of(options | {"keep_state": True}), engines=FakeHost().engines())
        (options["output"] / "final" / "README.md").unlink()
        host = FakeHost(script=dict.fromkeys(range(20), broken))
        assert resume(options["output"], engines=host.engines()).steps == 8
        assert (options["output"] / "final" / "README.md").exists()

    @pytest.mark.parametrize("linked", [False, True])
    @pytest.mark.parametrize("steps", [3, None])
    def test_another_model_in_final_is_not_taken_for_this_runs(
        self, options: dict[str, Any], tmp_path: Path, linked: bool, steps: int | None
    ) -> None:
        """An export of an earlier step, or a link to whatever; the state would be removed, and with it the training."""
        with pytest.raises(StepFailed):
            train(RunOptions.of(options), engines=FakeHost(script={3: broken}).engines())
        final, other = options["output"] / "final", tmp_path / "other"
        other.mkdir()
        (other / "config.json").write_text("{}")
        (other / "weights").write_text("another's")
        if steps is not None:
            (other / "headrace.json").write_text(json.dumps({"run_id": str(options["output"]), "steps": steps}))
        final.symlink_to(other) if linked else other.rename(final)
        with pytest.raises(ExportFailed, match=r"final: something else is there, and is kept; move it away.*headrace resume"):
            resume(options["output"], engines=FakeHost().engines())
        assert (final / "weights").read_text() == "another's"
        final.unlink() if linked else final.rename(other)
        done = resume(options["output"], engines=FakeHost(script=dict.fromkeys(range(20), broken)).engines())
        assert (done.final / "weights").read_text() == self.unbroken(options)
        assert not (options["output"] / "fake.json").exists()

    def test_a_run_killed_before_its_first_commit_begins_again(self, options: dict[str, Any]) -> None:
        with pytest.raises(StepFailed):
            train(RunOptions.of(options), engines=FakeHost(script={0: broken}).engines())
        host = FakeHost()
        (options["output"] / "fake.json").unlink()
        assert resume(options["output"], engines=host.engines()).steps == 8
        assert host.discarded == [options["output"]]

    @pytest.mark.parametrize("kept", [True, False])
    def test_a_run_goes_on_by_its_own_copy_of_a_profile_that_was_removed(self, options: dict[str, Any], kept: bool) -> None:
        profile, copy = options["output"].with_name("profile.json"), options["output"] / "machine.json"
        profile.write_text(json.dumps(load_profile("rtx4090-4ssd").to_json()))
        with pytest.raises(StepFailed):
            train(RunOptions.of(options | {"machine": str(profile)}), engines=FakeHost(script={3: broken}).engines())
        profile.unlink()
        before = copy.read_text()
        if not kept:
            copy.write_text("{")
        screen = Screen()
        resume(options["output"], display=screen, engines=FakeHost().engines())
        assert ("bench machine" not in "".join(screen.said)) is kept
        if kept:
            assert copy.read_text() == before

    def test_drives_are_those_of_the_run_also_when_it_goes_on(
        self, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of four directories the first two are on one drive: the copy has three, the second of which is the third's."""
        ssd = [tmp_path / f"ssd{index}" for index in range(4)]
        for directory in ssd:
            directory.mkdir()
        rates, profile = (1e9, 2e9, 3e9, 4e9), load_profile("rtx4090-4ssd")
        drives = [
            replace(drive, read_bytes_per_second=rate, write_bytes_per_second=rate, mixed_bytes_per_second=rate)
            for drive, rate in zip(profile.drives, rates, strict=True)
        ]
        path = tmp_path / "profile.json"
        path.write_text(json.dumps(replace(profile, drives=tuple(drives)).to_json()))
        monkeypatch.setattr("headrace.runs.account.file_systems", lambda directories: (0, 0, 2, 3))
        asked: list[list[float]] = []

        def asks(plan: Plan, ceilings: Ceilings, **more: Any) -> PlanReport:
            asked.append([drive.mixed_bytes_per_second for drive in ceilings.drives])
            return report_of(plan, ceilings, **more)

        monkeypatch.setattr("headrace.runs.account.report_of", asks)
        more = {"machine": str(path), "ssd": [str(directory) for directory in ssd]}
        with pytest.raises(StepFailed):
            train(RunOptions.of(options | more), engines=FakeHost(script={3: broken}).engines())
        copy = options["output"] / "machine.json"
        before = copy.read_text()
        assert [drive["mixed_bytes_per_second"] for drive in json.loads(before)["drives"]] == [1e9, 3e9, 4e9]
        resume(options["output"], engines=FakeHost().engines())
        assert copy.read_text() == before
        assert asked == [[1e9, 3e9, 4e9]] * 2

    @pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EROFS])
    def test_a_run_goes_on_where_no_more_can_be_written(
        self, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: int
    ) -> None:
        (tmp_path / "ssd").mkdir()
        with pytest.raises(StepFailed):
            train(RunOptions.of(options | {"ssd": [str(tmp_path / "ssd")]}), engines=FakeHost(script={3: broken}).engines())

        def refuse(directory: Path, num_bytes: int) -> None:
            try:
                raise OSError(reason, os.strerror(reason))
            except OSError as error:
                raise (DiskFull if reason == errno.ENOSPC else StorageError)(str(error)) from error

        monkeypatch.setattr(DirectFile, "nameless", refuse)
        assert resume(options["output"], engines=FakeHost().engines()).steps == 8

    def test_a_finished_run_says_where_its_model_is(self, options: dict[str, Any]) -> None:
        train(RunOptions.of(options), engines=FakeHost().engines())
        host = FakeHost()
        with pytest.raises(RunDirectoryError, match=r"finished; its model is in .*final"):
            resume(options["output"], engines=host.engines())
        assert host.discarded == [options["output"]]  # what a removal that was killed may have left

    def test_a_run_whose_state_is_gone_keeps_its_record_and_does_not_begin_again(self, options: dict[str, Any]) -> None:
        with pytest.raises(StepFailed):
            train(RunOptions.of(options), engines=FakeHost(script={3: broken}).engines())
        (options["output"] / "fake.json").unlink()
        before = (options["output"] / "metrics.jsonl").read_text()
        with pytest.raises(RunDirectoryError, match="had taken 3 steps, but its state is gone"):
            resume(options["output"], engines=FakeHost().engines())
        assert (options["output"] / "metrics.jsonl").read_text() == before

    def begun_by_earlier_rules(self, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, at: int | None = 3) -> None:
        """Begin a run whose tokens the rules of format 3 made: here, they train everything, backwards."""
        encode_rows = tokenize.encode_rows

        def backwards(*given: Any, **options: Any) -> Any:
            return (
                replace(each, ids=each.ids[::-1], trained=[True] * len(each.ids)) for each in encode_rows(*given, **options)
            )

        row = {"prompt": "the quick", "completion": " fox jumps over the lazy dog"}
        Path(options["data"]).write_text((json.dumps(row) + "\n") * 40)
        with monkeypatch.context() as patch:
            for module in [each for name, each in sys.modules.items() if name.startswith("headrace.data.")]:
                if hasattr(module, "FORMAT_VERSION"):  # each module that imports it has a name of its own
                    patch.setattr(module, "FORMAT_VERSION", 3)
            patch.setattr(tokenize, "encode_rows", backwards)
            if at is None:
                train(RunOptions.of(options), engines=FakeHost().engines())
                return
            with pytest.raises(StepFailed):
                train(RunOptions.of(options), engines=FakeHost(script={at: broken}).engines())

    def test_a_run_goes_on_with_the_tokens_that_earlier_rules_made(
        self, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.begun_by_earlier_rules(options | {"output": options["output"] / "whole"}, monkeypatch, at=None)
        whole = (options["output"] / "whole" / "final" / "weights").read_text()
        options["output"] /= "broken"
        self.begun_by_earlier_rules(options, monkeypatch)
        screen = Screen()
        done = resume(options["output"], display=screen, engines=FakeHost().engines())
        assert (done.final / "weights").read_text() == whole
        assert any("keeps the tokens that it began with" in each for each in screen.said)
        options["output"] = options["output"].parent / "new"
        train(RunOptions.of(options), display=screen, engines=FakeHost().engines())
        assert (options["output"] / "final" / "weights").read_text() != whole

    def test_a_run_whose_tokens_of_earlier_rules_are_gone_is_refused_in_one_line(
        self, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.begun_by_earlier_rules(options, monkeypatch)
        for kept in Path(options["cache"]).glob("tokens-*"):
            shutil.rmtree(kept, ignore_errors=True)
        with pytest.raises(DataError, match=r"^[^\n]*earlier version of the rules[^\n]*$"):
            resume(options["output"], engines=FakeHost().engines())

    def test_changed_data_is_refused(self, options: dict[str, Any]) -> None:
        with pytest.raises(StepFailed):
            train(RunOptions.of(options), engines=FakeHost(script={3: broken}).engines())
        write_data(Path(options["data"]), samples=30)
        with pytest.raises(DataError, match="digest"):
            resume(options["output"], engines=FakeHost().engines())

    @pytest.mark.parametrize("there", [True, False])
    def test_a_directory_that_is_no_run_is_refused(self, tmp_path: Path, there: bool) -> None:
        path = tmp_path / "elsewhere"
        if there:
            path.mkdir()
        with pytest.raises(RunDirectoryError, match="headrace train"):
            resume(path, engines=FakeHost().engines())


class TestRefusals:
    def refused(self, options: dict[str, Any], host: FakeHost | None = None) -> str:
        existed = options["output"].exists()
        with pytest.raises((ModelError, ConfigError, DataError, RunDirectoryError, PlanInfeasible)) as caught:
            train(RunOptions.of(options), engines=(host or FakeHost()).engines())
        assert options["output"].exists() == existed
        return str(caught.value)

    def test_a_run_directory_with_a_run_in_it(self, options: dict[str, Any]) -> None:
        options["output"].mkdir()
        (options["output"] / "config.yaml").write_text("model: x\n")
        assert "headrace resume" in self.refused(options)
        assert (options["output"] / "config.yaml").read_text() == "model: x\n"

    @pytest.mark.parametrize("when", ["while it is prepared", "while it is opened"])
    def test_two_runs_that_begin_in_one_directory(self, options: dict[str, Any], when: str) -> None:
        """The second to come leaves the first one's options and state alone, also where it had looked before the first came."""
        first, changed = FakeHost(script={3: broken}), options | {"learning_rate": 0.5}

        opened = when == "while it is opened"

        def begin() -> None:
            """If the second is being opened it has written its options, and a third may resume by them."""
            run = partial(resume, options["output"]) if opened else partial(train, RunOptions.of(options))
            with pytest.raises(StepFailed):
                run(engines=first.engines())

        second = FakeHost()

        def why_not_packed(model: Path, sequence_length: int) -> str:
            begin()
            return ""

        def open_engine(*words: Any, **named: Any) -> Any:
            begin()
            raise RunDirectoryError("holds a run already")

        engines = second.engines()
        engines = replace(engines, open=open_engine) if opened else replace(engines, why_not_packed=why_not_packed)
        with pytest.raises(RunDirectoryError, match="holds a run"):
            train(RunOptions.of(changed), engines=engines)
        assert resume(options["output"], engines=FakeHost().engines()).steps == 8
        kept = from_yaml(options["output"] / "config.yaml").learning_rate
        assert kept == (0.5 if opened else RunOptions.of(options).learning_rate)

    def test_long_names_make_a_default_one_that_can_be_made(
        self, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "runs").mkdir()
        data = options["data"] if isinstance(options["data"], str | Path) else options["data"][0]
        long = Path(data).rename(tmp_path / f"{'wässer' * 35}.jsonl")
        model = Path(options["model"]).rename(tmp_path / ("m" * 60))
        config = RunOptions.of({**options, "model": str(model), "data": [str(long)], "output": None})
        done = train(config, engines=FakeHost().engines())
        assert done.run_directory.parent == tmp_path / "runs"
        assert done.run_directory.name.startswith(f"{model.name}-wässer")

    def test_an_empty_run_directory_is_taken(self, options: dict[str, Any]) -> None:
        options["output"].mkdir()
        assert train(RunOptions.of(options), engines=FakeHost().engines()).steps == 8

    def test_a_plan_that_does_not_fit_leaves_nothing(self, options: dict[str, Any]) -> None:
        error = PlanInfeasible("host: 3 GiB needed", tier="host", needed_bytes=3, allowed_bytes=1)
        assert "3 GiB" in self.refused(options, FakeHost(fail=error))

    def test_missing_model_config_and_tokenizer(self, options: dict[str, Any], tmp_path: Path) -> None:
        assert ": no such directory; " in self.refused(options | {"model": tmp_path / "nothing"})
        (tmp_path / "empty").mkdir()
        assert "config.json" in self.refused(options | {"model": tmp_path / "empty"})
        (tmp_path / "empty" / "config.json").write_text("{}")
        assert "tokenizer is missing" in self.refused(options | {"model": tmp_path / "empty"})

    def test_a_tokenizer_of_another_model(self, options: dict[str, Any]) -> None:
        write_model(options["model"], vocab_size=100)
        assert "0 to 99 only" in self.refused(options)

    def test_packing_for_a_model_that_cannot(self, options: dict[str, Any]) -> None:
        assert "packing" in self.refused(options | {"packing": True}, FakeHost(packing=False))

    def test_more_positions_than_the_model_has(self, options: dict[str, Any]) -> None:
        assert "256 positions" in self.refused(options | {"sequence_length": 512, "tokens_per_step": 512})
