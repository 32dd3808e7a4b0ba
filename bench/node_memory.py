"""Memory of a node and of its worker: 1.35 billion parameters on a node of 2 GiB, import, steps and export included.

    python bench/node_memory.py --scratch DISK [--size L] [--host-memory 2GiB] [--worker-memory 2GiB] [--steps 3] [--out FILE]

`headrace node` and `headrace train --node` as a user starts them, over loopback, watched from outside every 20 ms: `RssAnon +
RssShmem`, and twice a second the resident pages of files that are mapped from the scratch directory (model, state, data).
Moments are bfloat16, so that model, state and result take 27 GB. Ends with exit code 1 if the sum was above what a process may
take, or if one failed.
"""

import argparse
import contextlib
import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from launch import GIB, anonymous_bytes, environment, machine_facts, make_model, require_disk, scratch_directory
from shapes import SHAPES

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from node_processes import write_texts

from headrace.terms.sizes import parse_bytes

SAMPLE_SECONDS, MAPS_SECONDS = 0.02, 0.5
BYTES_PER_PARAMETER = 20  # model, two slots of weights and moments, the finished model
_PLANNED = re.compile(r"^host +([\d.]+) ([KMG])iB of", re.MULTILINE)


def mapped_bytes(pid: int, below: tuple[str, ...]) -> int:
    """Return the resident bytes of a process's mappings of files below some directories."""
    total, inside = 0, False
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8").splitlines():
            words = line.split()
            if not words[0].endswith(":"):
                inside = len(words) > 5 and words[5].startswith(below)
            elif inside and words[0] == "Rss:":
                total += 1024 * int(words[1])
    return total


class Watched:
    """`headrace` with these words, whose memory is sampled until it ends; its lines go to the file `log`."""

    def __init__(self, log: Path, scratch: Path, *words: str) -> None:
        self.log, self._below = log, (str(scratch), str((scratch / "model").resolve()))
        self.anonymous_bytes, self.mapped_bytes = 0, 0
        with log.open("w", encoding="utf-8") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "headrace", *words],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment(omp_wait_policy="passive"),
            )
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        next_maps = 0.0
        while self.process.poll() is None:
            self.anonymous_bytes = max(self.anonymous_bytes, anonymous_bytes(self.process.pid))
            if time.monotonic() >= next_maps:
                self.mapped_bytes = max(self.mapped_bytes, mapped_bytes(self.process.pid, self._below))
                next_maps = time.monotonic() + MAPS_SECONDS
            time.sleep(SAMPLE_SECONDS)

    def finish(self, seconds: float) -> dict[str, Any]:
        """Wait for its end, and return its peaks beside what it planned, in bytes."""
        code = self.process.wait(seconds)
        self._thread.join()
        text = self.log.read_text(encoding="utf-8")
        number, unit = _PLANNED.findall(text)[0]
        planned = round(float(number) * {"K": 2**10, "M": 2**20, "G": 2**30}[unit])
        return {"anonymous": self.anonymous_bytes, "mapped": self.mapped_bytes, "planned": planned, "code": code, "log": text}


def measure(scratch: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run, and return what both took."""
    model = scratch / "model"
    if options.model:
        model.symlink_to(options.model.resolve())
    else:
        make_model(options.size, model, environment(omp_wait_policy="passive"))
    write_texts(scratch, samples=512)
    node = Watched(
        scratch / "node.log",
        scratch,
        *("node", str(model), str(scratch / "data.jsonl"), "--output", str(scratch / "run"), "--listen", "127.0.0.1:29731"),
        *("--host-memory", options.host_memory, "--optimizer", "adamw:moments=bfloat16", "--max-steps", str(options.steps)),
        *("--tokens-per-step", str(options.tokens_per_step), "--sequence-length", "512", f"cache={scratch / 'cache'}"),
        *(("--max-grad-norm", "0") if options.no_clipping else ()),
    )
    worker = Watched(
        scratch / "worker.log", scratch, "train", "--node", "127.0.0.1:29731", "--host-memory", options.worker_memory
    )
    try:
        found = {"node": node.finish(options.timeout_seconds), "worker": worker.finish(60.0)}
    finally:
        for each in (node, worker):
            each.process.kill()
    metrics = (scratch / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found["node"]["allowed"], found["worker"]["allowed"] = map(parse_bytes, (options.host_memory, options.worker_memory))
    return {**found, "steps": list(map(json.loads, metrics)), "machine": machine_facts(scratch)}


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--scratch", type=Path, required=True)
    arguments.add_argument("--size", choices=list(SHAPES), default="L")
    arguments.add_argument("--model", type=Path, help="directory that make_model.py wrote; a tokenizer is added to it")
    arguments.add_argument("--host-memory", default="2GiB", help="of the node")
    arguments.add_argument("--worker-memory", default="2GiB")
    arguments.add_argument("--tokens-per-step", type=int, default=2048)
    arguments.add_argument("--steps", type=int, default=3)
    arguments.add_argument("--no-clipping", action="store_true", help="updates run behind backward")
    arguments.add_argument("--timeout-seconds", type=float, default=3000)
    arguments.add_argument("--out", type=Path)
    options = arguments.parse_args()
    with scratch_directory(options.scratch) as scratch:
        require_disk(scratch, BYTES_PER_PARAMETER * SHAPES[options.size].parameters, f"size {options.size}")
        found = measure(scratch, options)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    wrong = False
    for who in ("node", "worker"):
        each = found[who]
        taken = each["anonymous"] + each["mapped"]
        wrong |= taken > each["allowed"] or each["code"] != 0
        print(f"{who:7} {taken / GIB:.3f} GiB, {each['mapped'] / GIB:.3f} of it mapped files", end="; ")
        print(f"planned {each['planned'] / GIB:.3f}, allowed {each['allowed'] / GIB:.3f}")
        if each["code"]:
            print(f"exit code {each['code']}: {each['log']}")
    return int(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
