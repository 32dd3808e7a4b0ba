"""The promise table: what is observed is what happened, the bare loop repeats what was asked, and results accumulate."""

import json
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import promise
import pytest
from bare import Recorder, Request, bare_rates, seconds_of, sliced
from observed import Cores, bytes_inside, interference, median_rate, ssd_rates

from headrace.files import DirectFile, ThreadEngine, Volume
from headrace.machine.host_memory import huge_page_buffer
from headrace.plan.value.results import Results
from headrace.terms.events import OpDone
from headrace.terms.lanes import Lane
from headrace.terms.program import Verb

PAGE = 4096


def op(verb, lane, start, stop, *, unit=1, size=0):
    return OpDone(
        step=0,
        label=verb,
        verb=verb,
        lane=lane,
        unit=unit,
        micro=0,
        chunk=0,
        start_seconds=start,
        stop_seconds=stop,
        bytes=size,
    )


class TwoBlocks:
    """What `interference` asks of a plan."""

    results = Results(forward_flops=(0.0, 1e12, 2e12, 0.0), spared_flops=(0.5e12, 0.0))


TWO_CORES = Cores(count=2, threads={Lane.COMPUTE: 2, Lane.UPDATE: 1}, seconds_per_ssd_byte=0.01)


def test_core_seconds_of_the_update_are_what_the_arithmetic_expects_compute_to_lose():
    alone = [
        op(Verb.BACKWARD, Lane.COMPUTE, 0, 10, unit=1),
        op(Verb.BACKWARD, Lane.COMPUTE, 10, 30, unit=2),
        op(Verb.UPDATE, Lane.UPDATE, 30, 36, unit=2),
    ]
    # 6 core seconds of an update beside block 2, on two cores: 3 more seconds, however long it is drawn out. Block 1 has none.
    together = [
        op(Verb.BACKWARD, Lane.COMPUTE, 0, 23, unit=2),
        op(Verb.UPDATE, Lane.UPDATE, 3, 12, unit=2),
        op(Verb.BACKWARD, Lane.COMPUTE, 23, 33, unit=1),
    ]
    found = interference(together, alone, TwoBlocks, Verb.BACKWARD, TWO_CORES, {})
    assert found["operations"] == 1
    assert found["ratio"] == found["expected"] == pytest.approx(23 / 20)
    assert found["others_core_seconds"] == pytest.approx(6)
    assert found["seconds_per_tflop_alone"] == pytest.approx(20 / 6)
    assert found["expected_with_drives"] == pytest.approx(found["expected"])
    assert interference(together[::2], alone, TwoBlocks, Verb.BACKWARD, TWO_CORES, {})["ratio"] is None


def test_compute_that_leaves_a_core_loses_nothing_by_arithmetic():
    alone = [op(Verb.BACKWARD, Lane.COMPUTE, 0, 10), op(Verb.UPDATE, Lane.UPDATE, 10, 16)]
    together = [op(Verb.BACKWARD, Lane.COMPUTE, 0, 11), op(Verb.UPDATE, Lane.UPDATE, 1, 7)]
    apart = replace(TWO_CORES, threads={Lane.COMPUTE: 1, Lane.UPDATE: 1})
    assert interference(together, alone, TwoBlocks, Verb.BACKWARD, apart, {})["expected"] == 1
    on_a_gpu = replace(TWO_CORES, threads={Lane.UPDATE: 1})
    assert interference(together, alone, TwoBlocks, Verb.BACKWARD, on_a_gpu, {})["expected"] == 1


def test_what_drives_cost_compute_is_told_apart():
    alone = [op(Verb.BACKWARD, Lane.COMPUTE, 0, 10), op(Verb.UPDATE, Lane.UPDATE, 10, 14)]
    # Half of the reads' 200 bytes are moved beside compute, a core second; the update takes 4; the writes come later.
    together = [
        op(Verb.BACKWARD, Lane.COMPUTE, 0, 13),
        op(Verb.UPDATE, Lane.UPDATE, 1, 5),
        op(Verb.FETCH, Lane.SSD_READ, 9, 17, size=200),
        op(Verb.WRITE_STATES, Lane.SSD_WRITE, 20, 30, size=1000),
    ]
    found = interference(together, alone, TwoBlocks, Verb.BACKWARD, TWO_CORES, {"ssd-read": 0.5, "ssd-write": 0.1})
    assert found["expected"] == pytest.approx((20 + 4 + 1) / 20)
    # For 4 of 13 seconds compute keeps half of its speed beside reads: 11 seconds of work in 13.
    assert found["expected_with_drives"] == pytest.approx((20 + 4) / 20 * 13 / 11)


def test_the_rate_of_the_drive_counts_busy_seconds_once():
    ops = [
        op(Verb.FETCH, Lane.SSD_READ, 0, 4),
        op(Verb.WRITE_STATES, Lane.SSD_WRITE, 2, 6),
        op(Verb.FORWARD, Lane.COMPUTE, 0, 10),
    ]
    found = ssd_rates(ops, [(1, 3, 100), (2, 5, 300)], 0, 10)
    assert found["bytes_per_second"] == pytest.approx(400 / 6)
    assert found["drive_bytes_per_second"] == pytest.approx(400 / 4)
    # Of a request across the edge of the window its share counts.
    assert bytes_inside([(1, 3, 100), (2, 5, 300)], 0, 2) == pytest.approx(50)
    assert ssd_rates([], [], 0, 1)["bytes_per_second"] is None
    assert median_rate([op(Verb.UPDATE, Lane.UPDATE, 0, 2, size=10)], Verb.UPDATE) == pytest.approx(5)


def test_requests_are_cut_into_slices_of_time():
    class At:
        def __init__(self, start):
            self.start_seconds = start

    parts = sliced([At(start) for start in (0.0, 0.1, 5.0, 9.9, 10.0)], 10)
    assert [[each.start_seconds for each in part] for part in parts] == [[0.0, 0.1], [5.0], [9.9, 10.0]]


@pytest.fixture
def engine():
    with ThreadEngine(piece_bytes=4 * PAGE) as engine:
        yield engine


def test_the_bare_loop_does_again_what_was_asked(tmp_path, engine):
    file = DirectFile.create(tmp_path / "data", 64 * PAGE)
    volume_of = Volume([file], [1], 8 * PAGE, engine)
    recorder = Recorder(volume_of)
    data, into = huge_page_buffer(16 * PAGE), huge_page_buffer(8 * PAGE)
    data[:] = np.random.default_rng(0).integers(0, 256, data.size, dtype=np.uint8)
    volume_of.write(8 * PAGE, data).wait()
    volume_of.read(8 * PAGE, into).wait()
    requests = recorder.between(0, float("inf"))
    assert sorted((each.is_read, each.offset // PAGE, each.buffer.size // PAGE) for each in requests) == [
        *((False, start, 4) for start in (8, 12, 16, 20)),
        *((True, start, 4) for start in (8, 12)),
    ]
    # What was written comes back, and what was read is read again into the same memory.
    kept, into[:] = data.copy(), 0
    zeros = huge_page_buffer(64 * PAGE)
    file.write_from(0, zeros)
    writes, reads = ([each for each in requests if each.is_read is is_read] for is_read in (False, True))
    seconds_of(writes, 2)
    seconds_of(reads, 2)
    check = huge_page_buffer(16 * PAGE)
    file.read_into(8 * PAGE, check)
    assert (check == kept).all()
    assert (into == kept[: into.size]).all()
    assert len(recorder.requests) == len(requests), "the bare loop must not go through the recorder"
    entered = []
    rates = bare_rates(requests, 1, 4, load=lambda: entered.append(True) or nullcontext())
    assert entered == [True]
    assert min(rates[name] for name in rates if name.endswith("_per_second")) > 0
    assert rates["bytes"] == 24 * PAGE
    assert rates["read_share"] == pytest.approx(1 / 3)
    volume_of.close()


def test_the_bare_loop_has_as_many_requests_under_way_as_the_run(tmp_path):
    class Together:
        """A file whose requests wait until as many as expected are under way; that ends only if there are."""

        def __init__(self, count):
            self.barrier = threading.Barrier(count, timeout=200)

        def read_into(self, offset, into):
            self.barrier.wait()

        write_from = read_into

    threads = 7
    file = Together(2 * threads)
    buffer = huge_page_buffer(PAGE)
    requests = [Request(file, is_read, 0, buffer, 0.0, 1.0) for is_read in (True, False) for _ in range(threads)]
    seconds_of(requests, threads)


def test_a_request_that_fails_fails_the_bare_loop(tmp_path, engine):
    file = DirectFile.create(tmp_path / "data", 8 * PAGE)
    volume_of = Volume([file], [1], 8 * PAGE, engine)
    recorder = Recorder(volume_of)
    volume_of.read(0, huge_page_buffer(PAGE)).wait()
    broken = [replace(each, offset=16 * PAGE) for each in recorder.requests]
    with pytest.raises(Exception, match="bytes"):
        seconds_of(broken, 4)
    volume_of.close()


def a_run(name, number, seconds=2.0, **changes):
    lanes = {"compute": {"busy_seconds": 4.0}, "ssd-read": {"busy_seconds": 2.0}}
    planned = {
        "step_seconds": 1.6,
        "lower_bound_seconds": 1.0,
        "core_seconds": 2.4,
        "peak_bytes": {"host": 1 << 30},
        "ssd_read_bytes": 30,
        "ssd_written_bytes": 20,
        "lanes": {"compute": {"busy_seconds": 1.5, "alone_seconds": 1.4}},
        "explanation": "limited by compute: busy 94% of the step",
    }
    observed = {
        "planned": planned,
        "steps": 2,
        "lanes": {"lanes": lanes},
        "ssd": {"bytes": 100, "bytes_per_second": 8.0},
        "bare": {"bytes_per_second": 10.0, "in_order_bytes_per_second": 9.0, "beside_load_bytes_per_second": 8.0},
        "interference": {"verb": "backward", "ratio": 1.2, "expected": 1.1, "expected_with_drives": 1.15},
    }
    rows = [{"seconds": 9.0, "others_cpu_seconds": 9.0}, *({"seconds": seconds, "others_cpu_seconds": 0.0},) * 2]
    values = {"name": name, "round": number, "status": "ok", "combination": {"clip": False}, "cores": 2, "rows": rows}
    values |= {"peak_anonymous_bytes_training": 3 << 28, "settings": {"warmup": 1, "observed": observed}}
    return values | changes


def test_ratios_are_those_of_a_run_and_medians_those_of_rounds():
    runs = [a_run("S-256", number, seconds) for number, seconds in enumerate((2.0, 4.0, 2.4))]
    row = promise.summaries_of(runs)["S-256"]
    assert row["rounds"] == 3
    assert row["step_seconds"] == 2.4
    assert row["seconds_ratio"] == pytest.approx(1.5)
    assert row["bound_ratio"] == pytest.approx(2.4)
    assert row["peak_ratio"] == pytest.approx(0.75)
    assert row["cores_seconds"] == pytest.approx(1.2)
    assert row["ssd_efficiency"] == pytest.approx(0.8)
    assert row["ssd_efficiency_beside_load"] == pytest.approx(1.0)
    assert row["ssd_bytes_ratio"] == pytest.approx(1.0)
    assert row["busy_seconds"]["compute"] == pytest.approx(2.0)
    failed = a_run("L-256", 0, status="failed with exit code 2", log="")
    page = promise.table_of({"machine": {}, "runs": [*runs, failed]})
    assert "| S-256 | 3 | 1.60 | 2.40 | 1.50 |" in page
    assert "step seconds, measured / planned: **1.50**" in page
    assert "- L-256, round 0: failed with exit code 2" in page


def test_the_table_covers_sizes_tokens_and_clipping_under_names_of_their_own():
    names = [combination.name for combination in promise.COMBINATIONS]
    assert len(names) >= 10
    assert len(set(names)) == len(names)
    for size in "SML":
        own = [combination for combination in promise.COMBINATIONS if combination.size == size]
        assert len({combination.tokens_per_step for combination in own}) >= 2
        assert {combination.clip for combination in own} == {True, False}
    assert [combination.name for combination in promise.chosen("M-256-clip,S-512")] == ["S-512", "M-256-clip"]


def test_an_unknown_name_is_refused_with_those_that_are_known(capsys):
    with pytest.raises(SystemExit) as refused:
        promise.chosen("S-513")
    assert refused.value.code == 2
    assert "S-512" in capsys.readouterr().err


@pytest.fixture
def no_work(monkeypatch):
    """Runs are made up, and the disk that they would need; the names that were run are returned."""
    names = []

    def run_worker(command, variables, **options):
        size, tokens = (command[command.index(f"--{option}") + 1] for option in ("size", "tokens-per-step"))
        names.append(f"{size}-{tokens}")
        return {key: value for key, value in a_run("", 0).items() if key not in ("name", "round", "combination", "cores")}

    def make_model(size, directory, variables):
        directory.mkdir()
        (directory / size).touch()
        assert len(list(directory.parent.glob("model-*"))) == 1, "one checkpoint at a time"

    monkeypatch.setattr("shutil.disk_usage", lambda directory: SimpleNamespace(free=1e12))
    monkeypatch.setattr(promise, "run_worker", run_worker)
    monkeypatch.setattr(promise, "make_model", make_model)
    return names


def main_of(monkeypatch, tmp_path, *arguments):
    command = [
        "promise.py",
        "--scratch",
        str(tmp_path),
        "--output",
        str(tmp_path / "out"),
        "--only",
        "S-512,M-2048,L-256-tight",
    ]
    monkeypatch.setattr("sys.argv", [*command, *arguments])
    return promise.main()


def test_an_interrupted_table_goes_on_where_it_was(no_work, monkeypatch, tmp_path):
    profile = tmp_path / "profile.json"
    profile.write_text('{"name": "made up"}')
    assert main_of(monkeypatch, tmp_path, "--profile", str(profile)) == 0
    assert no_work == ["S-512", "M-2048", "L-256"]
    path = tmp_path / "out.json"
    results = json.loads(path.read_text())
    results["runs"][1]["status"], results["runs"][1]["log"] = "killed", ""
    path.write_text(json.dumps(results))
    assert main_of(monkeypatch, tmp_path) == 0  # the profile is the one of the results
    assert no_work[3:] == ["M-2048"]
    assert main_of(monkeypatch, tmp_path, "--rounds", "2") == 0
    assert no_work[4:] == ["S-512", "M-2048", "L-256"]
    assert len(json.loads(path.read_text())["runs"]) == 6
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out.json", "out.md", "profile.json"]


def test_results_of_another_profile_are_not_mixed(no_work, monkeypatch, tmp_path, capsys):
    profile = tmp_path / "profile.json"
    profile.write_text('{"name": "made up"}')
    main_of(monkeypatch, tmp_path, "--profile", str(profile))
    profile.write_text('{"name": "another"}')
    with pytest.raises(SystemExit) as refused:
        main_of(monkeypatch, tmp_path, "--profile", str(profile))
    assert refused.value.code == 2
    assert "another one" in capsys.readouterr().err


def test_without_the_space_nothing_begins(no_work, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("shutil.disk_usage", lambda directory: SimpleNamespace(free=2e9))
    with pytest.raises(SystemExit) as refused:
        main_of(monkeypatch, tmp_path, "--measure-each")
    assert refused.value.code == 2
    assert "2.0 GB are free" in capsys.readouterr().err
    assert no_work == []


def test_each_run_may_have_a_profile_of_its_own(no_work, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(promise, "measure_machine", lambda directory, profile, seconds: {"name": f"before run {len(no_work)}"})
    assert main_of(monkeypatch, tmp_path, "--measure-each") == 0
    runs = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert [run["profile"]["name"] for run in runs] == [f"before run {number}" for number in range(3)]
    assert main_of(monkeypatch, tmp_path, "--measure-each", "--rounds", "2") == 0
    for other in ([], ["--profile", str(tmp_path / "out.json"), "--measure-each"]):
        with pytest.raises(SystemExit) as refused:
            main_of(monkeypatch, tmp_path, *other)
        assert refused.value.code == 2
        assert "--measure-each" in capsys.readouterr().err


def test_a_file_that_is_no_result_is_not_overwritten(tmp_path):
    path = Path(tmp_path / "out.json")
    path.write_text("[1, 2]")
    with pytest.raises(SystemExit):
        promise.read_results(path)
    assert path.read_text() == "[1, 2]"
