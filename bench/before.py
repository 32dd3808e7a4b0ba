"""Is a tree of this project slower than an older one? Both take turns, a process each: step, pass, plan, compression.

    python bench/before.py OLD_TREE NEW_TREE --scratch DISK [--jobs step pass plan compress] [--size S] [--rounds 5]
                           [--compressed MODEL DATA]

Prints for each job the ratio new / old of wall and of processor seconds: the median over rounds of ratios within a round. The
model is random (`make_model.py`); of compression it is the user's. On a machine that does other work only processor seconds
mean something.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
PROMPT, NEW, TOKENS = 16, 48, 512
LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
Seconds = tuple[float, float]  # wall, processor


def step(model: Path, scratch: Path) -> list[Seconds]:
    """Return the seconds of training steps after the first two."""
    import torch

    import headrace

    options = headrace.Options(
        host_memory="4GiB",
        learning_rate=1e-5,
        output=scratch / "run",
        tokens_per_step=TOKENS,
        sequence_length=TOKENS,
        compute_dtype="bfloat16",
        max_grad_norm=None,
    )
    found = []
    with headrace.Engine.open(model, options) as engine:
        for _ in range(8):
            tokens = torch.randint(3, 30000, (1, TOKENS))
            found.append(timed(lambda tokens=tokens: engine.step({"input_ids": tokens, "labels": tokens})))
    return found[2:]


def generation_pass(model: Path, scratch: Path) -> list[Seconds]:
    """Return the seconds of passes of one token: a batch's time by its new tokens."""
    import headrace

    del scratch
    found = []
    with headrace.Generator.open(model, headrace.Budget(host="4GiB"), compute_dtype="bfloat16") as generator:
        for _ in range(4):
            wall, processor = timed(
                lambda: list(
                    generator.generate([list(range(1, PROMPT + 1))], max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
                )
            )
            found.append((wall / NEW, processor / NEW))
    return found[1:]


def timed(work: Any) -> Seconds:
    """Return the seconds that `work()` takes."""
    started, used = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - started, time.process_time() - used


def command(tree: Path, *arguments: Any) -> Seconds:
    """Run the command of a tree, and return its seconds."""
    before, started = os.times(), time.perf_counter()
    subprocess.run([sys.executable, "-m", "headrace", *map(str, arguments)], env=of(tree), check=True, capture_output=True)
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return time.perf_counter() - started, used


def of(tree: Path) -> dict[str, str]:
    """Return the environment in which that tree's package is found."""
    return {**os.environ, "PYTHONPATH": str(tree)}


def run(job: str, tree: Path, model: Path, scratch: Path, given: argparse.Namespace) -> Seconds:
    """Return the medians of a job in a tree."""
    with tempfile.TemporaryDirectory(dir=scratch) as name:
        if job == "plan":
            (Path(name) / "config.json").write_text(json.dumps(LLAMA_70B), encoding="utf-8")
            return command(tree, "plan", name, "--machine", "rtx4090-4ssd", "--host-memory", "128GiB", "--json")
        if job == "compress":
            source, data = given.compressed
            return command(tree, "compress", source, Path(name) / "out", "--to", "int4", "--data", data)
        child = [sys.executable, Path(__file__).resolve(), "--child", job, model, name]
        told = subprocess.run([*map(str, child)], env=of(tree), check=True, capture_output=True, text=True).stdout
        seconds = json.loads(told.splitlines()[-1])
        return median(each[0] for each in seconds), median(each[1] for each in seconds)


def main() -> None:
    """Take turns, and print ratios."""
    if sys.argv[1:2] == ["--child"]:
        job, model, scratch = sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4])
        print(json.dumps({"step": step, "pass": generation_pass}[job](model, scratch)))
        return
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("old", type=Path)
    arguments.add_argument("new", type=Path)
    arguments.add_argument("--scratch", type=Path, required=True)
    arguments.add_argument("--jobs", nargs="+", choices=("step", "pass", "plan", "compress"), default=["step", "pass", "plan"])
    arguments.add_argument("--size", default="S", help="of the model that is made: S has 134 million parameters")
    arguments.add_argument("--compressed", nargs=2, type=Path, metavar=("MODEL", "DATA"), help="for the job compress")
    arguments.add_argument("--rounds", type=int, default=5)
    given = arguments.parse_args()
    if "compress" in given.jobs and not given.compressed:
        arguments.error("the job compress needs --compressed MODEL DATA")
    with tempfile.TemporaryDirectory(dir=given.scratch) as name:
        model = Path(name) / "model"
        maker = [sys.executable, str(HERE / "make_model.py"), "--size", given.size, str(model)]
        subprocess.run(maker, env=of(given.new), check=True, capture_output=True)
        for job in given.jobs:
            ratios = []
            for number in range(given.rounds):
                trees = (given.old, given.new) if number % 2 else (given.new, given.old)
                found = {tree: run(job, tree, model, Path(name), given) for tree in trees}
                (old, old_used), (new, new_used) = found[given.old], found[given.new]
                ratios.append((new / old, new_used / old_used))
                print(f"{job}: old {old:.3f} s ({old_used:.3f} CPU), new {new:.3f} s ({new_used:.3f} CPU)", flush=True)
            wall, processor = (median(each) for each in zip(*ratios, strict=True))
            print(f"{job}: new / old {wall:.3f} by the clock, {processor:.3f} of processors", flush=True)


if __name__ == "__main__":
    main()
