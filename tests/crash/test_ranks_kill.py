"""Ranks that torchrun started are killed in the middle of a run, which goes on by itself or by `resume`: the final weights are,
byte for byte, those of a run that nobody disturbed.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import node_processes
import pytest
from tiers import sampled

pytestmark = pytest.mark.process
STEPS, LIMIT_SECONDS = 24, 200.0


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    node_processes.write_model(folder)
    return folder


@pytest.fixture(scope="module")
def undisturbed(place: Path) -> bytes:
    run = Torchrun(place, "whole", 2)
    assert run.process.wait(LIMIT_SECONDS) == 0, run.said()
    return run.weights()


class Torchrun:
    """A torchrun command with `size` ranks, which begins a run or goes on with it."""

    def __init__(self, place: Path, name: str, size: int, *, restarts: int = 0, resumes: bool = False) -> None:
        self.output, self.log = place / name, place / f"{name}.log"
        options = {
            "max_steps": STEPS,
            "sequence_length": 32,
            "tokens_per_step": 256,
            "gradient_sum": "tree",
            "host_memory": "2GiB",
            "learning_rate": 1e-3,
            "cache": place / "cache",
            "output": self.output,
        }
        words = [f"{key}={value}" for key, value in options.items()]
        begin = ["train", str(place / "model"), str(place / "data.jsonl"), *words]
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}", f"--max-restarts={restarts}"]
        command = [sys.executable, *torchrun, "-m", "headrace", *(["resume", str(self.output)] if resumes else begin)]
        with self.log.open("a") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def steps_done(self) -> int:
        metrics = self.output / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        return max((json.loads(line).get("step", 0) for line in lines), default=0)

    def wait_for_step(self, step: int) -> None:
        end = time.monotonic() + LIMIT_SECONDS
        while self.steps_done() < step:
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < end, self.said()
            time.sleep(0.02)

    def rank(self, number: int) -> int:
        return node_processes.rank_process(self.process.pid, number)

    def weights(self) -> bytes:
        return (self.output / "final" / "model.safetensors").read_bytes()

    def said(self) -> str:
        return self.log.read_text()


def copy_of(process: int) -> tuple[str, str]:
    """Return device and inode of the memory that a process has together with others."""
    lines = [line.split() for line in Path(f"/proc/{process}/maps").read_text().splitlines() if "memfd:headrace" in line]
    (found,) = {(words[3], words[4]) for words in lines}
    return found


@pytest.mark.timeout(280)
@pytest.mark.parametrize(("killed", "seed"), sampled([(1, 1), (0, 2), (1, 3), (0, 4)], [(1, 1)]))
def test_a_killed_rank_is_started_again_and_the_run_goes_on(killed: int, seed: int, place: Path, undisturbed: bytes) -> None:
    run = Torchrun(place, f"killed-{killed}-{seed}", 2, restarts=1)
    run.wait_for_step(3)
    time.sleep(random.Random(seed).random() * 0.2)
    os.kill(run.rank(killed), signal.SIGKILL)
    assert run.process.wait(LIMIT_SECONDS) == 0, run.said()
    assert run.weights() == undisturbed
    assert not list(run.output.glob("headrace-*")), "what ranks held is removed"


@pytest.mark.timeout(280)
@pytest.mark.parametrize("seed", sampled([5, 6, 7], [5]))
def test_ranks_that_are_all_killed_are_resumed(seed: int, place: Path, undisturbed: bytes) -> None:
    run = Torchrun(place, f"all-{seed}", 2)
    run.wait_for_step(4)
    time.sleep(random.Random(seed).random() * 0.2)
    ranks = [run.rank(number) for number in range(2)]
    assert copy_of(ranks[0]) == copy_of(ranks[1]), "they have one host copy"
    for process in (run.process.pid, *ranks):
        os.kill(process, signal.SIGKILL)
    run.process.wait()
    run = Torchrun(place, f"all-{seed}", 2, resumes=True)
    assert run.process.wait(LIMIT_SECONDS) == 0, run.said()
    assert run.weights() == undisturbed


@pytest.mark.timeout(280)
def test_killed_ranks_are_resumed_with_fewer(place: Path) -> None:
    whole = Torchrun(place, "whole of three", 3)
    assert whole.process.wait(LIMIT_SECONDS) == 0, whole.said()
    run = Torchrun(place, "three, then two", 3)
    run.wait_for_step(4)
    ranks = [run.rank(number) for number in range(3)]
    for process in (run.process.pid, *ranks):
        os.kill(process, signal.SIGKILL)
    run.process.wait()
    run = Torchrun(place, "three, then two", 2, resumes=True)
    assert run.process.wait(LIMIT_SECONDS) == 0, run.said()
    assert run.weights() == whole.weights()
    assert not list(run.output.glob("headrace-*")), "what earlier ranks held is removed, too"
