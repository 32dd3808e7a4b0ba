"""Prompts kept as inputs of blocks, whose keys and values are computed again in each pass: the bits of `generate`."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_caches import COMMON, NEW, PLACES, WAYS, _arithmetic, micro_batches
from tiers import sampled

from headrace.generate.cache_plan import CachePlan, with_inputs
from headrace.generate.generator import Generator
from headrace.generate.micro_batches import Generated
from headrace.model.stored_layer import StoredLayer
from headrace.terms.budget import Budget
from headrace.terms.sizes import PAGE_BYTES

NAMES = ("opt", "gpt-neox", "bloom", "qwen3", "gemma2", "qwen3-moe", "gpt2", "gpt-oss", "qwen3-next")
CASES = [
    (name, place, way, dtype, chunk)
    for name in NAMES
    for place in PLACES
    for way in WAYS
    for dtype in ("float32", "bfloat16")
    for chunk in (0, 7)
]
FEW = [("gpt-neox", "drives", "sampled", "float32", 7), ("qwen3", "all", "greedy", "bfloat16", 0)]


def generated(directory: Path, ssd: Path, dtype: str, place: str, asked: dict[str, Any]) -> list[Generated]:
    """Return what is generated with the prompts of all blocks whose caches move kept as inputs."""
    homes, device = PLACES[place]
    budget = Budget(host="4GiB", device="64MiB" if device else None, ssd=ssd)
    with Generator.open(directory, budget, compute_dtype=dtype, rows=2, seats=2) as generator:
        whole = generator.model.settings(48, None, asked)
        plan = generator.prepare(5, 48, NEW)
        tiered = [homes[block % len(homes)] if may else "compute" for block, may in enumerate(plan.costs.tiered)]
        *_, caches = with_inputs(CachePlan(homes=tuple(tiered), slots=2, page_bytes=PAGE_BYTES), plan.costs)
        assert len(caches.inputs) == len(tiered) - tiered.count("compute")
        generator.use(replace(plan, caches=caches))
        return sorted(generator.run(micro_batches(whole, 48)), key=lambda done: done.batch.number)


@pytest.mark.parametrize(("name", "place", "way", "dtype", "chunk"), sampled(CASES, FEW))
def test_prompts_kept_as_inputs_give_the_bits_of_generate(
    name: str,
    place: str,
    way: str,
    dtype: str,
    chunk: int,
    directory_of: Callable[..., Path],
    stock: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = {**COMMON, **WAYS[way], **({"prefill_chunk_size": chunk} if chunk else {})}
    directory, made = directory_of(name, dtype), list[int]()
    own = StoredLayer.recompute

    def noting(self: StoredLayer, *given: Any) -> None:
        made.append(self._input_tokens)
        own(self, *given)

    monkeypatch.setattr(StoredLayer, "recompute", noting)
    for each in generated(directory, tmp_path, dtype, place, asked):
        with _arithmetic(dtype):
            expected = stock(directory, dtype, each.batch.rows, each.batch.seed, asked)
        assert torch.equal(each.raw.sequences, expected.sequences)
        for one, other in zip(each.raw.logits, expected.logits, strict=True):
            assert torch.equal(one, other)
    assert max(made) > 20, "whole prompts are kept, in all their chunks"
    assert not list(tmp_path.iterdir())
