"""Generation beside accelerate's disk offload: same model, prompts and machine, inside the same arithmetic, in turn.

    python bench/offload.py --scratch DISK [--rounds 5] [--output RESULTS.json] [--accelerate-python ENV/bin/python]

A random Llama of 0.6 billion parameters in bfloat16 answers prompts of 32 tokens. Two processes, one for each contestant, wait
for their turn, so that runs alternate without loading anything anew; times are of `generate`, the prompt's pass included.

* cold: a page cache that cannot hold the model, as where it is far larger than memory. What accelerate has mapped is dropped
  from the page cache before each pass (`posix_fadvise`), which is what such a cache does to files that are read in a cycle.
  Ours are read past the page cache, with as little memory as it takes.
* warm: accelerate's files stay in the page cache; our budget is the model's bytes and 1 GiB.
* half: our budget is half of the model's bytes and what a process takes besides.
* drive: FlexGen's claim. The page cache is cold, and host memory holds the keys and values of as many rows as accelerate has;
  ours, under that limit, lie on the drive, for eight times the rows. `--ways drive --batches 8`.

It needs `accelerate`, an extra of the benchmarks (`pip install .[bench]`), in either Python.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from launch import environment, machine_facts, require_disk, scratch_directory

NEW_TOKENS, PROMPT_TOKENS, VOCABULARY = 8, 32, 8000
BATCHES = (1, 8, 16)
TIMES_ROWS = 8  # of the way "drive"
AIMS = {
    ("drive", 8): 3.0,
    ("cold", 1): 2.2,
    ("cold", 8): 1.8,
    ("cold", 16): 1.6,
    ("warm", 1): 1.0,
    ("warm", 8): 1.0,
    ("warm", 16): 1.0,
}
MIB = 2**20
Row = dict[str, Any]
# One run: a way and a batch -> what it took.
Run = Callable[[str, int], Row]


def make_model(directory: Path) -> None:
    """Write the model, one shard."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=1536,
        intermediate_size=6144,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)


def prompts(batch: int) -> list[list[int]]:
    """Return the prompts of a batch."""
    import torch

    drawn = torch.randint(3, VOCABULARY, (batch, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))
    return list(drawn.tolist())


def read_bytes() -> int:
    """Return the bytes that this process has had from the block layer."""
    lines = Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


def accelerate_runs(model_directory: Path, scratch: Path) -> Run:
    """Return how accelerate runs a batch."""
    import torch
    from accelerate import disk_offload
    from transformers import AutoModelForCausalLM

    from headrace.machine.cpu import CpuMachine
    from headrace.model.kernels.products import WideProducts

    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.bfloat16).eval()
    disk_offload(model, str(scratch), execution_device=torch.device("cpu"))
    os.sync()
    cold, own = [False], model.model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        for path in scratch.iterdir() if cold[0] else ():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        return own(*args, **kwargs)

    model.model.forward = forward
    narrow = contextlib.nullcontext() if CpuMachine().multiplies("bfloat16") else WideProducts()

    def run(way: str, batch: int) -> Row:
        cold[0] = way != "warm"
        ids, read = torch.tensor(prompts(batch)), read_bytes()
        start, used = time.perf_counter(), time.process_time()
        with narrow, torch.no_grad():
            asked = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            out = model.generate(ids, attention_mask=torch.ones_like(ids), **asked)
        seconds, cpu = time.perf_counter() - start, time.process_time() - used
        answers = out[:, PROMPT_TOKENS:].tolist()
        return {"seconds": seconds, "cpu_seconds": cpu, "read_bytes": read_bytes() - read, "tokens": answers}

    return run


def our_runs(model_directory: Path, scratch: Path) -> Run:
    """Return how we run a batch, with the plan's own rows and seats."""
    from headrace import Budget
    from headrace.generate.passes.generator import Generator
    from headrace.terms.errors import PlanInfeasible
    from headrace.terms.events import GenerationPass

    size = sum(path.stat().st_size for path in model_directory.glob("*.safetensors"))
    least: dict[int, int] = {}

    def budget_of(way: str, batch: int) -> int:
        if way == "warm":
            return size + 1024 * MIB
        if way == "half":
            return size // 2 + least_bytes(batch) - 3 * size // 17  # three slots of the blocks are within the least
        return least_bytes(batch)

    def least_bytes(batch: int) -> int:
        if batch not in least:
            with Generator.open(model_directory, Budget(host=str(64 * MIB)), rows=batch, seats=1) as generator:
                try:
                    generator.plan_only(batch, PROMPT_TOKENS, NEW_TOKENS)
                except PlanInfeasible as refusal:
                    least[batch] = refusal.needed_bytes + 48 * MIB  # processes are not all of one size
        return least[batch]

    def run(way: str, batch: int) -> Row:
        passes: list[GenerationPass] = []

        def note(event: Any) -> None:
            if isinstance(event, GenerationPass):
                passes.append(event)

        asked = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        budget = Budget(host=str(budget_of(way, batch)), ssd=(scratch,) if way == "drive" else ())
        batch *= TIMES_ROWS if way == "drive" else 1
        with Generator.open(model_directory, budget, sink=note, copy_weights=False) as generator:
            plan = generator.prepare(batch, PROMPT_TOKENS, NEW_TOKENS)
            if way == "warm":  # accelerate's pages are there before its run, too
                list(generator.generate(prompts(batch), max_new_tokens=2, do_sample=False, eos_token_id=None, pad_token_id=0))
                passes.clear()
            start, used = time.perf_counter(), time.process_time()
            answers = dict(generator.generate(prompts(batch), **asked))
            seconds, cpu = time.perf_counter() - start, time.process_time() - used
        found = plan.forecast
        return {
            "seconds": seconds,
            "cpu_seconds": cpu,
            "read_bytes": sum(each.bytes_read for each in passes),
            "pass_read_share": median(each.bytes_read for each in passes[1:]) / size,
            "pass_seconds": median(each.seconds for each in passes[1:]),
            "planned_seconds": found.first_pass_seconds + (NEW_TOKENS - 1) * found.pass_seconds if found else None,
            "plan": f"{plan.seats} x {plan.rows} rows, {plan.host_slots} of {plan.num_blocks} blocks in memory, "
            f"caches of {len(plan.caches.blocks('ssd'))} on the drive",
            "tokens": [list(answers[index]) for index in range(batch)],
        }

    return run


def work(options: argparse.Namespace) -> None:
    """Answer lines `WAY BATCH` with what they took, until there are no more."""
    if options.work == "headrace":
        import headrace

        headrace.set_process_defaults()
    run = (our_runs if options.work == "headrace" else accelerate_runs)(options.model, options.scratch)
    print("ready", flush=True)
    for line in sys.stdin:
        way, batch = line.split()
        print(json.dumps(run(way, int(batch))), flush=True)


class Contestant:
    """A process that runs what it is told to, and waits in between."""

    def __init__(self, name: str, python: Path, model: Path, scratch: Path) -> None:
        own = scratch / name
        own.mkdir()
        variables = environment(omp_wait_policy="passive") | {"HF_HUB_OFFLINE": "1"}
        command = [str(python), str(Path(__file__)), "--work", name, "--model", str(model), "--scratch", str(own)]
        self.process = subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read()

    def run(self, way: str, batch: int) -> Row:
        """Run a batch once."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{way} {batch}\n")
        self.process.stdin.flush()
        return dict(json.loads(self._read()))

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()

    def _read(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a contestant ended with exit code {self.process.wait()}")
        return line


def main() -> None:
    """Print a table, and write each run as JSON where asked."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--scratch", type=Path, required=True)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--ways", default="cold,warm,half")
    arguments.add_argument("--batches", default=",".join(map(str, BATCHES)))
    arguments.add_argument("--accelerate-python", type=Path, default=Path(sys.executable))
    arguments.add_argument("--output", type=Path)
    arguments.add_argument("--work", choices=("headrace", "accelerate"), help=argparse.SUPPRESS)
    arguments.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.work:
        work(options)
        return
    ways, batches = options.ways.split(","), [int(batch) for batch in options.batches.split(",")]
    runs: list[Row] = []
    with scratch_directory(options.scratch) as scratch, contextlib.ExitStack() as stack:
        require_disk(scratch, 3 * 10**9, "the model, twice")
        model = options.model or scratch / "model"
        if not model.exists():
            make_model(model)
        pythons = {"accelerate": options.accelerate_python, "headrace": Path(sys.executable)}
        contestants = {name: Contestant(name, python, model, scratch) for name, python in pythons.items()}
        for each in contestants.values():
            stack.callback(each.close)
        for each in contestants.values():  # what is made or compiled at the first time
            each.run("warm", batches[0])
        for number in range(options.rounds):
            for way in ways:
                for batch in batches:
                    for name in sorted(contestants, reverse=bool(number % 2)):
                        if way == "half" and name == "accelerate":
                            continue
                        runs.append({"round": number, "way": way, "batch": batch, "name": name})
                        runs[-1] |= contestants[name].run(way, batch)
            if options.output is not None:
                facts = machine_facts(options.scratch)
                options.output.write_text(json.dumps({"machine": facts, "runs": runs}, indent=1), encoding="utf-8")
    print(table(runs))


def table(runs: list[Row]) -> str:
    """Return the table of the log: medians, and the median of the rounds' ratios."""
    lines = [
        "| page cache | rows | accelerate, tokens/s | Headrace, tokens/s | ratio, median (range) | of processor time | "
        "aim | read a pass, of the model | measured / planned | same tokens |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for way, batch in dict.fromkeys((run["way"], run["batch"]) for run in runs):
        of = {
            name: [run for run in runs if (run["way"], run["batch"], run["name"]) == (way, batch, name)]
            for name in ("accelerate", "headrace")
        }
        speed = {name: [len(run["tokens"]) * NEW_TOKENS / run["seconds"] for run in found] for name, found in of.items()}
        ours = of["headrace"]
        ratios = [own / other for other, own in zip(speed["accelerate"], speed["headrace"], strict=False)]
        times = len(ours[0]["tokens"]) / batch
        cpu = [times * other["cpu_seconds"] / own["cpu_seconds"] for other, own in zip(of["accelerate"], ours, strict=False)]
        same = all(run["tokens"] == ours[0]["tokens"] for run in ours)
        same = same and all(run["tokens"] == ours[0]["tokens"][:batch] for run in of["accelerate"])
        planned = median(run["seconds"] / run["planned_seconds"] for run in ours)
        lines.append(
            f"| {way} | {batch} | {_of(speed['accelerate'])} | {median(speed['headrace']):.2f} | "
            + (f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else "-")
            + f" | {_of(cpu)} | {AIMS.get((way, batch), '-')} | {median(run['pass_read_share'] for run in ours):.2f} | "
            f"{planned:.2f} | {'yes' if same else 'no'} |"
        )
    return "\n".join(lines)


def _of(speeds: list[float]) -> str:
    return f"{median(speeds):.2f}" if speeds else "-"


if __name__ == "__main__":
    main()
