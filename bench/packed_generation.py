"""Tokens per second of a model with four bits whose blocks stay in memory: packed products, decoded weights, the plain model.

    python bench/packed_generation.py CODED PLAIN [--rounds 5] [--rows 1 4 16]

The three take turns, a batch of one prompt a row at a time, on one thread; figures are rows divided by the median seconds of
a pass after the prompt. "packed" is forced for any number of rows, so that it shows where the plan's bound has to lie.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from headrace.generate.passes.generator import Generator
from headrace.terms.events import GenerationPass
from headrace.terms.options.budget import Budget

PROMPT, NEW, ALL_ROWS = 16, 32, 32


def opened(directory: Path, rows: int, packed: bool, seconds: list[float]) -> Generator:
    """Return a generator with its buffers made, which notes the seconds of its passes."""

    def note(event: Any) -> None:
        if isinstance(event, GenerationPass):
            seconds.append(event.seconds)

    generator = Generator.open(
        directory, Budget(host="6GiB"), compute_dtype="bfloat16", rows=rows, seats=1, sink=note, packed_products=packed
    )
    plan = generator.plan_only(rows, PROMPT, NEW)
    generator.use(replace(plan, packed_rows=ALL_ROWS) if packed else plan)
    return generator


def measure(coded: Path, plain: Path, rows: int, rounds: int) -> dict[str, float]:
    """Return tokens per second by way."""
    ways = {"packed": (coded, True), "decoded": (coded, False), "plain": (plain, False)}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    open_ones = {way: opened(place, rows, packed, seconds[way]) for way, (place, packed) in ways.items()}
    passes: dict[str, list[float]] = {way: [] for way in ways}
    prompts = [[1 + row + place for place in range(PROMPT)] for row in range(rows)]
    for round_number in range(rounds + 1):
        for way, generator in open_ones.items():
            seconds[way].clear()
            list(generator.generate(prompts, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False))
            if round_number:  # the first one reads, decodes and packs
                passes[way] += seconds[way][1:]
    for generator in open_ones.values():
        generator.close()
    return {way: rows / median(found) for way, found in passes.items()}


def main() -> None:
    """Print a line for each number of rows."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("coded", type=Path)
    arguments.add_argument("plain", type=Path)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    given = arguments.parse_args()
    torch.set_num_threads(1)
    for rows in given.rows:
        found = measure(given.coded, given.plain, rows, given.rounds)
        print(rows, "rows:", ", ".join(f"{way} {rate:.1f} tokens/s" for way, rate in found.items()), flush=True)


if __name__ == "__main__":
    main()
