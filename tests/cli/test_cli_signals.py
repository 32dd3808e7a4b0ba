"""Real signals to real processes: the first ends the run in order and says how to go on, and `resume` takes them too.

Run: pytest tests/cli/test_cli_signals.py
"""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from bad_worlds import World

from headrace.report import read_metrics

pytestmark = pytest.mark.process

MANY_STEPS = 5000


def stopped(words: list[str], number: signal.Signals, cwd: Path) -> tuple[int, str]:
    """Start a command, send it a signal when it has taken a step, and return its exit code and its stderr."""
    command = [sys.executable, "-m", "headrace", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd) as process:
        assert process.stdout
        assert any(re.match(r"step +\d+/", line) for line in process.stdout)
        process.send_signal(number)
        _, said = process.communicate(timeout=280)
    return process.returncode, said


def test_stop_resume_stop(world: World, tmp_path: Path) -> None:
    words = world.train_words(**{"max-steps": MANY_STEPS})
    code, said = stopped(words, signal.SIGINT, tmp_path)
    assert code == 130, said
    first = int(re.fullmatch(rf"error: SIGINT: stopped after step (\d+) of {MANY_STEPS}, which is committed; .*\n", said)[1])
    assert said.endswith(f"resume with: headrace resume {world.run}\n")
    assert [record["step"] for record in read_metrics(world.run / "metrics.jsonl")] == list(range(1, first + 1))
    code, said = stopped(["resume", str(world.run)], signal.SIGTERM, tmp_path)
    assert code == 143, said
    second = int(re.fullmatch(rf"error: SIGTERM: stopped after step (\d+) of {MANY_STEPS}, .*\n", said)[1])
    assert second > first
    assert [record["step"] for record in read_metrics(world.run / "metrics.jsonl")] == list(range(1, second + 1))
