"""The lanes recorder: busy and idle add up, bytes count once, little is kept, crashes and resumes leave a good file.

Run: pytest tests/report/test_lanes.py
"""

import json
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.plan.clock.simulate import union_seconds
from headrace.report.lanes import LanesFile, read_recording, summarise
from headrace.report.metrics import Record, read_metrics
from headrace.terms.errors import RunDirectoryError
from headrace.terms.events import Evaluated, Notice, OpDone
from headrace.terms.lanes import Lane
from headrace.terms.program import Op, Verb


def op(step: int, verb: Verb, lane: Lane, start: float, stop: float, **changes: int) -> OpDone:
    places = {"unit": -1, "micro": -1, "chunk": -1} | {key: value for key, value in changes.items() if key != "bytes"}
    label = Op(index=0, verb=verb, lane=lane, **places).label
    return OpDone(
        step=step,
        label=label,
        verb=verb,
        lane=lane,
        start_seconds=start,
        stop_seconds=stop,
        bytes=changes.get("bytes", 0),
        **places,
    )


def run(recorder: LanesFile, steps: range) -> None:
    """Steps of 10 s: compute for 6 s, its update and write running on into the next step."""
    for step in steps:
        run_at(recorder, step, 1000.0 + 10 * step)


def run_at(recorder: LanesFile, step: int, at: float) -> None:
    recorder(op(step, Verb.FETCH, Lane.SSD_READ, at - 0.5, at + 1, unit=1, bytes=30))
    recorder(op(step, Verb.FORWARD, Lane.COMPUTE, at, at + 2, unit=1, micro=0))
    recorder(op(step, Verb.BACKWARD, Lane.COMPUTE, at + 4, at + 8, unit=1, micro=0))
    recorder(op(step, Verb.UPDATE, Lane.UPDATE, at + 7, at + 9, unit=1, chunk=0, bytes=26))
    recorder(op(step, Verb.WRITE_STATES, Lane.SSD_WRITE, at + 9, at + 12, unit=1, chunk=0, bytes=20))


def lines(directory: Path) -> list[Record]:
    return read_metrics(directory / "lanes.jsonl")


def test_busy_idle_and_bytes_of_each_lane(tmp_path: Path) -> None:
    recorder = LanesFile(tmp_path)
    run(recorder, range(1, 5))
    recorder.close()
    written = lines(tmp_path)
    assert [line["step"] for line in written] == [1, 2, 3, 4]
    middle = written[1]
    assert middle["seconds"] == 10
    assert middle["lanes"]["compute"] == {"busy_seconds": 6, "idle_seconds": 4, "bytes": 0}
    assert middle["lanes"]["update"] == {"busy_seconds": 2, "idle_seconds": 8, "bytes": 26}
    # Two seconds of the step before, one of its own; the write that ended in this window is that of the step before.
    assert middle["lanes"]["ssd-write"] == {"busy_seconds": 3, "idle_seconds": 7, "bytes": 20}
    assert middle["verbs"]["forward"] == {"seconds": 2, "bytes": 0, "operations": 1}
    # Half a second of it was done ahead, in the step before.
    assert middle["lanes"]["ssd-read"] == {"busy_seconds": 1.5, "idle_seconds": 8.5, "bytes": 30}
    assert written[0]["lanes"]["ssd-write"]["bytes"] == 0
    # The first step begins with what was fetched ahead; the last one has no successor and ends with its last computation.
    assert written[0]["seconds"] == 10.5
    assert written[3]["seconds"] == 8


def test_the_time_of_an_evaluation_belongs_to_no_step(tmp_path: Path) -> None:
    """Steps wait 50 s for each other, for an evaluation: each ends with its last write and begins with its first fetch."""
    recorder = LanesFile(tmp_path)
    for step in range(1, 7):
        run_at(recorder, step, 1000.0 + 60 * step)
        recorder(Evaluated(step=step, loss=1.0, tokens=1, seconds=48.0))
    recorder.close()
    assert [line["seconds"] for line in lines(tmp_path)] == [12.5] * 6
    assert [line["lanes"]["ssd-write"]["bytes"] for line in lines(tmp_path)] == [20] * 6
    assert [line["lanes"]["compute"]["idle_seconds"] for line in lines(tmp_path)] == [6.5] * 6


@given(st.lists(st.tuples(st.floats(0, 15), st.floats(0.001, 15)), min_size=1, max_size=8))
def test_bytes_of_all_steps_add_up_wherever_operations_fall(offsets: list[tuple[float, float]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        recorder = LanesFile(Path(name))
        expected = 0
        for step in range(1, 7):
            at = 10.0 * step
            recorder(op(step, Verb.FORWARD, Lane.COMPUTE, at, at + 6))
            for start, length in offsets:
                # As in a program: not before the step before has been computed, complete two steps later.
                begin = at - 3 + start
                end = min(begin + length, at + 17)
                recorder(op(step, Verb.FETCH, Lane.SSD_READ, begin, end, bytes=1))
                expected += end <= 66
        recorder.close()
        assert sum(line["lanes"].get("ssd-read", {"bytes": 0})["bytes"] for line in lines(Path(name))) == expected


def test_a_line_is_written_when_no_operation_of_its_step_can_come_any_more(tmp_path: Path) -> None:
    recorder = LanesFile(tmp_path)
    run(recorder, range(1, 4))
    assert [line["step"] for line in lines(tmp_path)] == [1]
    recorder.close()
    recorder.close()
    assert len(lines(tmp_path)) == 3


def test_two_steps_are_kept_and_little_else(tmp_path: Path) -> None:
    recorder = LanesFile(tmp_path)
    run(recorder, range(1, 200))
    assert len(recorder._open) + len(recorder._kept) <= 4
    recorder.close()
    recording = read_recording(tmp_path / "timeline.json")
    assert [step.step for step in recording.steps] == [198, 199]
    assert [len(step.ops) for step in recording.steps] == [5, 5]


def test_the_timeline_gives_the_operations_back(tmp_path: Path) -> None:
    recorder = LanesFile(tmp_path, memory=lambda: {"host": 7})
    run(recorder, range(1, 3))
    recorder.close()
    step = read_recording(tmp_path / "timeline.json").steps[1]
    assert [event.label for event in step.ops] == [
        "fetch unit 1",
        "forward unit 1 micro 0",
        "backward unit 1 micro 0",
        "update unit 1 chunk 0",
        "write-states unit 1 chunk 0",
    ]
    forward = step.ops[1]
    assert forward.start_seconds == step.begin_seconds
    assert forward.stop_seconds - forward.start_seconds == pytest.approx(2)
    assert step.ops[0].bytes == 30
    assert read_recording(tmp_path / "timeline.json").memory[0][1] == {"host": 7}


def test_memory_is_sampled_no_more_often_than_asked(tmp_path: Path) -> None:
    asked: list[int] = []
    recorder = LanesFile(
        tmp_path, memory=lambda: {"host": len(asked)} if asked.append(1) is None else {}, memory_every_seconds=100
    )
    run(recorder, range(1, 31))  # 300 seconds of operations
    recorder.close()
    assert 3 <= len(asked) <= 4


def test_a_resumed_run_drops_steps_that_were_not_committed_and_says_so(tmp_path: Path) -> None:
    first = LanesFile(tmp_path)
    run(first, range(1, 6))
    first.close()
    (tmp_path / "lanes.jsonl").open("a").write('{"step": 6, "sec')  # killed while writing
    second = LanesFile(tmp_path, committed_steps=3)
    run(second, range(4, 6))
    second.close()
    written = lines(tmp_path)
    assert [line["step"] for line in written] == [1, 2, 3, 4, 5]
    assert [line["step"] for line in written if line.get("resumed")] == [4]


def test_a_new_run_starts_an_empty_file(tmp_path: Path) -> None:
    for _ in range(2):
        recorder = LanesFile(tmp_path)
        run(recorder, range(1, 3))
        recorder.close()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]
    assert not any("resumed" in line for line in lines(tmp_path))


def test_operations_from_many_threads_all_count(tmp_path: Path) -> None:
    recorder = LanesFile(tmp_path)

    def work(lane: Lane) -> None:
        for index in range(500):
            recorder(op(1, Verb.UPDATE, lane, float(index), index + 0.5, unit=1, bytes=1))

    threads = [threading.Thread(target=work, args=(lane,)) for lane in (Lane.COMPUTE, Lane.UPDATE, Lane.SSD_READ)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.close()
    (line,) = lines(tmp_path)
    assert line["verbs"]["update"]["operations"] == 1500
    assert [use["bytes"] for use in line["lanes"].values()] == [500, 500, 500]


def test_other_events_and_no_steps_write_no_line(tmp_path: Path) -> None:
    recorder = LanesFile(tmp_path)
    recorder(Notice(text="a slow disk"))
    recorder.close()
    assert lines(tmp_path) == []
    assert not (tmp_path / "timeline.json").exists()


spans = st.tuples(st.integers(0, 100), st.integers(0, 20)).map(lambda pair: (float(pair[0]), float(pair[0] + pair[1])))


@given(st.lists(spans, max_size=12))
def test_the_union_counts_every_moment_once(given_spans: list[tuple[float, float]]) -> None:
    moments = {moment for start, stop in given_spans for moment in range(int(start), int(stop))}
    assert union_seconds(given_spans) == len(moments)


@given(st.lists(st.tuples(spans, st.sampled_from([Lane.COMPUTE, Lane.UPDATE]), st.integers(0, 9)), max_size=12), spans)
def test_lanes_fill_the_window_and_bytes_of_adjacent_windows_add_up(
    given_ops: list[tuple[tuple[float, float], Lane, int]], window: tuple[float, float]
) -> None:
    begin, end = window[0], window[1] + 1
    ops = [op(1, Verb.UPDATE, lane, *span, bytes=size) for span, lane, size in given_ops if span[1] > span[0]]
    halves = [summarise(ops, *part) for part in ((-1.0, begin), (begin, end), (end, 500.0))]
    for use in halves[1]["lanes"].values():
        assert use["busy_seconds"] + use["idle_seconds"] == pytest.approx(end - begin)
        assert 0 < use["busy_seconds"] <= end - begin
    counted = sum(use["bytes"] for half in halves for use in half["lanes"].values())
    assert counted == sum(event.bytes for event in ops)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"version": 9}', '{"version": 1, "lanes": [], "verbs": [], "steps": [1]}']
)
def test_what_is_no_timeline_is_refused_with_its_path(content: str, tmp_path: Path) -> None:
    (tmp_path / "timeline.json").write_text(content)
    with pytest.raises(RunDirectoryError, match=r"timeline\.json"):
        read_recording(tmp_path / "timeline.json")


def test_a_missing_timeline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="cannot be read"):
        read_recording(tmp_path / "timeline.json")


def test_lines_are_strict_json(tmp_path: Path) -> None:
    recorder = LanesFile(tmp_path)
    run(recorder, range(1, 3))
    recorder.close()
    for line in (tmp_path / "lanes.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
