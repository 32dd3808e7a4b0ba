"""MoE-Lightning's claim: prompts of 16 to 512 tokens, mixed, beside prompts of one length with as many tokens in all.

    python bench/lengths.py --scratch DISK [--rounds 3] [--prompts 32] [--output RESULTS.json]

A random Llama of 130 million parameters, weights uncached, no device, the same budget for both; times are of `generate`, in
turn, the prompts' passes included. The aim is 0.8 of the tokens of equal lengths a second. Passes and bytes do not depend on
what else the machine does. "by rows" is the mixed run with as many rows in each micro-batch.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

from launch import machine_facts, require_disk, scratch_directory

SHORTEST, LONGEST, NEW_TOKENS, VOCABULARY = 16, 512, 16, 8000
MIB = 2**20


def make_model(directory: Path) -> None:
    """Write the model."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)


def main() -> None:
    """Print the ratio, and write each round as JSON where asked."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--scratch", type=Path, required=True)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--prompts", type=int, default=32)
    arguments.add_argument("--output", type=Path)
    options = arguments.parse_args()
    import headrace

    headrace.set_process_defaults()
    import torch

    from headrace import Budget
    from headrace.generate.passes.generator import Generator
    from headrace.generate.plan.seat_shapes import PromptLengths
    from headrace.terms.errors import PlanInfeasible
    from headrace.terms.events import GenerationPass

    count = options.prompts
    mixed = torch.linspace(SHORTEST, LONGEST, count).round().int().tolist()
    lengths = {"mixed": mixed, "equal": [round(sum(mixed) / count)] * count, "by rows": mixed}
    passes: list[GenerationPass] = []

    def note(event: Any) -> None:
        passes.extend([event] if isinstance(event, GenerationPass) else [])

    asked: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    random = torch.Generator().manual_seed(1)
    prompts = {
        name: [torch.randint(3, VOCABULARY, (length,), generator=random).tolist() for length in each]
        for name, each in lengths.items()
    }
    with scratch_directory(options.scratch) as scratch:
        require_disk(scratch, 10**9, "the model")
        make_model(scratch / "model")
        with Generator.open(scratch / "model", Budget(host=str(64 * MIB)), rows=8, seats=1) as generator:
            try:
                generator.plan_only(8, LONGEST, NEW_TOKENS)
                raise SystemExit("64 MiB suffice")
            except PlanInfeasible as refusal:
                budget = refusal.needed_bytes + 128 * MIB
        rounds, plans = [], {}
        for number in range(options.rounds + 1):
            found = {}
            for name in sorted(prompts, reverse=bool(number % 2)):
                with Generator.open(scratch / "model", Budget(host=str(budget)), sink=note) as generator:
                    known = None if name == "by rows" else PromptLengths(tuple(lengths[name]))
                    plan = generator.prepare(count, max(lengths[name]), NEW_TOKENS, lengths=known)
                    plans[name] = f"{plan.seats} x {plan.rows} rows, {plan.host_slots} of {plan.num_blocks} blocks in memory"
                    passes.clear()
                    start, used = time.perf_counter(), time.process_time()
                    done = dict(generator.generate(prompts[name], **asked))
                    assert len(done) == count
                    found[name] = time.perf_counter() - start
                    found[f"{name}_cpu"] = time.process_time() - used
                    found[f"{name}_passes"], found[f"{name}_bytes"] = len(passes), sum(each.bytes_read for each in passes)
            print(json.dumps(found), flush=True)
            rounds += [found] if number else []  # without what is compiled or made at the first time
        if options.output is not None:
            record = {"machine": machine_facts(options.scratch), "plans": plans, "rounds": rounds}
            options.output.write_text(json.dumps(record, indent=1), encoding="utf-8")
    of_time = [found["equal"] / found["mixed"] for found in rounds]
    of_cpu = [found["equal_cpu"] / found["mixed_cpu"] for found in rounds]
    print(f"plans: {plans}")
    print(f"{median(of_time):.2f} ({min(of_time):.2f} to {max(of_time):.2f}) of the tokens/s of equal lengths")
    last = rounds[-1]
    for what in ("passes", "bytes"):
        print(f"{what}: " + ", ".join(f"{name} {last[f'{name}_{what}']}" for name in prompts))
    print(f"{median(of_cpu):.2f} ({min(of_cpu):.2f} to {max(of_cpu):.2f}) of their tokens a processor second")


if __name__ == "__main__":
    main()
