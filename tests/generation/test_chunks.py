"""Long prompts in chunks: the bits of transformers' own loop over chunks, less memory, and a plan that says when."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from job_with_caches import job
from some_prompts import prompts
from test_caches import COMMON, PLACES, WAYS
from tiers import sampled
from tiny_architectures import CONFIGS, make_config

from headrace.generate.passes.generator import Generator
from headrace.generate.passes.micro_batches import SeatRows
from headrace.generate.passes.planner import GenerationPlanner
from headrace.generate.plan.cache_plan import CachePlan
from headrace.generate.plan.plan import GenerationPlan
from headrace.model.seats.generation_check import why_not_chunked
from headrace.terms.errors import PlanInfeasible
from headrace.terms.options.budget import Budget
from headrace.terms.sizes import PAGE_BYTES

CASES = [(name, place) for name in ("llama", "gemma3", "deepseek-v3", "gpt-oss", "bamba") for place in ("memory", *PLACES)]


def rows_of_prompts(factor: int = 3) -> list[list[int]]:
    return [row * factor for row in prompts(4)]


@pytest.mark.parametrize(("name", "place"), sampled(CASES, [("gemma3", "drives")]))
def test_chunks_give_the_bits_of_transformers_own(
    name: str, place: str, directory_of: Callable[..., Path], stock: Callable[..., Any], tmp_path: Path
) -> None:
    """Sampled, with rows of different lengths, and chunks that do not divide them."""
    homes, device = PLACES.get(place, (("compute",), False))
    asked = {**COMMON, **WAYS["sampled"], "eos_token_id": 1}
    budget = Budget(host="4GiB", device="64MiB" if device else None, ssd=tmp_path)
    rows = rows_of_prompts()
    with Generator.open(directory_of(name), budget, rows=2, seats=2) as generator:
        whole = generator.model.settings(40, None, asked)
        plan = generator.prepare(4, 40, 12)
        tiered = tuple(homes[block % len(homes)] if may else "compute" for block, may in enumerate(plan.costs.tiered))
        caches = CachePlan(homes=tiered, slots=2, page_bytes=PAGE_BYTES)
        generator.use(replace(plan, costs=replace(plan.costs, prefill_chunk=7), caches=caches))
        batches = [SeatRows(k, tuple(map(tuple, rows[2 * k : 2 * k + 2])), 40 + k, whole) for k in range(2)]
        done = list(generator.run(batches))
    assert whole["generation_config"].prefill_chunk_size is None
    for each in done:
        settings = {**asked, "prefill_chunk_size": 7}
        expected = stock(directory_of(name), "float32", each.batch.rows, each.batch.seed, settings)
        assert torch.equal(each.raw.sequences, expected.sequences)
        for one, other in zip(each.raw.logits, expected.logits, strict=True):
            assert torch.equal(one, other)


def test_architectures_whose_code_takes_no_chunks_are_found() -> None:
    assert why_not_chunked(make_config(CONFIGS["llama"])) == ""
    assert "cache" in why_not_chunked(make_config(CONFIGS["mamba2"]))
    for name in ("longrope", "dynamic-rope"):  # tables follow from how much of the prompt is seen
        assert "logits then differ" in why_not_chunked(make_config(CONFIGS[name]))


def planned(directory: Path, host: int | str, *, chunks: tuple[int, ...] = (16, 64, 256), **fixed: int) -> GenerationPlan:
    with Generator.open(directory, Budget(host=host), rows=1, seats=1) as generator:
        generator.planner._chunks = chunks
        return generator.planner.plan(1, 2000, 4, **fixed)


@pytest.mark.wide
def test_a_prompt_that_is_too_long_as_a_whole_is_planned_in_chunks(directory_of: Callable[..., Path]) -> None:
    """Masks and activations are those of a chunk, caches those of the whole prompt. Where all of it fits, it is taken whole."""
    directory = directory_of("llama")
    whole, small = planned(directory, "8GiB"), planned(directory, "8GiB", prefill_chunk=64)
    assert (whole.costs.prefill_chunk, small.costs.prefill_chunk) == (0, 64)
    assert small.costs.first_passes == 32
    assert small.costs.cache_bytes == whole.costs.cache_bytes
    assert small.costs.first.workspace_bytes < whole.costs.first.workspace_bytes / 3
    assert small.costs.first.hidden_bytes * 2000 == whole.costs.first.hidden_bytes * 64
    assert small.forecast is not None
    assert whole.forecast is not None
    assert small.forecast.first_pass_seconds > whole.forecast.first_pass_seconds
    tight = (whole.peak("host") + small.peak("host")) // 2
    with pytest.raises(PlanInfeasible):
        planned(directory, tight, prefill_chunk=0)
    found = planned(directory, tight)
    assert found.costs.prefill_chunk in (16, 64, 256)
    assert found.peak("host") <= tight
    assert f"in chunks of {found.costs.prefill_chunk} tokens" in found.explain()


@pytest.mark.wide
def test_a_job_keeps_its_chunks(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that goes on has the chunks and rows that it began with, whatever would be planned now."""

    class Killed(Exception):
        pass

    lines = "".join(json.dumps({"prompt": "water " * 6}) + "\n" for _ in range(9))
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "in.jsonl").write_text(lines, encoding="utf-8")
    chunks: list[tuple[int, int]] = []
    plan = GenerationPlanner.plan

    def asking(planner: GenerationPlanner, *args: Any, prefill_chunk: int | None = None, **fixed: Any) -> GenerationPlan:
        found = plan(planner, *args, prefill_chunk=8 if prefill_chunk is None and not chunks else prefill_chunk, **fixed)
        chunks.append((found.costs.prefill_chunk, found.rows))
        return found

    monkeypatch.setattr(GenerationPlanner, "plan", asking)
    assert job(model, tmp_path / "whole", None) == 0
    assert chunks.pop() == (8, 3)
    with monkeypatch.context() as patch:
        patch.setattr("headrace.generate.uses.jobs.JobProgress", lambda *args: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            job(model, tmp_path / "killed", None)
    assert job(model, tmp_path / "killed", None) == 0
    assert chunks == [(8, 3), (8, 3)]
    whole, killed = ((tmp_path / name / "out.jsonl").read_bytes() for name in ("whole", "killed"))
    assert whole == killed
