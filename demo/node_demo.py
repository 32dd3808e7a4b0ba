"""A node and two workers on this machine, one of which is killed: the model that comes out is, byte for byte, that of a run
which nobody disturbed. `make demo-node` runs it; on several machines only the addresses differ (docs/node.md).
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from made_model import make_model, texts
from stage import ROOT, environment, fail, run_headrace, say, show, title

STEPS, KILL_AFTER_STEP = 12, 5
# A process that does not end within this is stuck; all of them together take less.
MOST_SECONDS = 300.0


class Process:
    """`headrace` in a process of its own; its lines are shown with its `name` before them, and kept."""

    def __init__(self, name: str, *arguments: str) -> None:
        self.name, self.lines = name, list[str]()
        print(f"\n    $ headrace {' '.join(show(word) for word in arguments)}    # {name}", flush=True)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headrace", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(),
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.rstrip())
            say(f"{self.name:<9} {show(line.rstrip())}")

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Return the first match of `pattern` in its lines."""
        end = time.monotonic() + MOST_SECONDS
        while time.monotonic() < end:
            found = next((match for line in list(self.lines) if (match := re.search(pattern, line))), None)
            if found is not None:
                return found
            if self._process.poll() is not None:
                break
            time.sleep(0.02)
        self.kill()
        fail(f"{self.name} never said {pattern!r}")

    def kill(self) -> None:
        """Kill it, as a machine that loses its power."""
        self._process.send_signal(signal.SIGKILL)  # nothing where it has ended

    def finish(self, expect: int = 0) -> None:
        """Wait for its end, which must have the exit code `expect`."""
        try:
            code = self._process.wait(MOST_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            fail(f"{self.name} does not end")
        self._reader.join()
        if code != expect:
            fail(f"{self.name}: exit code {code}, expected {expect}")


class NodeDemo:
    """The steps of this demo, in the order of its methods."""

    def __init__(self, directory: Path, steps: int = STEPS, kill_after_step: int = KILL_AFTER_STEP) -> None:
        self.directory, self.steps, self.kill_after_step = directory, steps, kill_after_step
        self.model, self.data = directory / "model", directory / "texts.jsonl"
        self.processes: list[Process] = []
        self.whole, self.disturbed = directory / "undisturbed", directory / "disturbed"

    def run(self) -> None:
        """Show all of it."""
        try:
            self.make_model_and_data()
            self.undisturbed()
            self.with_a_kill()
            self.compare()
        finally:
            for process in self.processes:
                process.kill()

    def make_model_and_data(self) -> None:
        """Write what the runs start from."""
        title("1  A small model with random weights, and a text: the Zen of Python")
        passages = list(texts())
        self.data.write_text("".join(json.dumps({"text": passage}) + "\n" for passage in passages), encoding="utf-8")
        say(f"{make_model(self.model, passages) / 1e6:.1f} million parameters, {len(passages)} passages")

    def undisturbed(self) -> None:
        """Train with a node and two workers."""
        title("2  A node, which has weights, states and data; two workers, which have nothing, compute")
        node, address = self.start_node(self.whole)
        run_headrace("doctor", "--no-measure", "--node", address)
        workers = [self.start_worker(f"worker {number}", address) for number in (1, 2)]
        for process in (node, *workers):
            process.finish()

    def with_a_kill(self) -> None:
        """The same, but a worker is killed, and a spare takes over."""
        title(f"3  The same once more with a spare worker, but kill -9 of a worker after step {self.kill_after_step}")
        node, address = self.start_node(self.disturbed)
        killed, other = (self.start_worker(f"worker {number}", address) for number in (1, 2))
        node.wait_for(r"^step +1/")
        spare = self.start_worker("spare", address)
        node.wait_for(rf"^step +{self.kill_after_step}/")
        killed.kill()
        say("(worker 1 is killed)")
        for process in (node, other, spare):
            process.finish()
        killed.finish(expect=-signal.SIGKILL)
        node.wait_for("going on from the last committed step")

    def compare(self) -> None:
        """Compare losses and weights of both runs, exactly."""
        title("4  Is it the same model?")
        losses = [
            [json.loads(line)["loss"] for line in (run / "metrics.jsonl").open(encoding="utf-8")]
            for run in (self.whole, self.disturbed)
        ]
        same_losses = losses[0] == losses[1] and len(losses[0]) == self.steps
        say(f"losses   {'identical' if same_losses else 'DIFFERENT'}: {len(losses[0])} steps, last {losses[0][-1]!r}")
        names = sorted(path.name for path in (self.whole / "final").glob("*.safetensors"))
        same = bool(names) and all(
            (self.whole / "final" / name).read_bytes() == (self.disturbed / "final" / name).read_bytes() for name in names
        )
        say(f"weights  {'identical' if same else 'DIFFERENT'}, byte for byte: {', '.join(names)}")
        if not same_losses or not same:
            fail("the run whose worker was killed differs from the undisturbed one")

    def start_node(self, output: Path) -> tuple[Process, str]:
        """Start a node, and return it with its address."""
        node = self.start(
            "node",
            *("node", str(self.model), str(self.data), "--output", str(output), "--ssd", str(self.directory / "ssd")),
            *("--listen", "127.0.0.1:0", "--workers", "2", "--host-memory", "1GiB"),
            *("--tokens-per-step", "512", "--sequence-length", "64", "--max-steps", str(self.steps)),
            *("--learning-rate", "1e-3", "--seed", "7"),
        )
        return node, node.wait_for(r"^listening at (\S+)")[1]

    def start_worker(self, name: str, address: str) -> Process:
        """Start a worker for the node at `address`."""
        return self.start(name, "train", "--node", address, "--host-memory", "1GiB")

    def start(self, name: str, *arguments: str) -> Process:
        """Start a process, which ends with the demo at the latest."""
        self.processes.append(process := Process(name, *arguments))
        return process


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=ROOT / "demo-run" / "node", help="is emptied first")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--kill-after-step", type=int, default=KILL_AFTER_STEP)
    arguments = parser.parse_args()
    directory = arguments.directory.resolve()
    started = time.monotonic()
    # One thread for each process: they share this machine's cores.
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(directory / "cache"),
        "XDG_CONFIG_HOME": str(directory / "config"),
    }
    if directory.exists():
        shutil.rmtree(directory)
    (directory / "ssd").mkdir(parents=True)
    NodeDemo(directory, arguments.steps, arguments.kill_after_step).run()
    title(f"done in {time.monotonic() - started:.0f} s; everything lies in {show(directory)}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("\ninterrupted; `make demo-node` begins again") from None
