"""A node and its workers as processes of this machine, for tests that kill them, or look at what they take."""

import os
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import node_processes
from forked import PROCESSES

# Micro-batches of two rows; clipping holds gradients until the norm is known, without it updates run behind backward.
POLICIES: dict[str, dict[str, Any]] = {"deferred": {"max_grad_norm": 0.5}, "immediate": {"max_grad_norm": 0}}


class Machines:
    """A node, and workers that come to it; `output` names the run, whose options are `policy`'s and `more`."""

    def __init__(self, folder: Path, output: str, workers: int | str, policy: str, **more: Any) -> None:
        self.folder, self.output, self.num_workers, self.more = folder, folder / output, workers, POLICIES[policy] | more
        self.port, self.workers, self.names = 0, list[BaseProcess](), 0
        self.scratch = folder / f"{output}-scratch"
        self.scratch.mkdir()
        self.node = self.start_node()
        self.port = int(self.wait_for(self.output.with_name(f"{output}.port")).read_text())

    def start_node(self) -> BaseProcess:
        arguments = (str(self.folder), str(self.output), self.port, self.num_workers, self.more)
        self.node = PROCESSES.Process(target=node_processes.node, args=arguments)
        self.node.start()
        return self.node

    def hire(self, count: int = 1, **more: Any) -> None:
        for _ in range(count):
            self.names += 1
            said = str(self.said_by(self.names))
            process = PROCESSES.Process(
                target=node_processes.worker,
                args=(self.port, str(self.names)),
                kwargs={"said": said, "scratch": str(self.scratch)} | more,
            )
            process.start()
            self.workers.append(process)

    def said_by(self, name: int) -> Path:
        """Return the file that has the lines of a worker."""
        return self.output.with_name(f"{self.output.name}-worker-{name}.log")

    def wait_for(self, path: Path) -> Path:
        return wait_until(lambda: path if path.exists() else None)

    def wait_for_step(self, step: int) -> None:
        wait_until(lambda: (self.steps_done() >= step) or None)

    def steps_done(self) -> int:
        metrics = self.output / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def finish(self, seconds: float = 240.0) -> bytes:
        self.node.join(seconds)
        assert self.node.exitcode == 0
        for process in self.workers:
            process.join(100)
        return (self.output / "final" / "model.safetensors").read_bytes()


def wait_until(what: Any, seconds: float = 240.0) -> Any:
    """Return what `what` finds; the limit ends a standstill, and is far above what a busy machine takes."""
    end = time.monotonic() + seconds
    while (found := what()) is None:
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.005)
    return found


def kill(process: BaseProcess) -> None:
    if process.is_alive():
        os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
