"""Prompts kept as inputs of blocks, whose keys and values are computed again in each pass: the bits of `generate`."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_caches import COMMON, PLACES, WAYS, _arithmetic, generated
from test_generation_search import question
from tiers import sampled

from headrace.generate.passes.generator import Generator
from headrace.generate.passes.micro_batches import SeatRows
from headrace.generate.plan.cache_plan import SSD, CachePlan, with_inputs
from headrace.generate.plan.search import GenerationQuestion, make_generation_plan
from headrace.generate.plan.seconds import seconds_of_all_tokens, with_forecast
from headrace.model.caches.stored_layer import StoredLayer
from headrace.plan.clock.nominal import nominal_machine
from headrace.plan.clock.rates import Rates
from headrace.terms.costs import GenerationCosts, RecomputeCosts
from headrace.terms.events import GenerationPass
from headrace.terms.options.budget import Budget
from headrace.terms.sizes import MIB, PAGE_BYTES

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
    for each in generated(directory, tmp_path, dtype, place, asked, by_inputs=True):
        with _arithmetic(dtype):
            expected = stock(directory, dtype, each.batch.rows, each.batch.seed, asked)
        assert torch.equal(each.raw.sequences, expected.sequences)
        for one, other in zip(each.raw.logits, expected.logits, strict=True):
            assert torch.equal(one, other)
    assert max(made) > 20, "whole prompts are kept, in all their chunks"
    assert not list(tmp_path.iterdir())


def multi_head(asked: GenerationQuestion, flops: float) -> GenerationQuestion:
    """The same question of a model whose inputs have half of the bytes of keys and values, made again by `flops`."""

    def costs(rows: int) -> GenerationCosts:
        found = asked.costs_of(rows)
        again = RecomputeCosts(
            flops=(flops * rows,) * asked.num_blocks,
            calls=(20,) * asked.num_blocks,
            input_bytes=found.cache_bytes[0] // 2,
            call_bytes=4096,
        )
        return replace(found, recomputing=again)

    return replace(asked, costs_of=costs, has_drives=True)


MADE = [(flops, device) for flops in (1e6, 1e8, 1e12) for device in (None, 100 * MIB)]


@pytest.mark.parametrize(("flops", "device"), sampled(MADE, [(1e8, None), (1e12, 100 * MIB)]))
def test_the_plan_keeps_as_many_prompts_as_inputs_as_is_best(flops: float, device: int | None) -> None:
    """As the best of all numbers of blocks; none where computing takes longer than reading, and it is never slower."""
    few = {"rows": 4, "seats": 4} if device else {}  # more than the device holds
    plain = replace(question(160 * MIB, 256, device), has_drives=True, **few)
    asked = multi_head(plain, flops)
    plan, without = make_generation_plan(asked), make_generation_plan(plain)
    rates = Rates(asked.machine, asked.compute_dtype, asked.allowance.cores, None)
    assert plan.fits
    assert plan.caches.moves
    caches = replace(plan.caches, inputs=())
    ways = [replace(plan, caches=way) for way in (caches, *with_inputs(caches, plan.costs))]
    best = min(seconds_of_all_tokens(way, rates) for way in ways)
    found = seconds_of_all_tokens(plan, rates)
    assert found == pytest.approx(best, rel=1e-9)
    assert found <= seconds_of_all_tokens(without, rates) * (1 + 1e-9)
    assert bool(plan.caches.inputs) == (flops < 1e12)


@pytest.mark.deep
def test_a_pass_reads_the_bytes_that_are_planned(directory_of: Callable[..., Path], tmp_path: Path) -> None:
    """Within two per cent, though what waits for a full page is not read."""
    seen: list[GenerationPass] = []

    def sink(event: Any) -> None:
        seen.extend([event] if isinstance(event, GenerationPass) else [])

    budget = Budget(host="4GiB", ssd=tmp_path)
    with Generator.open(directory_of("gpt-neox"), budget, sink=sink, compute_dtype="float32", rows=32, seats=1) as generator:
        plan = generator.plan_only(32, 96, 9)
        caches = CachePlan(homes=(SSD,) * plan.num_blocks, slots=2, page_bytes=PAGE_BYTES)
        *_, caches = with_inputs(caches, plan.costs)
        machine = nominal_machine(2, host_bytes=1 << 34, device_bytes=None)
        plan = with_forecast(replace(plan, caches=caches), machine)
        generator.use(plan)
        rows = tuple(tuple(3 + (row + place) % 90 for place in range(96)) for row in range(32))
        whole = generator.model.settings(96, None, {**COMMON, **WAYS["greedy"], "max_new_tokens": 9})
        list(generator.run([SeatRows(0, rows, 0, whole)]))
    assert plan.forecast is not None
    # Halfway through the answers: four tokens came after the prompt. The weights of the tiny model stay in memory.
    assert seen[5].bytes_read == pytest.approx(plan.forecast.read_bytes, rel=0.02)
