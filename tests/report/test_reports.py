"""Reporters: records without duplicates, HF-readable state, valid traces, words that state everything.

Run: pytest tests/report
"""

import errno
import io
import json
import math
import re
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from transformers import TrainerState

from headrace.report import (
    CardFacts,
    LineProgress,
    LiveProgress,
    MetricsFile,
    Reporters,
    TensorBoard,
    TraceFile,
    TrainerStateFile,
    metrics_record,
    model_card,
    read_metrics,
    ssd_bytes,
    steady_ssd_bytes,
)
from headrace.report.progress import StepClock
from headrace.terms.errors import RunDirectoryError
from headrace.terms.events import Committed, Event, Flushed, Notice, OpDone, StepResult


def step(number: int, **changes: object) -> StepResult:
    values: dict[str, object] = {
        "step": number,
        "loss": 3.0 / number,
        "grad_norm": 1.5,
        "learning_rate": 1e-5,
        "tokens": 512,
        "trained_tokens": 500,
        "seconds": 2.0,
        "bytes_read": {"ssd": 14_000_000_000},
        "bytes_written": {"ssd": 12_000_000_000},
        "peak_bytes": {"host": 1 << 30},
    }
    return StepResult(**(values | changes))


def operation(label: str, lane: str, start: float, stop: float, **changes: object) -> OpDone:
    values: dict[str, object] = {"step": 1, "verb": label.split()[0], "unit": 0, "micro": -1, "chunk": -1, "bytes": 0}
    return OpDone(label=label, lane=lane, start_seconds=start, stop_seconds=stop, **(values | changes))


class TestMetrics:
    def test_a_line_has_every_field_the_issue_names(self) -> None:
        record = metrics_record(step(1), epoch=0.5)
        wanted = {"step", "loss", "grad_norm", "lr", "tokens", "seconds", "bytes_read", "bytes_written", "peak_bytes"}
        assert wanted <= record.keys()
        assert record["tokens_per_second"] == 256.0

    def test_cpu_seconds_of_input_and_output_are_in_the_line_where_they_were_counted(self) -> None:
        assert metrics_record(step(1, io_cpu_seconds=0.12345678))["io_cpu_seconds"] == 0.123457
        assert "io_cpu_seconds" not in metrics_record(step(1))

    def test_values_that_are_no_numbers_are_strict_json_null(self) -> None:
        record = metrics_record(step(1, loss=math.nan, grad_norm=math.inf, skipped="gradient norm is inf"))
        text = json.dumps(record, allow_nan=False)
        assert json.loads(text)["loss"] is None
        assert record["skipped"] == "gradient norm is inf"

    @given(first=st.integers(0, 12), committed=st.integers(0, 12), second=st.integers(0, 5), torn=st.booleans())
    def test_a_resumed_file_has_each_step_once_and_in_order(
        self, tmp_path_factory: pytest.TempPathFactory, first: int, committed: int, second: int, torn: bool
    ) -> None:
        path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
        committed = min(first, committed)
        before = MetricsFile(path)
        for number in range(1, first + 1):
            before(step(number))
        before.close()
        if torn:
            with path.open("a") as file:
                file.write('{"step": 99, "lo')
        after = MetricsFile(path, committed_steps=committed)
        for number in range(committed + 1, committed + second + 1):
            after(step(number))
        after.close()
        assert [record["step"] for record in read_metrics(path)] == list(range(1, committed + second + 1))
        assert after.records == read_metrics(path)

    def test_what_a_flush_moved_is_kept_apart_in_the_last_steps_line(self, tmp_path: Path) -> None:
        metrics = MetricsFile(tmp_path / "metrics.jsonl")
        metrics(step(1, io_cpu_seconds=0.5))
        metrics(step(2, bytes_written={}))
        metrics(Flushed(bytes_read={"ssd": 5}, bytes_written={"ssd": 4}, io_cpu_seconds=0.25))
        metrics(Flushed(bytes_read={}, bytes_written={"ssd": 3}, io_cpu_seconds=0.25))
        metrics.close()
        metrics.close()
        first, second = read_metrics(tmp_path / "metrics.jsonl")
        assert first == metrics_record(step(1, io_cpu_seconds=0.5))
        moved = {"bytes_read": {"ssd": 5}, "bytes_written": {"ssd": 7}, "io_cpu_seconds": 0.5}
        assert second == {**metrics_record(step(2, bytes_written={})), "flushed": moved}
        assert (ssd_bytes(second, "bytes_read"), ssd_bytes(second, "bytes_written")) == (14_000_000_005, 7)
        assert metrics.records == [first, second]

    @pytest.mark.parametrize(
        ("written", "flushes", "mean"),
        [
            ([0, 6, 6], {2: 6}, 6),  # what a step leaves is written in the next one, what the last leaves in the flush
            ([2, 6, 6, 6], {3: 4}, 6),
            ([0, 6, 6, 0, 6, 6], {2: 6, 5: 6}, 6),  # two processes
            ([0], {0: 6}, 6),
            ([6, 6], {}, 6),
            ([0, 12, 0, 12, 0], {4: 12}, 6),
        ],
    )
    def test_the_mean_of_steady_steps_has_as_many_ends_as_beginnings(
        self, written: list[int], flushes: dict[int, int], mean: float
    ) -> None:
        records: list[Any] = [{"bytes_written": {"ssd": size}} for size in written]
        for index, size in flushes.items():
            records[index]["flushed"] = {"bytes_read": {}, "bytes_written": {"ssd": size}, "io_cpu_seconds": 0.0}
        assert steady_ssd_bytes(records, "bytes_written") == mean
        assert steady_ssd_bytes(records, "bytes_read") is None
        assert sum(ssd_bytes(record, "bytes_written") for record in records) == sum(written) + sum(flushes.values())

    @pytest.mark.parametrize(
        ("written", "resumed", "flushes", "mean"),
        [
            ([0, 6, 6, 0, 6, 6], {3}, {5: 6}, 6),  # killed: what step 3 left went with its process
            ([0, 6, 6, 0, 6, 6], {3}, {2: 6, 5: 6}, 6),  # stopped: that is in its flush
            ([0, 0, 6, 6], {1}, {0: 6, 3: 6}, 6),  # stopped after one step
            ([0, 0, 0], {1, 2}, {}, 0),  # killed after each step: there is nothing else
        ],
    )
    def test_what_a_killed_process_left_undone_is_missing_in_no_mean(
        self, written: list[int], resumed: set[int], flushes: dict[int, int], mean: float, tmp_path: Path
    ) -> None:
        metrics = MetricsFile(tmp_path / "metrics.jsonl")
        for index, size in enumerate(written):
            if index in resumed:
                metrics.close()
                metrics = MetricsFile(tmp_path / "metrics.jsonl", committed_steps=index)
            metrics(step(index + 1, bytes_written={"ssd": size}))
            if index in flushes:
                metrics(Flushed(bytes_read={}, bytes_written={"ssd": flushes[index]}, io_cpu_seconds=0.0))
        metrics.close()
        records = read_metrics(tmp_path / "metrics.jsonl")
        assert [index for index, record in enumerate(records) if "resumed" in record] == sorted(resumed)
        assert steady_ssd_bytes(records, "bytes_written") == mean

    def test_a_flush_in_the_middle_counts_also_before_a_step_without_ssds(self) -> None:
        moved = {"bytes_read": {}, "bytes_written": {"ssd": 6}, "io_cpu_seconds": 0.0}
        written = [{"ssd": 0}, {"ssd": 6}, {}]
        records: list[Any] = [{"bytes_written": sizes} for sizes in written]
        records[1]["flushed"] = moved
        assert steady_ssd_bytes(records, "bytes_written") == 12

    def test_a_broken_line_in_the_middle_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        path.write_text('{"step": 1}\n{"ste\n{"step": 3}\n')
        with pytest.raises(RunDirectoryError, match="line 2"):
            read_metrics(path)

    @pytest.mark.parametrize(
        ("old", "new", "words"),
        [
            ('"tokens"', '"uokens"', "a step without 'tokens', as if the file was damaged .it has bytes_read, uokens"),
            ('"loss"', '"lozs"', "a step without 'loss'"),
            ('"tokens": 64', '"tokens": "64"', "'tokens' is \"64\", as if"),
            ('"seconds": 1.0', '"seconds": null', "'seconds' is null"),
            ('{"ssd": 5}', '{"ssd": []}', "'bytes_read' is"),
            ('{"ssd": 5}', "5", "'bytes_read' is 5"),
        ],
    )
    def test_a_line_whose_figures_are_damaged_is_named(self, tmp_path: Path, old: str, new: str, words: str) -> None:
        path = tmp_path / "metrics.jsonl"
        line = '{"step": %d, "loss": 2.5, "tokens": 64, "seconds": 1.0, "bytes_read": {"ssd": 5}}\n'
        path.write_text((line % 1) + (line % 2).replace(old, new) + (line % 3))
        with pytest.raises(RunDirectoryError, match=f"line 2: {words}"):
            MetricsFile(path, committed_steps=3)

    def test_links_in_place_of_the_file_are_not_written_through(self, tmp_path: Path) -> None:
        other, path = tmp_path / "other", tmp_path / "metrics.jsonl"
        other.write_text("")
        path.symlink_to(other)
        MetricsFile(path).close()
        assert other.read_text() == ""
        assert not path.is_symlink()

    @pytest.mark.parametrize("line", ['{"step": ' + "3" * 5000 + "}", "[" * 100_000])
    def test_a_line_that_python_has_no_value_for_is_named(self, tmp_path: Path, line: str) -> None:
        path = tmp_path / "metrics.jsonl"
        path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
        with pytest.raises(RunDirectoryError, match="line 2: not JSON"):
            read_metrics(path)

    @pytest.mark.parametrize(
        ("line", "found"),
        [
            ("[]", "no step"),
            ('{"loss": 1.0}', "no step"),
            ('{"step": "3"}', 'step "3"'),
            ('{"step": 2.5}', "step 2.5"),
            ('{"step": true}', "step true"),
            ('{"step": 2}', "step 2"),
            ('{"step": -1}', "step -1"),
        ],
    )
    def test_a_line_that_is_of_no_later_step_is_named(self, tmp_path: Path, line: str, found: str) -> None:
        """Its steps say which lines a resumed run drops."""
        path = tmp_path / "metrics.jsonl"
        path.write_text(f'{{"step": 1}}\n{{"step": 2}}\n{line}\n{{"step": 4}}\n')
        with pytest.raises(RunDirectoryError, match=f"line 3: {re.escape(found)} after step 2, expected a later one"):
            MetricsFile(path, committed_steps=4)
        assert path.read_text().count("\n") == 4

    def test_a_line_that_was_removed_is_missed_by_nobody(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        path.write_text('{"step": 1}\n{"step": 3}\n')
        assert [record["step"] for record in read_metrics(path)] == [1, 3]

    def test_zeros_that_a_power_cut_left_behind_are_dropped(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        path.write_bytes(b'{"step": 1}\n\0\0\0\0\n\0\0')
        assert read_metrics(path) == [{"step": 1}]

    def test_a_line_is_readable_before_the_file_is_closed(self, tmp_path: Path) -> None:
        metrics = MetricsFile(tmp_path / "metrics.jsonl", steps_per_epoch=4)
        metrics(step(1))
        metrics(Committed(step=1, seconds=0.1))
        assert read_metrics(tmp_path / "metrics.jsonl")[0]["epoch"] == 0.25
        metrics.close()
        metrics.close()


class TestTrainerState:
    def test_stock_transformers_reads_it(self, tmp_path: Path) -> None:
        path = tmp_path / "trainer_state.json"
        records = [metrics_record(step(number), epoch=number / 4) for number in (1, 2, 3)]
        TrainerStateFile(path, records, max_steps=8, num_train_epochs=2, train_batch_size=4, clock=lambda: 0.0).close()
        state = TrainerState.load_from_json(str(path))
        assert (state.global_step, state.max_steps, state.epoch) == (3, 8, 0.75)
        assert [entry["loss"] for entry in state.log_history] == [3.0, 1.5, 1.0]
        assert state.num_input_tokens_seen == 3 * 512

    def test_it_is_not_rewritten_at_every_step(self, tmp_path: Path) -> None:
        now = [0.0]
        records = [metrics_record(step(1))]
        path = tmp_path / "trainer_state.json"
        sink = TrainerStateFile(path, records, max_steps=8, num_train_epochs=1, train_batch_size=4, clock=lambda: now[0])
        sink(step(1))
        records.append(metrics_record(step(2)))
        now[0] = 1.0
        sink(step(2))
        assert json.loads(path.read_text())["global_step"] == 1
        now[0] = 31.0
        sink(step(2))
        assert json.loads(path.read_text())["global_step"] == 2


class TestProgress:
    def test_a_line_says_everything_about_a_step(self) -> None:
        stream = io.StringIO()
        progress = LineProgress(stream, total_steps=10)
        progress(step(2))
        line = stream.getvalue()
        for words in ("step  2/10", "loss 1.5000", "grad norm 1.5", "lr 1e-05", "256 tokens/s", "2.0 s", "16.0 s left"):
            assert words in line
        assert "ssd 14 GB read 12 GB written" in line

    def test_a_line_has_the_reward_or_the_accuracy_of_a_loss_that_measures_one(self) -> None:
        stream = io.StringIO()
        progress = LineProgress(stream, total_steps=10)
        progress(step(2, loss=-1e-9, metrics={"reward": 0.59375, "reward_std": 0.4, "frac_reward_zero_std": 0.5}))
        progress(step(3, metrics={"rewards/accuracies": 0.75}))
        first, second = stream.getvalue().splitlines()
        assert "loss 0.0000  reward 0.594  frac_reward_zero_std 0.5  grad norm" in first
        assert "reward_std" not in first
        assert "  accuracy 0.75  " in second

    def test_skipped_steps_and_notices_are_stated(self) -> None:
        stream = io.StringIO()
        progress = LineProgress(stream, total_steps=10)
        progress(step(3, skipped="gradient norm is nan", grad_norm=math.nan))
        progress(Notice(text="the file system refuses O_DIRECT"))
        first, second = stream.getvalue().splitlines()
        assert "SKIPPED: gradient norm is nan" in first
        assert second == "warning: the file system refuses O_DIRECT"

    def test_a_long_first_step_does_not_spoil_the_time_left(self) -> None:
        clock = StepClock(total_steps=10)
        assert clock.remaining_seconds(step(1, seconds=100.0)) == 900
        assert clock.remaining_seconds(step(2)) == 16
        assert clock.remaining_seconds(step(3, seconds=3.0)) == 7 * 2.5

    def test_the_live_line_shows_words_literally_and_survives_two_closes(self) -> None:
        stream = io.StringIO()
        progress = LiveProgress(Console(file=stream, force_terminal=True, width=250), total_steps=10)
        progress(Notice(text="folder [/nvme0] is slow"))
        progress(step(1))
        progress(step(2, skipped="overflow [fp16]"))
        progress.close()
        progress.close()
        assert "[/nvme0]" in stream.getvalue()
        assert "overflow [fp16]" in stream.getvalue()

    @pytest.mark.parametrize("width", [60, 80, 120, 250])
    def test_the_live_line_has_first_what_is_left_and_no_word_is_cut(self, width: int) -> None:
        stream = io.StringIO()
        progress = LiveProgress(Console(file=stream, force_terminal=True, width=width), total_steps=1000)
        progress(step(400, seconds=20.0, loss_scale=1024.0))
        progress.close()
        line = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()).strip().splitlines()[-1]
        assert len(line) <= width
        assert "step  400/1000  3 h 20 min left  loss 0.0075" in line
        assert "…" not in line
        assert ("ssd 14 GB read 12 GB written" in line) is (width >= 80)
        assert ("lr 1e-05" in line) is (width >= 250)
        assert line.endswith(("written", "loss 0.0075", "tokens/s", "loss scale 1024", "20.0 s", "norm 1.5"))

    def test_the_live_line_stands_as_soon_as_the_first_step_runs(self) -> None:
        stream = io.StringIO()
        progress = LiveProgress(Console(file=stream, force_terminal=True, width=250), total_steps=10)
        progress(Notice(text="importing"))
        assert "first step" not in stream.getvalue()
        progress(operation("forward unit 1", "compute", 1.0, 2.0))
        assert "first step ..." in stream.getvalue()
        progress.close()


class TestTrace:
    def read(self, path: Path) -> list[dict[str, Any]]:
        return json.loads(path.read_text())

    def test_lanes_are_threads_and_times_are_microseconds(self, tmp_path: Path) -> None:
        trace = TraceFile(tmp_path / "trace.json")
        trace(operation("fetch unit 1", "ssd-read", 100.0, 100.5, bytes=1_000_000_000))
        trace(operation("forward unit 1", "compute", 100.25, 101.0, micro=2))
        trace.close()
        trace.close()
        entries = self.read(tmp_path / "trace.json")
        names = {entry["tid"]: entry["args"]["name"] for entry in entries if entry["name"] == "thread_name"}
        fetch, forward = [entry for entry in entries if entry["ph"] == "X"]
        assert (names[fetch["tid"]], names[forward["tid"]]) == ("ssd-read", "compute")
        assert (fetch["dur"], forward["ts"] - fetch["ts"]) == (500_000.0, 250_000.0)
        assert fetch["args"]["gigabytes_per_second"] == 2.0
        assert forward["args"] == {"step": 1, "unit": 0, "micro": 2}

    @given(
        st.lists(
            st.tuples(st.integers(0, 50), st.integers(0, 20), st.sampled_from(["ssd-read", "ssd-write", "lane of tomorrow"])),
            max_size=30,
        )
    )
    def test_slices_of_a_thread_never_overlap(self, spans: list[tuple[int, int, str]]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            trace = TraceFile(Path(folder) / "trace.json")
            for start, length, lane in spans:
                trace(operation("fetch", lane, float(start), float(start + length)))
            trace.close()
            entries = self.read(Path(folder) / "trace.json")
        names = {entry["tid"]: entry["args"]["name"] for entry in entries if entry["name"] == "thread_name"}
        slices = [entry for entry in entries if entry["ph"] == "X"]
        assert len(slices) == len(spans)
        for thread, name in names.items():
            own = sorted((entry["ts"], entry["ts"] + entry["dur"]) for entry in slices if entry["tid"] == thread)
            assert own
            assert all(one[1] <= other[0] for one, other in pairwise(own))
            assert name.rstrip(" 0123456789") in {"ssd-read", "ssd-write", "lane of tomorrow"}

    def test_a_lane_has_no_more_threads_than_it_does_at_once(self, tmp_path: Path) -> None:
        trace = TraceFile(tmp_path / "trace.json")
        for start in range(4):
            trace(operation("fetch", "ssd-read", start, start + 1.5))
        trace.close()
        names = {entry["args"]["name"] for entry in self.read(tmp_path / "trace.json") if entry["name"] == "thread_name"}
        assert names == {"ssd-read", "ssd-read 2"}

    def test_only_the_first_steps_are_kept(self, tmp_path: Path) -> None:
        trace = TraceFile(tmp_path / "trace.json", max_steps=2)
        for number in (5, 6, 7, 5):
            trace(operation("commit", "commit", number, number + 0.1, step=number))
        trace.close()
        kept = [entry["args"]["step"] for entry in self.read(tmp_path / "trace.json") if entry["ph"] == "X"]
        assert kept == [5, 6, 5]

    def test_an_unfinished_trace_needs_only_its_bracket(self, tmp_path: Path) -> None:
        trace = TraceFile(tmp_path / "trace.json")
        trace(operation("commit", "commit", 1.0, 2.0))
        trace(Committed(step=1, seconds=1.0))
        assert json.loads((tmp_path / "trace.json").read_text() + "]")
        trace.close()


def test_tensorboard_gets_the_scalars_and_purges_after_resume(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    first = TensorBoard(tmp_path)
    for number in (1, 2, 3):
        first(step(number))
    first.close()
    resumed = TensorBoard(tmp_path, committed_steps=2)
    resumed(step(3, loss=0.25))
    resumed.close()
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    losses = {event.step: event.value for event in events.Scalars("train/loss")}
    assert losses == {1: 3.0, 2: 1.5, 3: 0.25}
    assert len(events.Scalars("train/loss")) == 3


class Full:
    """A reporter whose disk is full from its second event on."""

    def __init__(self) -> None:
        self.seen = self.closed = 0

    def __call__(self, event: Event) -> None:
        self.seen += 1
        if self.seen > 1:
            raise OSError(errno.ENOSPC, "No space left on device")

    def close(self) -> None:
        self.closed += 1
        raise OSError(errno.ENOSPC, "still no space")


class TestAFullDisk:
    def test_breaks_nothing_and_is_remembered(self) -> None:
        reporters = Reporters()
        full, other = reporters.add(Full()), reporters.add(Exclusive())
        reporters(step(1))
        assert reporters.failure is None
        for number in (2, 3):
            reporters(step(number))
        assert (full.seen, full.closed, other.seen) == (2, 1, 3)
        assert str(reporters.failure) == "[Errno 28] No space left on device"
        reporters.close()
        assert (full.closed, other.closed) == (1, 1)

    def test_is_found_at_the_close_too_and_others_are_closed_all_the_same(self) -> None:
        reporters = Reporters()
        other = reporters.add(Exclusive())
        reporters.add(Full())
        reporters.close()
        assert str(reporters.failure) == "[Errno 28] still no space"
        assert other.closed == 1

    def test_our_own_mistakes_are_not_taken_for_one(self) -> None:
        def broken(event: Event) -> None:
            raise ZeroDivisionError

        broken.close = lambda: None
        reporters = Reporters()
        reporters.add(broken)
        with pytest.raises(ZeroDivisionError):
            reporters(step(1))


class Exclusive:
    """A reporter that notes when it is entered while it is busy."""

    def __init__(self) -> None:
        self.inside, self.overlaps, self.seen, self.closed = threading.Semaphore(1), 0, 0, 0

    def __call__(self, event: Event) -> None:
        if not self.inside.acquire(blocking=False):
            self.overlaps += 1
            return
        time.sleep(0)  # give other threads the chance to enter
        self.seen += 1
        self.inside.release()

    def close(self) -> None:
        self.closed += 1


def test_reporters_are_never_entered_twice_at_once_and_closed_once() -> None:
    hub = Reporters()
    first, second = hub.add(Exclusive()), hub.add(Exclusive())
    threads = [threading.Thread(target=lambda: [hub(step(1)) for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    hub.close()
    hub.close()
    for reporter in (first, second):
        assert (reporter.overlaps, reporter.seen, reporter.closed) == (0, 800, 1)


def ended(number: int) -> OpDone:
    return operation("fetch", "ssd-read", 0.0, 1.0, step=number)


class Slow:
    """Holds the step `held` until `gate` opens; keeps what it was given, in order."""

    def __init__(self, held: int) -> None:
        self.held, self.gate, self.entered = held, threading.Event(), threading.Event()
        self.seen: list[int] = []

    def __call__(self, event: Event) -> None:
        assert isinstance(event, OpDone | StepResult)
        if event.step == self.held:
            self.entered.set()
            assert self.gate.wait(200)
        self.seen.append(event.step)

    def close(self) -> None:
        pass


def test_a_lane_does_not_wait_for_what_a_reporter_does_for_another() -> None:
    hub = Reporters()
    slow = hub.add(Slow(held=0))
    other = threading.Thread(target=lambda: hub(ended(0)))
    other.start()
    assert slow.entered.wait(200)
    hub(ended(1))  # would not return before the gate opens if it waited
    hub(ended(2))
    assert slow.seen == []
    slow.gate.set()
    other.join(200)
    assert slow.seen == [0, 1, 2]  # the thread that was at it passed on what was left to it, in order
    hub(step(3))
    assert slow.seen == [0, 1, 2, 3]
    hub.close()


def test_a_result_is_written_when_the_call_returns_whoever_is_at_it() -> None:
    hub = Reporters()
    slow = hub.add(Slow(held=0))
    other = threading.Thread(target=lambda: hub(ended(0)))
    other.start()
    assert slow.entered.wait(200)
    threading.Timer(0.05, slow.gate.set).start()
    hub(step(7))
    assert slow.seen == [0, 7]
    other.join(200)


def test_no_operation_is_lost_between_threads() -> None:
    hub = Reporters()
    keeper = hub.add(Slow(held=-1))
    each = 300
    threads = [
        threading.Thread(target=lambda base=base: [hub(ended(base + index)) for index in range(each)])
        for base in (0, 1000, 2000, 3000)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(keeper.seen) == [base + index for base in (0, 1000, 2000, 3000) for index in range(each)]
    for base in (0, 1000, 2000, 3000):  # and those of one thread came in its order
        mine = [number for number in keeper.seen if base <= number < base + each]
        assert mine == sorted(mine)


def test_the_card_states_what_the_records_say_and_no_local_path_as_base_model() -> None:
    records = [metrics_record(step(1)), metrics_record(step(2, skipped="overflow"))]
    facts = {
        "data": ("train.jsonl",),
        "versions": {"torch": "2.13.0"},
        "options": {"epochs": 1, "optimizer": "sgd", "gradient": "dense", "train": "all"},
        "records": records,
    }
    card = model_card(CardFacts(name="tuned", base_model="tiny-llama", **facts))
    assert "base_model:" not in card
    assert "steps: 2 (1 skipped)" in card
    assert "| epochs | 1 |" in card
    assert "every parameter, with an fp32 master, by the rule `sgd`." in card
    assert "base_model: owner/name" in model_card(CardFacts(name="tuned", base_model="owner/name", **facts))
