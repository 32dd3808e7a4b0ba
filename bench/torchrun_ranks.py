"""Ranks of torchrun on one machine beside one process, and beside FSDP2 with CPU offload: seconds of a step, memory, losses.

    python bench/torchrun_ranks.py --scratch DISK [--size M] [--ranks 2] [--tokens 2048] [--host-memory 6GiB] [--steps 6]
        [--rounds 3]

Ranks share out every unit on SSDs (`gradient_sum: tree`), and have one host copy of weights. One process has the host memory of
all of them. FSDP2 is that of `fsdp.py` over loopback: `CPUOffloadPolicy`, gloo, float32 masters, computing in bfloat16, torch's
AdamW, with and without recomputation of blocks; its states are in memory. All kinds train on the same rows with the cores that
there are. Each run is made of new processes; kinds take turns, and figures are medians of rounds. A step is the median of all
but the first two. Memory is that of the largest rank: Headrace's own measurement, with its share of the host copy; FSDP2's
largest resident size, libraries included. Losses are compared step by step.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fsdp
from fsdp import leave_batches
from node_processes import write_model, write_texts
from shapes import SHAPES
from slow_link import RUN, WARM_UP

from headrace.terms.sizes import GIB, parse_bytes

ONE, RANKS, FSDP, RECOMPUTED = "one process", "ranks", "FSDP2", "FSDP2, blocks recomputed"
KINDS = (RANKS, ONE, FSDP, RECOMPUTED)
LIMIT_SECONDS = 3600.0


def options_of(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of a command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--size", choices=sorted(SHAPES), default="M")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=2048, help="of a step of all ranks")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--host-memory", default="6GiB", help="of all ranks together")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(words)
    if given.steps <= WARM_UP:
        parser.error(f"--steps {given.steps}: the first {WARM_UP} are left out; give more")
    return given


def words_of(folder: Path, given: argparse.Namespace, ranks: int) -> list[str]:
    """Return the command of a run with so many ranks, which share the host memory; 1: a process alone."""
    options = {
        **RUN,
        "max_steps": given.steps,
        "sequence_length": given.length,
        "tokens_per_step": given.tokens,
        "gradient_sum": "tree",
        "host_memory": parse_bytes(given.host_memory) // ranks,
        "cache": folder / "cache",
        "output": folder / "run",
        "measure": "false",
    }
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    own = [f"{key}={value}" for key, value in options.items()]
    return [sys.executable, *torchrun, "-m", "headrace", "train", str(folder / "model"), str(folder / "data.jsonl"), *own]


def run_headrace(folder: Path, given: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """Run Headrace; leave the rows of each step in files."""
    log = folder / "headrace.log"
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(words_of(folder, given, ranks), stdout=file, stderr=file, timeout=LIMIT_SECONDS, check=False)
    if done.returncode:
        raise SystemExit(log.read_text(encoding="utf-8"))
    run = folder / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    peaks = [each["peak_bytes"] for each in summary.get("ranks", ())] or [line["peak_bytes"]["host"] for line in lines]
    leave_batches(folder, given.steps)
    shutil.rmtree(run)
    return {
        "step": statistics.median(line["seconds"] for line in lines[WARM_UP:]),
        "losses": [line["loss"] for line in lines],
        "memory": max(peaks),
    }


def run_fsdp(folder: Path, given: argparse.Namespace, recompute: bool) -> dict[str, Any]:
    """Run FSDP2 on the rows that `run_headrace` left."""
    code = f"import json, sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import fsdp; "
    code += "fsdp.be_rank(*map(json.loads, sys.argv[1:]))"
    threads, processes = max(1, len(os.sched_getaffinity(0)) // given.ranks), []
    for rank in range(given.ranks):
        words = (str(folder), "127.0.0.1", rank, given.steps, recompute, {}, given.ranks, "lo", threads)
        command = [sys.executable, "-c", code, *map(json.dumps, words)]
        with (folder / f"fsdp-{rank}.log").open("w", encoding="utf-8") as log:
            processes.append(subprocess.Popen(command, stdout=log, stderr=log))
    try:
        for rank, process in enumerate(processes):
            if process.wait(LIMIT_SECONDS):
                raise SystemExit((folder / f"fsdp-{rank}.log").read_text(encoding="utf-8"))
    finally:
        for process in processes:
            process.kill()
    found = [json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in range(given.ranks)]
    return {
        "step": fsdp.step_seconds(found[0]["begins"]),
        "losses": [sum(each) for each in zip(*(each["losses"] for each in found), strict=True)],
        "memory": max(each["resident_bytes"] for each in found),
    }


def table(found: Mapping[str, Sequence[Mapping[str, Any]]], given: argparse.Namespace) -> list[str]:
    """Return a row for each kind: medians of rounds, and the largest difference of a loss from that of ranks in round 1."""
    lines = [
        "| kind | s a step | tokens/s | ranks are faster by | GiB of a rank | largest loss difference |",
        "|---|---|---|---|---|---|",
    ]
    ours = found[RANKS][0]["losses"]
    fastest = statistics.median(each["step"] for each in found[RANKS])
    for kind, rounds in found.items():
        seconds, memory = (statistics.median(each[name] for each in rounds) for name in ("step", "memory"))
        off = max(abs(loss - own) for each in rounds for loss, own in zip(each["losses"], ours, strict=True))
        rates = f"{given.tokens / seconds:.1f} | {seconds / fastest:.2f}"
        lines.append(f"| {kind} | {seconds:.3f} | {rates} | {memory / GIB:.2f} | {off:.5f} |")
    return lines


def main() -> None:
    """Print a table, and write all rounds as JSON where asked."""
    given = options_of()
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory(prefix="headrace-ranks-", dir=given.scratch) as scratch:
        folder, shape = Path(scratch), SHAPES[given.size]
        write_model(
            folder,
            vocab_size=shape.vocabulary,
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
        )
        write_texts(folder, samples=max(64, given.steps * given.tokens // 32))
        for number in range(given.rounds):
            for kind in KINDS:
                if kind in (ONE, RANKS):
                    one = run_headrace(folder, given, given.ranks if kind == RANKS else 1)
                else:
                    one = run_fsdp(folder, given, kind == RECOMPUTED)
                found[kind].append(one)
                print(f"round {number + 1}, {kind}: {one['step']:.3f} s a step, last loss {one['losses'][-1]:.4f}", flush=True)
    print("\n".join(table(found, given)))
    print(f"load {os.getloadavg()[0]:.0f}")
    if given.out:
        given.out.write_text(
            json.dumps({"options": vars(given), "rounds": found}, indent=1, default=str) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
