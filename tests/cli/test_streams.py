"""What a command does where stdout cannot be written or is not there: one line on stderr, exit code 2, no traceback.

`/dev/full` refuses what is written; a pipe whose reader has gone does so, too.

Run: pytest tests/cli/test_streams.py
"""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from bad_worlds import World, check_refusal, listing

from headrace.cli import main
from headrace.cli.runs import Terminal
from headrace.cli.streams import guarded_streams
from headrace.report import LineProgress, LiveProgress

FULL = "error: stdout: cannot be written (No space left on device)"


def exit_code(*words: object) -> int:
    """Run the command with a full device as its stdout."""
    with pytest.MonkeyPatch.context() as patch, open("/dev/full", "w") as stream:
        patch.setattr(sys, "stdout", stream)
        with pytest.raises(SystemExit) as left:
            main([str(word) for word in words])
    return int(left.value.code or 0)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
class TestAFullStdout:
    @pytest.mark.parametrize(
        "words", [("--help",), ("--version",), ("doctor", "--no-measure"), ("doctor", "--no-measure", "--json")]
    )
    def test_of_a_command(self, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
        assert exit_code(*words) == 2
        assert capsys.readouterr().err == f"{FULL}\n"

    @pytest.mark.wide
    def test_of_a_report_a_plan_and_of_data(self, ran: World) -> None:
        assert ran.capsys
        for words in (("report", ran.run, "--json"), ("plan", ran.model, "--ssd", ran.ssd), ("data", ran.run, "--json")):
            assert exit_code(*words) == 2
            assert ran.capsys.readouterr().err == f"{FULL}\n"

    def test_of_a_run_that_has_not_begun(self, world: World) -> None:
        """The plan is shown first: what cannot be shown begins nothing."""
        assert world.capsys
        before = listing(world.folder)
        assert exit_code(*world.train_words()) == 2
        assert world.capsys.readouterr().err == f"{FULL}\n"
        assert listing(world.folder) == before


def headrace(*words: object, shell: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, with what a shell does to its streams."""
    command = ["sh", "-c", f'"$0" -m headrace "$@" {shell}', sys.executable, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


@pytest.mark.parametrize(
    ("terminal", "name", "kind"), [(True, "xterm", LiveProgress), (True, "dumb", LineProgress), (False, "xterm", LineProgress)]
)
def test_progress_is_live_only_on_a_terminal_that_can(
    terminal: bool, name: str, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Colour that is asked for makes no terminal of a pipe, and one that cannot go back shows nothing until the end."""
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("TERM", name)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert isinstance(Terminal().progress(5), kind)


def test_nothing_more_is_said_as_the_process_ends() -> None:
    """Python would try once more to write what it could not, and end with 120."""
    done = headrace("--version", shell=">/dev/full")
    assert done.stderr == f"{FULL}\n"
    assert done.returncode == 2


@pytest.mark.deep
def test_without_stdout_nothing_is_missed(world: World) -> None:
    done = headrace(*world.train_words(), shell=">&-")
    assert (done.returncode, done.stderr) == (0, "")
    assert (world.run / "final" / "model.safetensors").exists()


def test_without_stderr_the_exit_code_stays(world: World) -> None:
    assert headrace("train", "model-only", shell="2>&-").returncode == 2


@pytest.mark.deep
def test_where_stderr_is_full_the_exit_code_stays() -> None:
    assert headrace("train", "model-only", shell="2>/dev/full").returncode == 2


@pytest.mark.process
def test_a_reader_that_went_away_in_mid_run_is_said_to_be_stdout(world: World) -> None:
    words = world.train_words(**{"max-steps": 5000})
    command = [sys.executable, "-m", "headrace", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stderr
        assert any(re.match(r"step +\d+/", line) for line in process.stdout)
        process.stdout.close()
        said = process.stderr.read()
    check_refusal(process.returncode, said)
    assert said.startswith("error: stdout: cannot be written (Broken pipe); the last committed step is safe")
    assert f"headrace resume {world.run}" in said
    records = [json.loads(line) for line in (world.run / "metrics.jsonl").read_text().splitlines()]
    assert os.path.exists(world.run / "plan.json")
    assert records


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "shift_jis", "utf-8"])
def test_signs_that_an_encoding_does_not_have_are_written_all_the_same(encoding: str) -> None:
    signs = "ä 日本語 ⟦ \U0001f600 \ud800"
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        with guarded_streams():
            print(signs)
            print(signs, file=sys.stderr)
            sys.stderr.flush()
    for stream in (out, err):
        stream.flush()
        assert stream.buffer.getvalue() == f"{signs}\n".encode(encoding, "backslashreplace")


def test_how_signs_are_replaced_is_the_users_choice() -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="replace")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        with guarded_streams():
            print("ä")
    assert out.buffer.getvalue() == b"?\n"
