"""The GPU benchmark's arithmetic, and that it ends in peace where there is no GPU."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

BENCH = Path(__file__).parents[2] / "bench"


def test_busy_shares_count_overlapping_operations_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import gpu

    def op(lane: str, start: float, stop: float) -> SimpleNamespace:
        return SimpleNamespace(lane=lane, start_seconds=start, stop_seconds=stop)

    ops = [op("a", 0, 4), op("a", 3, 6), op("a", 3.5, 5), op("b", 8, 20), op("c", 11, 12), op("a", 9, 9.5)]
    assert gpu.busy_shares(ops, 2, 10) == pytest.approx({"a": 4.5 / 8, "b": 2 / 8})


def test_table_has_a_line_for_every_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import gpu

    good = {"status": "ok", "step_seconds": 2.0, "busy": {"compute": 0.5}, "device_peak_bytes": 1 << 30}
    rows = [{"name": "one", **good}, {"name": "two", "status": "does not fit"}]
    table = gpu.table_of(
        {
            "gpu": "G",
            "torch": "2",
            "size": "L",
            "parameters": 10**9,
            "tokens_per_step": 1000,
            "matrix_flops_per_second": 1e13,
            "rows": rows,
        }
    )
    assert "| one | 2.00 | 500 | 30.0% | 1.00 / - | - / - | 0.0 / 0.0 | compute 50% |" in table
    assert "| two | does not fit |" in table


@pytest.mark.wide
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, BENCH / "gpu.py", "--scratch", tmp_path, "--output", tmp_path / "out"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "no CUDA device" in done.stdout
    assert list(tmp_path.iterdir()) == []
