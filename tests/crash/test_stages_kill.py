"""Stages are killed at any message, or stopped, and started again by the same command: the final weights are, byte for byte,
those of one process.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import node_processes
import pytest
from tiers import sampled

pytestmark = pytest.mark.process
STEPS, LIMIT_SECONDS = 16, 200.0


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stages")
    node_processes.write_model(folder)
    return folder


@pytest.fixture(scope="module")
def alone(place: Path) -> bytes:
    words = [sys.executable, "-m", "headrace", "train", *words_of(place, place / "alone")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return (place / "alone" / "final" / "model.safetensors").read_bytes()


def words_of(place: Path, output: Path) -> list[str]:
    options = {
        "max_steps": STEPS,
        "sequence_length": 32,
        "tokens_per_step": 256,
        "host_memory": "2GiB",
        "learning_rate": 1e-3,
        "cache": place / "cache",
        "output": output,
        "measure": False,
    }
    words = [f"{key}={value}" for key, value in options.items()]
    plan = [f"plan={place / 'alone'}"] if output.name != "alone" else []
    return [str(place / "model"), str(place / "data.jsonl"), *words, *plan]


class Stages:
    """A run in two stages; `start` starts one of them, also again."""

    def __init__(self, place: Path, name: str) -> None:
        self.place, self.output, self.log = place, place / name, place / f"{name}.log"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.addresses = f"127.0.0.1:{port},127.0.0.1:{port + 1}"
        self.processes = dict[int, subprocess.Popen[bytes]]()

    def start(self, stage: int) -> None:
        own = ["--ssd", str(self.output) + "-ssd"] if stage else words_of(self.place, self.output)
        command = ["train", *own, "--stages", self.addresses, "--stage", str(stage)]
        with self.log.open("a") as log:
            self.processes[stage] = subprocess.Popen([sys.executable, "-m", "headrace", *command], stdout=log, stderr=log)

    def wait_for_step(self, step: int) -> None:
        metrics, end = self.output / "metrics.jsonl", time.monotonic() + LIMIT_SECONDS
        while True:
            lines = metrics.read_text().splitlines() if metrics.exists() else []
            if max((json.loads(line).get("step", 0) for line in lines if line.endswith("}")), default=0) >= step:
                return
            assert all(process.poll() is None for process in self.processes.values()), self.log.read_text()
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.02)

    def kill(self, stage: int) -> None:
        self.processes[stage].kill()
        self.processes[stage].wait()

    def weights(self) -> bytes:
        for process in self.processes.values():
            assert process.wait(LIMIT_SECONDS) == 0, self.log.read_text()
        return (self.output / "final" / "model.safetensors").read_bytes()

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


@pytest.mark.timeout(280)
@pytest.mark.parametrize("seed", sampled([1, 2, 3, 4], [1]))
def test_killed_stages_come_back(seed: int, place: Path, alone: bytes) -> None:
    stages, draw = Stages(place, f"killed-{seed}"), random.Random(seed)
    try:
        for stage in (0, 1):
            stages.start(stage)
        for after, killed in ((3, 1), (7, 0), (11, 1)):
            stages.wait_for_step(after)
            time.sleep(draw.random() * 0.2)
            stages.kill(killed)
            stages.start(killed)
        assert stages.weights() == alone
        found = json.loads((stages.output / "summary.json").read_text())["stages"]
        assert 0 < min(found["busy_shares"]) <= found["utilisation"] <= 1
        assert 0 < found["bound"] < 1
    finally:
        stages.close()
    assert not list(Path(f"{stages.output}-ssd").glob("headrace-*")), "what a stage held is removed"


@pytest.mark.timeout(280)
@pytest.mark.parametrize("stopped", sampled([1, 0], [1]))
def test_a_silent_stage_is_named(stopped: int, place: Path, alone: bytes) -> None:
    stages = Stages(place, f"stopped-{stopped}")
    try:
        for stage in (0, 1):
            stages.start(stage)
        stages.wait_for_step(3)
        os.kill(stages.processes[stopped].pid, signal.SIGSTOP)
        begun = time.monotonic()
        while "no sign of life" not in stages.log.read_text():
            assert time.monotonic() < begun + 60, stages.log.read_text()
            time.sleep(0.1)
        assert f"stage {stopped} at" in stages.log.read_text()
        os.kill(stages.processes[stopped].pid, signal.SIGCONT)
        assert stages.weights() == alone
    finally:
        stages.close()
