"""Ranks of one machine have one host copy of weights, and each stays within its plan, which counts a share of that copy.

Run: pytest tests/memory/test_ranks_memory.py -m "deep or process"
"""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from node_processes import rank_process, write_model, write_texts

from headrace.plan.value.buffer_sizes import buffer_groups
from headrace.plan.value.plan import Plan
from headrace.terms.sizes import MIB

pytestmark = [pytest.mark.process, pytest.mark.deep]
RANKS, LIMIT_SECONDS = 2, 400.0


def copy_bytes(process: int) -> tuple[int, int]:
    """Return what a process has resident of the host copy, and its proportional share of that, as the kernel counts them."""
    found = [0, 0]
    for mapping in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path(f"/proc/{process}/smaps").read_text(), flags=re.M):
        if "memfd:headrace" in mapping:
            for at, name in enumerate(("Rss", "Pss")):
                found[at] += 1024 * int(re.findall(rf"^{name}: +(\d+) kB", mapping, flags=re.M)[0])
    return found[0], found[1]


@pytest.mark.timeout(500)
def test_ranks_have_one_copy_and_stay_within_their_plans(tmp_path: Path) -> None:
    write_model(tmp_path, hidden_size=768, intermediate_size=2048, num_hidden_layers=8)
    write_texts(tmp_path, samples=64)
    output = tmp_path / "run"
    options = {
        "max_steps": 4,
        "sequence_length": 32,
        "tokens_per_step": 256,
        "host_memory": "2GiB",
        "cache": tmp_path / "cache",
        "output": output,
    }
    words = [f"{key}={value}" for key, value in options.items()]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    train = ["-m", "headrace", "train", str(tmp_path / "model"), str(tmp_path / "data.jsonl"), *words]
    seen, end = [(0, 0)] * RANKS, time.monotonic() + LIMIT_SECONDS
    with (tmp_path / "log").open("w") as log, subprocess.Popen([*torchrun, *train], stdout=log, stderr=log) as process:
        while process.poll() is None:
            assert time.monotonic() < end, (tmp_path / "log").read_text()
            if (output / "metrics.jsonl").exists():
                try:
                    found = [copy_bytes(rank_process(process.pid, rank)) for rank in range(RANKS)]
                    seen = max(seen, found, key=lambda each: sum(part[0] for part in each))
                except (AssertionError, OSError, IndexError):  # a rank has just ended
                    pass
            time.sleep(0.05)
    assert process.returncode == 0, (tmp_path / "log").read_text()
    plan = Plan.from_json(json.loads((output / "plan.json").read_text()))
    copy = sum(group.total_bytes for group in buffer_groups(plan).values() if group.is_shared)
    assert plan.results.peak_bytes["host"]["weights"] == pytest.approx(copy / RANKS, abs=4096)
    assert copy > 60 * MIB
    shared = sum(part[1] for part in seen)
    assert shared <= copy + MIB, "there is one copy"
    assert shared >= 0.7 * copy, "and it is used"
    assert all(resident >= 0.7 * copy for resident, _ in seen), "by all"
    ranks = json.loads((output / "summary.json").read_text())["ranks"]
    assert [each["rank"] for each in ranks] == list(range(RANKS))
    assert all(each["peak_bytes"] <= plan.peak("host") for each in ranks)
    assert all(each["peak_bytes"] >= copy / RANKS for each in ranks), "its share of the copy counts"
