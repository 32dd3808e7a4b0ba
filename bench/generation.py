"""Planned against measured, for generations: the time of a pass and the peak of memory, over eight combinations.

    python bench/generation.py --scratch DISK [--rounds 3] [--seconds 20] [--output RESULTS.json]

Before each round the machine is measured (the code of `headrace bench machine`), and the plan is made for that profile: where
others use the cores, both see it, though not alike: short loads are measured between two turns of the others. So what a
pass takes of the processor is listed, too; by one thread (`OMP_NUM_THREADS=1`), and where compute limits, it is what a quiet
machine would take. A run is a process of its own, watched from outside: its peak is `RssAnon + RssShmem`. "Cached" is a
budget that holds the weights, "half" one that holds half of them, "uncached" the least that the planner takes and a little.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from launch import environment, machine_facts, measure_machine, require_disk, run_worker, scratch_directory

MIB = 2**20
VOCABULARY, NEW_TOKENS = 8000, 10
Row = dict[str, Any]


@dataclass(frozen=True)
class Combination:
    """A line of the table. `on_drive`: a directory is given where caches may lie."""

    model: str
    rows: int
    prompt: int
    weights: str
    on_drive: bool = False

    @property
    def name(self) -> str:
        where = ", caches may go to the drive" if self.on_drive else ""
        return f"{self.model}, {self.rows} rows, prompts of {self.prompt}, weights {self.weights}{where}"


COMBINATIONS = (
    Combination("dense", 1, 32, "cached"),
    Combination("dense", 1, 32, "half"),
    Combination("dense", 1, 32, "uncached"),
    Combination("dense", 8, 128, "half"),
    Combination("dense", 16, 32, "uncached"),
    Combination("dense", 16, 256, "uncached", on_drive=True),
    Combination("mixture", 1, 32, "half"),
    Combination("mixture", 8, 32, "uncached"),
)


def make_model(kind: str, directory: Path) -> None:
    """Write a random model: 0.6 billion parameters, or 16 experts of which tokens are sent to two."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

    torch.manual_seed(0)
    common: dict[str, Any] = {"vocab_size": VOCABULARY, "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2}
    if kind == "dense":
        sizes = {"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 16}
        config: Any = LlamaConfig(**common, **sizes, num_attention_heads=16, num_key_value_heads=4)
    else:
        sizes = {"hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 8, "num_local_experts": 16}
        config = MixtralConfig(**common, **sizes, num_attention_heads=16, num_key_value_heads=4, num_experts_per_tok=2)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)


def work(options: argparse.Namespace) -> None:
    """Run one combination and write what was planned and what was found."""
    import headrace

    headrace.set_process_defaults()
    import torch

    from headrace import Budget
    from headrace.generate.passes.generator import Generator
    from headrace.plan.clock.machine_profiles import load_profile
    from headrace.terms.errors import PlanInfeasible
    from headrace.terms.events import GenerationPass

    asked = Combination(**json.loads(options.work))
    size = sum(path.stat().st_size for path in options.model.glob("*.safetensors"))
    drives = (options.scratch,) if asked.on_drive else ()
    # Where caches may go to the drive all rows are asked for at once: the least memory would take a few after the others.
    rows, seats = (asked.rows, 1) if asked.on_drive else (None, None)
    with Generator.open(options.model, Budget(host=str(64 * MIB), ssd=drives), rows=rows, seats=seats) as generator:
        try:
            generator.plan_only(asked.rows, asked.prompt, NEW_TOKENS)
        except PlanInfeasible as refusal:
            least = refusal.needed_bytes + 64 * MIB
    budget = least + {"cached": size + 512 * MIB, "half": size // 2, "uncached": 0}[asked.weights]
    passes: list[GenerationPass] = []
    used: list[float] = []  # processor seconds of this process at the end of each pass

    def note(event: Any) -> None:
        if isinstance(event, GenerationPass):
            passes.append(event)
            used.append(time.process_time())

    drawn = torch.randint(3, VOCABULARY, (asked.rows, asked.prompt), generator=torch.Generator().manual_seed(1))
    machine = load_profile(options.profile)
    budgeted = Budget(host=str(budget), ssd=drives)
    with Generator.open(options.model, budgeted, machine=machine, rows=rows, seats=seats, sink=note) as generator:
        plan = generator.prepare(asked.rows, asked.prompt, NEW_TOKENS)
        settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        start = time.monotonic()
        list(generator.generate(drawn.tolist(), **settings))
        stop = time.monotonic()
    assert plan.forecast is not None
    # Seats that have taken other ways to their first token are together from the third pass on.
    measured = [each.seconds for each in passes[2:]]
    record = {
        "rows": [{"start_clock": start, "stop_clock": stop}],
        "pass_seconds": median(measured),
        "cpu_seconds": median(later - sooner for sooner, later in pairwise(used[1:])),
        "planned_seconds": plan.forecast.pass_seconds,
        "first_seconds": passes[0].seconds,
        "planned_first_seconds": plan.forecast.first_pass_seconds,
        "limiting": plan.forecast.limiting,
        "planned_peak_bytes": plan.peak("host"),
        "plan": f"{plan.seats} x {plan.rows} rows, {plan.host_slots} of {plan.num_blocks} blocks in memory"
        + (f", caches of {len(plan.caches.blocks('ssd'))} blocks on the drive" if plan.caches.moves else "")
        + (f", {plan.experts.cached} experts cached" if plan.experts is not None else ""),
    }
    options.result.write_text(json.dumps(record), encoding="utf-8")


def main() -> None:
    """Print a table, and write each run as JSON where asked."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--scratch", type=Path, required=True)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--seconds", type=float, default=20, help="of measuring the machine before each round")
    arguments.add_argument("--output", type=Path)
    for hidden in ("--work", "--model", "--profile", "--result"):
        arguments.add_argument(hidden, type=str if hidden == "--work" else Path, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.work:
        work(options)
        return
    runs: list[Row] = []
    with scratch_directory(options.scratch) as scratch:
        require_disk(scratch, 8 * 10**9, "two models and the machine's test file")
        for kind in ("dense", "mixture"):
            make_model(kind, scratch / kind)
        for number in range(options.rounds):
            profile = scratch / "machine.json"
            measure_machine(scratch, profile, options.seconds)
            for each in COMBINATIONS:
                command = [sys.executable, str(Path(__file__)), "--work", json.dumps(asdict(each))]
                command += ["--model", str(scratch / each.model), "--profile", str(profile)]
                found = run_worker(command, environment(omp_wait_policy="passive"), scratch=scratch, timeout_seconds=600)
                runs.append({"round": number, "name": each.name, **found})
                print(json.dumps(runs[-1]), flush=True)
                if options.output is not None:
                    record = {"machine": machine_facts(scratch), "runs": runs}
                    options.output.write_text(json.dumps(record, indent=1), encoding="utf-8")
    print(table(runs))


def table(runs: list[Row]) -> str:
    """Return the table of the log: medians over the rounds."""
    lines = [
        "| combination | plan | limited by | a pass, s | / planned (range) | of the processor / planned "
        "| first pass / planned | peak / planned |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(run["name"] for run in runs):
        own = [run for run in runs if run["name"] == name and run["status"] == "ok"]
        if not own:
            lines.append(f"| {name} | failed | - | - | - | - | - | - |")
            continue
        ratios = [run["pass_seconds"] / run["planned_seconds"] for run in own]
        cpu = median(run["cpu_seconds"] / run["planned_seconds"] for run in own)
        first = median(run["first_seconds"] / run["planned_first_seconds"] for run in own)
        peak = max(run["peak_anonymous_bytes"] / run["planned_peak_bytes"] for run in own)
        lines.append(
            f"| {name} | {own[0]['plan']} | {own[0]['limiting']} | {median(run['pass_seconds'] for run in own):.3f} | "
            f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) | {cpu:.2f} | {first:.2f} | {peak:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
