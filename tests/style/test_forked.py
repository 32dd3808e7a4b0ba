"""What is forked from a server is what `subprocess.run` would be: in streams, exit code, directory and environment."""

import subprocess
import sys
from pathlib import Path

import pytest
from forked import run_headrace


@pytest.mark.parametrize("words", [("--version",), ("plan", "nothing-there"), ("report", "."), ("train", "--no-such-option")])
def test_it_is_what_a_process_of_its_own_is(words: tuple[str, ...], tmp_path: Path) -> None:
    fresh = subprocess.run([sys.executable, "-m", "headrace", *words], cwd=tmp_path, capture_output=True, text=True)
    forked = run_headrace(*words, cwd=tmp_path)
    assert (forked.returncode, forked.stdout, forked.stderr) == (fresh.returncode, fresh.stdout, fresh.stderr)


def test_what_takes_too_long_is_ended(tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run_headrace("--version", cwd=tmp_path, timeout=0.0)
