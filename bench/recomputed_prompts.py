"""What keeping prompts as inputs of blocks (KVPR) gains where caches come from a slow drive.

A GPT-NeoX with random weights stays in memory; its caches lie in a file that is read and written at a declared rate. In each
round it generates with keys and values of all blocks on the drive, then with the prompts of half and of all blocks as inputs.

    python bench/recomputed_prompts.py --scratch /tmp --rate 0.05
"""

import argparse
import json
import shutil
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

import headrace
from headrace.files import DirectFile
from headrace.generate.passes import seat_caches
from headrace.generate.passes.generator import Generator
from headrace.generate.passes.micro_batches import SeatRows
from headrace.generate.plan.cache_plan import SSD, CachePlan, with_inputs
from headrace.generate.plan.seconds import with_forecast
from headrace.plan.clock.nominal import nominal_machine
from headrace.terms.events import GenerationPass
from headrace.terms.options.budget import Budget
from headrace.terms.sizes import PAGE_BYTES
from headrace.testing import ThrottledFile


def write_model(directory: Path, hidden: int, blocks: int) -> None:
    """Write a model whose keys have as many numbers as its hidden states."""
    torch.manual_seed(1)
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": blocks, "num_attention_heads": 4}
    config = GPTNeoXConfig(
        vocab_size=256, dtype="float32", max_position_embeddings=4096, bos_token_id=0, eos_token_id=0, **sizes
    )
    GPTNeoXForCausalLM(config).save_pretrained(directory)


def passes_of(directory: Path, scratch: Path, given: argparse.Namespace, share: float) -> tuple[dict[str, Any], Any]:
    """Generate with the prompts of a share of blocks as inputs; return what passes took, and the answer."""
    seen: list[GenerationPass] = []

    def sink(event: Any) -> None:
        if isinstance(event, GenerationPass):
            seen.append(event)

    budget = Budget(host="4GiB", ssd=scratch)
    with Generator.open(directory, budget, sink=sink, rows=given.rows, seats=2) as generator:
        plan = generator.plan_only(2 * given.rows, given.prompt, given.tokens)
        caches = CachePlan(homes=(SSD,) * given.blocks, slots=2, page_bytes=PAGE_BYTES)
        ways = {len(way.inputs): way for way in (caches, *with_inputs(caches, plan.costs))}
        plan = replace(plan, caches=ways[round(share * given.blocks)])
        machine = nominal_machine(plan.compute_threads, host_bytes=1 << 34, device_bytes=None)
        rate = given.rate * 1e9
        drive = replace(
            machine.drives[0], read_bytes_per_second=rate, write_bytes_per_second=rate, mixed_bytes_per_second=2 * rate
        )
        planned = with_forecast(plan, replace(machine, drives=(drive,))).forecast
        assert planned is not None
        generator.use(plan)
        asked = {"max_new_tokens": given.tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        settings = generator.model.settings(given.prompt, None, asked)
        rows = [tuple((7 * row + 3 * place) % 250 + 1 for place in range(given.prompt)) for row in range(2 * given.rows)]
        batches = [SeatRows(number, tuple(rows[number * given.rows :][: given.rows]), 0, settings) for number in range(2)]
        answers = sorted((done.batch.number, done.tokens) for done in generator.run(batches))
    steady = seen[2:]
    return {
        "median": statistics.median(each.seconds for each in steady),
        "planned": planned.pass_seconds,
        "read_bytes": statistics.median(each.bytes_read for each in steady),
        "planned_bytes": planned.read_bytes,
    }, answers


def main() -> None:
    """Print what each way took, and how it compares with moving keys and values."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--scratch", type=Path, required=True)
    arguments.add_argument("--rate", type=float, default=0.05, help="GB/s")
    for name, value in {"hidden": 256, "blocks": 8, "rows": 2, "prompt": 512, "tokens": 10, "rounds": 2}.items():
        arguments.add_argument(f"--{name}", type=int, default=value)
    given = arguments.parse_args()
    headrace.set_process_defaults()
    folder = given.scratch / "headrace-recomputed-prompts"
    folder.mkdir()
    nameless = DirectFile.nameless

    def slow(*asked: Any, **named: Any) -> Any:
        rate = given.rate * 1e9
        return ThrottledFile(nameless(*asked, **named), read_bytes_per_second=rate, write_bytes_per_second=rate)

    seat_caches.DirectFile.nameless = slow  # type: ignore[method-assign]
    try:
        write_model(folder / "model", given.hidden, given.blocks)
        for number in range(1, given.rounds + 1):
            first: dict[str, Any] | None = None
            for share in (0.0, 0.5, 1.0):
                found, answers = passes_of(folder / "model", folder, given, share)
                first = first or found | {"answers": answers}
                same = answers == first["answers"]
                times = found["median"] / first["median"]
                print(f"round {number}, {share:.0%} as inputs: {times:.2f} of the time, same tokens {same}", json.dumps(found))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
