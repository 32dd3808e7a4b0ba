"""`bench/torchrun_ranks.py`: what is run, with which budgets, and the table.

Run: pytest tests/bench/test_bench_ranks.py
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torchrun_ranks
from torchrun_ranks import FSDP, KINDS, ONE, RANKS, RECOMPUTED, options_of, table, words_of

from headrace.terms.sizes import GIB


def rounds_of(*seconds: float, memory: float = 1.0, losses: tuple[float, ...] = (3.0, 2.0)) -> list[dict[str, Any]]:
    return [{"step": each, "memory": memory * GIB, "losses": list(losses)} for each in seconds]


def test_ranks_share_the_memory_that_one_process_has() -> None:
    given = options_of(["--scratch", "s", "--ranks", "4", "--host-memory", "8GiB", "--tokens", "512"])
    alone, shared = (words_of(Path("f"), given, count) for count in (1, 4))
    assert f"host_memory={8 * GIB}" in alone
    assert f"host_memory={2 * GIB}" in shared
    assert "--nproc-per-node=4" in shared
    assert "torch.distributed.run" not in alone
    for words in (alone, shared):
        assert {"tokens_per_step=512", "gradient_sum=tree", "measure=false", "max_steps=6"} <= set(words)


def test_the_table_has_medians_of_rounds_beside_those_of_ranks() -> None:
    given = options_of(["--scratch", "s", "--tokens", "1000"])
    found = {
        RANKS: rounds_of(2.0, 9.0, 1.0),
        ONE: rounds_of(4.0, 3.0, 5.0, memory=2.5),
        FSDP: rounds_of(1.0, 1.0, 8.0, losses=(3.0, 2.01)),
        RECOMPUTED: rounds_of(6.0, 6.0, 6.0),
    }
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table(found, given)]
    assert [row[0] for row in rows[2:]] == list(KINDS)
    assert rows[2] == [RANKS, "2.000", "500.0", "1.00", "1.00", "0.00000"]
    assert rows[3] == [ONE, "4.000", "250.0", "2.00", "2.50", "0.00000"]
    assert rows[4] == [FSDP, "1.000", "1000.0", "0.50", "1.00", "0.01000"]


def test_steps_that_are_left_out_must_not_be_all() -> None:
    with pytest.raises(SystemExit):
        options_of(["--scratch", "s", "--steps", "2"])


@pytest.mark.deep
@pytest.mark.process
@pytest.mark.timeout(900)
def test_all_kinds_run_and_agree(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    words = ["--scratch", str(tmp_path), "--size", "T", "--tokens", "256", "--length", "32", "--steps", "4", "--rounds", "1"]
    command = [sys.executable, str(Path(torchrun_ranks.__file__)), *words, "--host-memory", "4GiB", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())["rounds"]
    assert list(found) == list(KINDS)
    for kind in KINDS:
        (one,) = found[kind]
        assert one["step"] > 0
        assert one["losses"] == pytest.approx(found[RANKS][0]["losses"], abs=0.02), "the same rows, and the same step"
    assert not list(tmp_path.glob("headrace-ranks-*"))
