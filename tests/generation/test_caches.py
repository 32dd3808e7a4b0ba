"""Keys and values in tiers: the bits of `generate`, whether they wait where compute is, in host memory or on drives."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from some_prompts import prompts
from tiers import sampled

from headrace.engine.generator import Generated, Generator, MicroBatch
from headrace.machine.cpu import CpuMachine
from headrace.model.products import WideProducts
from headrace.plan.caches import HOST, SSD, CachePlan
from headrace.terms.budget import Budget
from headrace.terms.sizes import PAGE_BYTES

NEW = 12
COMMON = {
    "max_new_tokens": NEW,
    "pad_token_id": 0,
    "eos_token_id": None,
    "return_dict_in_generate": True,
    "output_logits": True,
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1},
}
# Homes of caches, block by block and again from the first, and whether there is a device of its own.
PLACES = {"drives": ((SSD,), False), "host": ((HOST,), True), "all": (("compute", SSD, HOST), True)}


def micro_batches(settings: dict[str, Any], longest: int = 40) -> list[MicroBatch]:
    rows = [row * 4 for row in prompts(5)]
    assert max(map(len, rows)) <= longest
    return [
        MicroBatch(number, tuple(map(tuple, rows[2 * number : 2 * number + 2])), 40 + number, settings) for number in range(3)
    ]


def generated(directory: Path, ssd: Path, dtype: str, place: str, settings: dict[str, Any], **how: Any) -> list[Generated]:
    homes, device = PLACES[place]
    budget = Budget(host="4GiB", device="64MiB" if device else None, ssd=ssd)
    with Generator.open(directory, budget, compute_dtype=dtype, rows=2, seats=2, **how) as generator:
        whole = generator.model.settings(48, None, settings)
        plan = generator.prepare(5, 48, NEW)
        tiered = [homes[block % len(homes)] if may else "compute" for block, may in enumerate(plan.costs.tiered)]
        assert any(home != "compute" for home in tiered)
        generator.use(replace(plan, caches=CachePlan(homes=tuple(tiered), slots=2, page_bytes=PAGE_BYTES)))
        return sorted(generator.run(micro_batches(whole, 48)), key=lambda done: done.batch.number)


CASES = [
    (name, place, way, dtype)
    for name in ("llama", "deepseek-v3", "gpt-oss", "qwen3-moe")
    for place in PLACES
    for way in WAYS
    for dtype in ("float32", "bfloat16")
]
FEW = [("llama", "drives", "sampled", "float32"), ("gpt-oss", "all", "greedy", "bfloat16")]


@pytest.mark.parametrize(("name", "place", "way", "dtype"), sampled(CASES, FEW))
def test_caches_in_tiers_give_the_bits_of_generate(
    name: str, place: str, way: str, dtype: str, directory_of: Callable[..., Path], stock: Callable[..., Any], tmp_path: Path
) -> None:
    settings, directory = {**COMMON, **WAYS[way]}, directory_of(name, dtype)
    for each in generated(directory, tmp_path, dtype, place, settings):
        with _arithmetic(dtype):
            expected = stock(directory, dtype, each.batch.rows, each.batch.seed, settings)
        assert torch.equal(each.raw.sequences, expected.sequences)
        for one, other in zip(each.raw.logits, expected.logits, strict=True):
            assert torch.equal(one, other)
    assert not list(tmp_path.iterdir())


def _arithmetic(dtype: str) -> AbstractContextManager[object]:
    return nullcontext() if dtype == "float32" or CpuMachine().multiplies(dtype) else WideProducts()
