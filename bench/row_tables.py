"""Row tables beside LoRA: held-out loss after equal steps, and loss on text that training should not spoil.

    python bench/row_tables.py --model SMOLLM2 --scratch DIR [--steps 30]

SmolLM2-135M is tuned on the source of the Python library, 4 rows of 128 tokens a step, in float32, clipped to a norm of 1, with
cosine rates after 5 steps of warm-up. It is held against other modules of the library, and against English prose that it does
not see (`pydoc_data`). Each run adds a line to `DIR/row_tables.jsonl`; the same command goes on after an interruption.
"""

import argparse
import json
import sysconfig
import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

import headrace
from headrace.engine.trainer import Engine

ROWS, LENGTH, WARM_UP, HELD_OUT = 4, 128, 5, 3
TABLE = "table:rows=4096,layers=8+20"
WAYS = (("lora:rank=16", 1e-3), (TABLE, 1e-3), (TABLE, 1e-2), (f"{TABLE},policy=dense", 1e-3))


def batches(tokenizer: Any, texts: Iterable[str], count: int) -> list[dict[str, torch.Tensor]]:
    """Return the first `count` batches of `texts`, one after the other in rows."""
    ids: list[int] = []
    for text in texts:
        ids += tokenizer(text)["input_ids"]
        if len(ids) >= count * ROWS * LENGTH:
            break
    rows = torch.tensor(ids[: count * ROWS * LENGTH]).view(count, ROWS, LENGTH)
    return [{"input_ids": each, "labels": each.clone()} for each in rows]


def sources() -> list[str]:
    """Return the modules of the Python library that lie in its folder itself, in a fixed mixture."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"), key=lambda path: hash_of(path.name))
    return [path.read_text(encoding="utf-8", errors="replace") for path in paths]


def hash_of(name: str) -> int:
    """Return a number that orders names without meaning."""
    return sum(ord(letter) * 31**index for index, letter in enumerate(name)) % 9973


def prose() -> list[str]:
    """Return what the library's help says of the language."""
    text = (Path(sysconfig.get_paths()["stdlib"]) / "pydoc_data" / "topics.py").read_text(encoding="utf-8")
    return [text.replace("\\n", "\n")]


def run(model: Path, adapter: str, rate: float, steps: int) -> dict[str, Any]:
    """Train with one way; return what was measured."""
    tokenizer, texts = AutoTokenizer.from_pretrained(model), sources()
    learned, held = batches(tokenizer, texts[20:], steps), batches(tokenizer, texts[:20], HELD_OUT)
    kept = batches(tokenizer, prose(), HELD_OUT)
    options = headrace.Options(
        adapter=adapter,
        learning_rate=rate,
        lr_schedule="cosine",
        warmup_steps=WARM_UP,
        max_steps=steps,
        compute_dtype="float32",
        host_memory="3GiB",
        tokens_per_step=ROWS * LENGTH,
        sequence_length=LENGTH,
    )
    with tempfile.TemporaryDirectory() as folder, Engine.open(model, replace(options, output=Path(folder) / "run")) as engine:

        def loss(of: list[dict[str, torch.Tensor]]) -> float:
            return sum(engine.evaluate(batch).loss for batch in of) / len(of)

        before = loss(held), loss(kept)
        started, written = time.perf_counter(), 0
        for batch in learned:
            result = engine.step(batch)
            written += result.bytes_written.get("ssd", 0)
        seconds = (time.perf_counter() - started) / steps
        return {
            "adapter": adapter,
            "rate": rate,
            "steps": steps,
            "held_out": [before[0], loss(held)],
            "kept": [before[1], loss(kept)],
            "seconds_per_step": seconds,
            "written_per_step": written / steps,
            "peak_bytes": result.peak_bytes["host"],
        }


def main() -> None:
    """Run what is not in the file yet, and print all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=30)
    given = parser.parse_args()
    file = given.scratch / "row_tables.jsonl"
    found = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
    for adapter, rate in WAYS:
        if not any((each["adapter"], each["rate"], each["steps"]) == (adapter, rate, given.steps) for each in found):
            found.append(run(given.model, adapter, rate, given.steps))
            with file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(found[-1]) + "\n")
    for each in found:
        print(json.dumps(each))


if __name__ == "__main__":
    main()
