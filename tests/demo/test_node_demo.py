"""The demo of a node ends well: with the bytes of an undisturbed run, and no process left."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

SCRIPT = Path(__file__).parents[2] / "demo" / "node_demo.py"


@pytest.mark.deep
@pytest.mark.timeout(600)
def test_the_demo_of_a_node_ends_well(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--directory", str(tmp_path / "demo"), "--steps", "6", "--kill-after-step", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "weights  identical, byte for byte: model.safetensors" in done.stdout
    assert "link      127.0.0.1:" in done.stdout
    assert "going on from the last committed step" in done.stdout
