"""The proof for the day a card is there: it ends in peace without one, and its dry run goes through each case."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "bench" / "gpu_proof.py"


def proof(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would run")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = proof("--output", str(tmp_path / "out"))
    assert done.returncode == 0
    assert "no CUDA device" in done.stdout


def test_it_refuses_what_is_no_result(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("[]")
    done = proof("--output", str(tmp_path / "out"), "--dry-run", "--from", str(tmp_path / "other.json"))
    assert done.returncode == 2
    assert "--from" in done.stderr


@pytest.mark.deep
def test_the_dry_run_goes_through_each_case_and_goes_on(tmp_path: Path) -> None:
    """With one case's result taken away, that one alone runs again."""
    known = None if importlib.util.find_spec("triton") else {"kernels": {"status": "ok", "cases": []}}
    (tmp_path / "begun.json").write_text(json.dumps({"rows": known or {}}))
    done = proof("--output", str(tmp_path), "--dry-run", "--from", str(tmp_path / "begun.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    first = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert {row["status"] for row in first.values()} == {"ok"}
    assert first["answer-32b-int4"]["repeated"]
    (tmp_path / "part.json").write_text(json.dumps({"rows": {**first, "lora-8b": {"status": "failed"}}}))
    assert proof("--output", str(tmp_path), "--dry-run", "--from", str(tmp_path / "part.json")).returncode == 0
    second = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert second["lora-8b"]["losses"] == first["lora-8b"]["losses"]
    assert [name for name in first if second[name] != first[name]] == ["lora-8b"]
