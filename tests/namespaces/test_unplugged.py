"""A cable is pulled in the middle of a run, and put back: the node says whom it lost, a spare takes over, the one who was cut
off comes again, and the bytes are those of an undisturbed run.
"""

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import node_processes
import pytest
from network import Network

SECRET = "of this test"
RUN = {
    "node": "node_processes.node(*map(json.loads, sys.argv[1:]))",
    "worker": "node_processes.worker(*map(json.loads, sys.argv[1:]))",
}


class Run:
    """A node on machine 0, and workers on others."""

    def __init__(self, network: Network, folder: Path, output: str) -> None:
        self.network, self.folder, self.output = network, folder, folder / output
        self.logs: list[Path] = []
        (folder / "secret").write_text(SECRET)
        more = {"listen": f"{network.address(0)}:29500", "secret": str(folder / "secret"), "max_grad_norm": 0.5}
        self.node = self._start(0, "node", str(folder), str(self.output), 29500, 1, more)
        self.workers: list[subprocess.Popen[str]] = []

    def hire(self) -> None:
        number = len(self.workers) + 1
        arguments = 29500, str(number), self.network.address(0), str(self.folder / "secret")
        self.workers.append(self._start(number, "worker", *arguments))

    def _start(self, machine: int, role: str, *arguments: Any) -> subprocess.Popen[str]:
        self.logs.append(self.folder / f"{self.output.name}-{len(self.logs)}.log")
        code = f"import json, sys, node_processes; {RUN[role]}"
        with self.logs[-1].open("w") as log:
            return self.network.start(machine, "-c", code, *map(json.dumps, arguments), stdout=log)

    def said(self, number: int) -> str:
        return self.logs[number].read_text()

    def steps(self) -> int:
        metrics = self.output / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def finish(self) -> bytes:
        assert self.node.wait(120) == 0, self.said(0)
        return (self.output / "final" / "model.safetensors").read_bytes()


def wait_until(what: Callable[[], bool], seconds: float, words: Callable[[], str]) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, words()
        time.sleep(0.01)


@pytest.mark.net
@pytest.mark.timeout(580)
def test_a_cable_is_pulled_and_put_back(tmp_path: Path) -> None:
    node_processes.write_model(tmp_path)
    with Network(3) as network:
        whole = Run(network, tmp_path, "whole")
        whole.hire()
        expected = whole.finish()
        run = Run(network, tmp_path, "unplugged")
        run.hire()
        wait_until(lambda: run.steps() >= 2, 120, lambda: run.said(0) + run.said(1))
        run.hire()
        network.unplug(1)
        begin = time.monotonic()
        wait_until(lambda: "shows no sign of life for 3 s" in run.said(0), 30, lambda: run.said(0))
        assert "worker 1 shows no sign of life" in run.said(0)
        wait_until(lambda: run.steps() >= 4, 120, lambda: run.said(0) + run.said(2))
        network.plug(1)
        found = run.finish()
        assert run.workers[1].wait(60) == 0
        assert time.monotonic() - begin < 300
        wait_until(lambda: "it went on without this worker" in run.said(1) or "is gone" in run.said(1), 60, lambda: run.said(1))
    assert found == expected
