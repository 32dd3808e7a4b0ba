"""A second stop signal ends the process at once, in the midst of a step; the run goes on from its last commit all the same.

Run: pytest tests/runs/test_second_signal.py
"""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from training_fakes import FakeHost, write_data, write_model

from headrace.files.yaml_options import to_yaml
from headrace.runs import RunOptions, resume, train

pytestmark = pytest.mark.process

PROGRAM = """
import os, pathlib, signal, sys
from training_fakes import FakeHost
from headrace.runs import train
from headrace.files.yaml_options import from_yaml

def twice():
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):
        pass  # the first signal's handler runs here
    os.kill(os.getpid(), signal.SIGTERM)
    print("still here", flush=True)

train(from_yaml(pathlib.Path(sys.argv[1])), engines=FakeHost(script={3: twice}).engines())
"""


@pytest.mark.deep
def test_the_second_signal_kills_at_once(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    config = RunOptions.of(
        {
            "model": write_model(tmp_path / "model"),
            "data": str(write_data(tmp_path / "data.jsonl")),
            "output": tmp_path / "run",
            "cache": tmp_path / "cache",
            "sequence_length": 32,
            "tokens_per_step": 64,
            "max_steps": 8,
        }
    )
    (tmp_path / "run.yaml").write_text(to_yaml(config))
    unbroken = train(RunOptions.of(vars(config) | {"output": tmp_path / "unbroken"}), engines=FakeHost().engines())
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "run.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, timeout=280)
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert "still here" not in done.stdout
    resumed = resume(tmp_path / "run", engines=FakeHost().engines())
    assert (resumed.final / "weights").read_text() == (unbroken.final / "weights").read_text()
