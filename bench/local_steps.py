"""What do local steps cost in held-out loss, beside synchronous training and beside one learner, at equal tokens?

    python bench/local_steps.py --scratch DIR --model SMOLLM2 [--only NAME...] [--merges 5]

The model is SmolLM2-135M-Instruct as `make demo` keeps it, tuned on what the Python library says of itself: rows of 128, two a
step and learner. All is float32 with a constant rate. Each case is a run of `headrace`, learners and their node over loopback,
each with one thread, and adds a line to `DIR/local_steps.jsonl`. The same command leaves out what there is, and prints a table.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "demo"))

ROWS, LENGTH, PORT = 2, 128, 29650
LORA = {"adapter": "lora:rank=16", "learning_rate": 5e-4}
WHOLE = {"learning_rate": 2e-5}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run: `learners` with so many local steps between merges, or none and one machine that takes all rows of a step."""

    method: dict[str, Any]
    learners: int = 0
    local_steps: int = 0
    rows: int = ROWS
    steps: int = 1  # times those of a learner
    more: dict[str, Any] = field(default_factory=dict)


CASES = {
    "LoRA, 2 learners, H = 20": Case(method=LORA, learners=2, local_steps=20),
    "LoRA, synchronous, twice the rows": Case(method=LORA, rows=2 * ROWS),
    "LoRA, one learner, twice the steps": Case(method=LORA, steps=2),
    "LoRA, one learner, half the tokens": Case(method=LORA),
    "LoRA, 4 learners, H = 20": Case(method=LORA, learners=4, local_steps=20),
    "LoRA, 2 learners, H = 100": Case(method=LORA, learners=2, local_steps=100),
    "whole, 2 learners, H = 20": Case(method=WHOLE, learners=2, local_steps=20),
    "whole, synchronous, twice the rows": Case(method=WHOLE, rows=2 * ROWS),
    "whole, one learner, twice the steps": Case(method=WHOLE, steps=2),
}


def headrace(*words: str, **more: Any) -> "subprocess.Popen[str]":
    """Start a command with one thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-m", "headrace", *words], env=environment, text=True, **more)


def run(name: str, case: Case, folder: Path, model: Path, merges: int) -> dict[str, Any]:
    """Take one case and return its row."""
    steps = merges * (case.local_steps or 20) * case.steps
    output = folder / name.replace(" ", "-").replace(",", "").replace("=", "")
    options = {
        "sequence_length": LENGTH,
        "tokens_per_step": case.rows * LENGTH,
        "max_steps": steps,
        "compute_dtype": "float32",
        "host_memory": "3GiB",
        "output": str(output),
        "packing": True,
        **case.method,
        **case.more,
    }
    if case.learners:
        options |= {"local_steps": case.local_steps, "quorum": case.learners, "grace": 3600, "listen": f"127.0.0.1:{PORT}"}
    words = [f"{key}={value}" for key, value in options.items()]
    begun = time.monotonic()
    with (folder / "log.txt").open("a", encoding="utf-8") as log:
        verb = "node" if case.learners else "train"
        node = headrace(verb, str(model), str(folder / "train.jsonl"), *words, stdout=log, stderr=log)
        learners = []
        for learner in range(case.learners):
            ssd = folder / f"ssd-{learner}"
            ssd.mkdir(exist_ok=True)
            own = ("--node", f"127.0.0.1:{PORT}", "--ssd", str(ssd), "--host-memory", "3GiB")
            learners.append(headrace("train", *own, stdout=log, stderr=log))
        if any(process.wait() for process in (node, *learners)):
            raise SystemExit(f"{name}: failed; see {folder / 'log.txt'}")
    found = loss_of(output / "final", model, folder)
    return {"case": name, "steps": steps, "loss": found, "seconds": time.monotonic() - begun}


def loss_of(place: Path, model: Path, folder: Path) -> float:
    """Return the held-out loss of a model or an adapter, in nats."""
    is_adapter = (place / "adapter_config.json").exists()
    words = ["eval", str(model if is_adapter else place), "--data", str(folder / "held-out.jsonl"), "--json"]
    words += ["--adapter", str(place)] if is_adapter else []
    process = headrace(*words, "--sequence-length", str(LENGTH), "--compute-dtype", "float32", stdout=subprocess.PIPE)
    out, _ = process.communicate()
    return float(json.loads(out)["loss"])


def write_data(folder: Path) -> None:
    """Write the questions and answers that are trained, and those that are held out."""
    from python_docs import python_docs, write

    for name, samples in zip(("train", "held-out"), python_docs(), strict=True):
        write(folder / f"{name}.jsonl", samples)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as Markdown."""
    lines = ["| run | steps of a learner | held-out loss | seconds |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {r['case']} | {r['steps']} | {r['loss']:.4f} | {r['seconds']:.0f} |" for r in rows)])


def main() -> None:
    """Take the cases that are not there yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--merges", type=int, default=5)
    given = parser.parse_args()
    folder = given.scratch.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "train.jsonl").exists():
        write_data(folder)
    path = folder / "local_steps.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    if not any(row["case"] == "before" for row in rows):
        rows.append({"case": "before", "steps": 0, "loss": loss_of(given.model, given.model, folder), "seconds": 0.0})
        path.write_text(json.dumps(rows[-1]) + "\n", encoding="utf-8")
    for name in given.only:
        if not any(row["case"] == name for row in rows):
            rows.append(run(name, CASES[name], folder, given.model, given.merges))
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
