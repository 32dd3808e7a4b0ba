"""Launching: what is seen from outside, how failures are told, and that nothing is left behind."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from launch import DISK_LIMIT_BYTES, environment, require_disk, run_worker, scratch_directory, used_bytes

from headrace.process import SPIN_COUNT

MIB = 1 << 20


def worker(tmp_path, body):
    """A worker that imports nothing: `body` may use `scratch`, `result` and `put(seconds)`, which writes the record."""
    script = tmp_path / "fake.py"
    script.write_text(
        textwrap.dedent(
            """
            import json, os, pathlib, signal, sys, time
            scratch, result = (pathlib.Path(sys.argv[sys.argv.index(name) + 1]) for name in ("--scratch", "--result"))
            def put(start, stop):
                result.write_text(json.dumps({"rows": [{"start_clock": start, "stop_clock": stop}]}))
            """
        )
        + textwrap.dedent(body)
    )
    return [sys.executable, str(script)]


def run(tmp_path, body, timeout_seconds=200.0):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    record = run_worker(
        worker(tmp_path, body), environment(omp_wait_policy="passive"), scratch=scratch, timeout_seconds=timeout_seconds
    )
    assert list(scratch.iterdir()) == []
    return record


@pytest.mark.process
def test_peaks_of_loading_and_stepping_are_told_apart(tmp_path):
    record = run(
        tmp_path,
        """
        big = bytearray(os.urandom(1)) * (96 << 20)
        time.sleep(0.3)
        del big
        start = time.monotonic()
        small = b"y" * (32 << 20)
        time.sleep(0.3)
        put(start, time.monotonic())
        """,
    )
    assert record["status"] == "ok"
    assert record["peak_anonymous_bytes"] == record["peak_anonymous_bytes_loading"] > 96 * MIB
    assert 32 * MIB < record["peak_anonymous_bytes_stepping"] < 80 * MIB
    assert record["start_up_seconds"] > 0.3


def test_a_worker_that_fails_is_a_record_with_its_last_words(tmp_path):
    record = run(tmp_path, "print('the reason'); sys.exit(3)")
    assert record["status"] == "failed with exit code 3"
    assert "the reason" in record["log"]


@pytest.mark.process
def test_a_worker_that_is_killed_is_a_record(tmp_path):
    assert "killed" in run(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")["status"]


@pytest.mark.process
def test_a_worker_that_takes_too_long_is_stopped_with_its_children(tmp_path):
    body = "import subprocess; child = subprocess.Popen(['sleep', '600']); print(child.pid, flush=True); time.sleep(600)"
    record = run(tmp_path, body, timeout_seconds=5.4)
    assert record["status"] == "stopped: it ran longer than 5 s"
    child, deadline = int(record["log"].split()[0]), time.monotonic() + 60
    while _runs(child):  # a kill is a request: the kernel takes its time
        assert time.monotonic() < deadline, f"process {child} outlived its worker"
        time.sleep(0.02)


def _runs(process_id: int) -> bool:
    try:
        status = Path(f"/proc/{process_id}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return "State:\tZ" not in status  # dead, perhaps not yet reaped


@pytest.mark.process
def test_a_worker_that_fills_the_disk_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr("launch.DISK_LIMIT_BYTES", 1 * MIB)
    monkeypatch.setattr("launch.DISK_SAMPLE_SECONDS", 0.05)
    record = run(tmp_path, "(scratch / 'file').write_bytes(b'x' * (4 << 20)); time.sleep(200)")
    assert record["status"].startswith("stopped: it used 0.0 GB of disk")


@pytest.mark.process
def test_scratch_is_removed_on_sigterm(tmp_path):
    program = (
        "import sys, time, pathlib; sys.path.insert(0, sys.argv[2]); from launch import scratch_directory\n"
        "with scratch_directory(pathlib.Path(sys.argv[1])) as d:\n"
        "    (d / 'file').write_text('x'); print('ready', flush=True); time.sleep(60)\n"
    )
    here = os.path.dirname(sys.modules["launch"].__file__)
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path), here], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    assert process.wait(200) == 143
    process.stdout.close()
    assert list(tmp_path.iterdir()) == []


def test_scratch_must_be_a_directory(tmp_path, capsys):
    with pytest.raises(SystemExit), scratch_directory(tmp_path / "missing"):
        pass
    assert "there is no such directory" in capsys.readouterr().err


def test_what_needs_more_than_the_limit_is_refused(tmp_path, capsys):
    require_disk(tmp_path, 1000, "something small")
    with pytest.raises(SystemExit) as ending:
        require_disk(tmp_path, DISK_LIMIT_BYTES + 1, "size XL")
    assert ending.value.code == 2
    assert "size XL needs about 40.0 GB" in capsys.readouterr().err


def test_used_bytes_counts_blocks_not_lengths(tmp_path):
    (tmp_path / "sparse").open("wb").truncate(1 << 30)
    (tmp_path / "full").write_bytes(b"x" * 100_000)
    assert used_bytes(tmp_path) < 1 << 20


def test_another_python_gets_its_tools_and_not_our_packages(tmp_path):
    own = environment(omp_wait_policy="active")
    other = environment(omp_wait_policy="passive", python=tmp_path / "bin" / "python")
    assert own["OMP_WAIT_POLICY"] == "active"
    assert other["GOMP_SPINCOUNT"] == SPIN_COUNT
    assert other["PATH"].startswith(str(tmp_path / "bin"))
    assert "PYTHONPATH" not in other
