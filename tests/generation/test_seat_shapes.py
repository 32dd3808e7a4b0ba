"""Prompts of many lengths: short ones have more rows, within the memory that was planned, and with the bits of `generate`."""

import json
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_generation_search import costs_of, question
from test_jobs import Killed, answer, options_for, write
from tiers import sampled
from tiny_architectures import CONFIGS, make_config

from headrace.generate.passes.generator import Generator
from headrace.generate.plan.cache_plan import SSD, CachePlan, whole_bytes
from headrace.generate.plan.compose import composed
from headrace.generate.plan.plan import FewRows, GenerationPlan
from headrace.generate.plan.search import GenerationQuestion, make_generation_plan
from headrace.generate.plan.seat_shapes import PromptLengths, SeatShapes, most_of, shapes_to_try
from headrace.generate.uses import jobs
from headrace.generate.uses.job_tasks import JobShape
from headrace.model import Chain
from headrace.model.seats.generation_check import ready_to_generate
from headrace.model.seats.generation_costs import generation_costs
from headrace.terms.costs import GenerationCosts
from headrace.terms.options.budget import Budget
from headrace.terms.options.optimizer import Optimizer
from headrace.terms.sizes import MIB, PAGE_BYTES

PROMPTS = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 2)), min_size=1, max_size=50)
MIXED = tuple(range(2, 64, 3))
NEW = 6


@given(PROMPTS, st.integers(1, 9), st.integers(1, 40))
def test_what_room_allows_was_planned(prompts: list[tuple[int, int]], rows: int, new: int) -> None:
    lengths, kinds = [length for length, _ in prompts], [kind for _, kind in prompts]
    found = shapes_to_try(PromptLengths(tuple(lengths), tuple(kinds)), rows, 64, new)
    assert found
    for shapes in found:
        assert sum(count for count, _ in shapes.each) == len(prompts)
        batches = composed(lengths, kinds, shapes.room)
        assert sorted(index for batch in batches for index in batch) == list(range(len(prompts)))
        assert len(batches) <= len(shapes.each)
        for batch in batches:
            longest = max(lengths[index] for index in batch)
            assert any(len(batch) <= count and longest <= length for count, length in shapes.each)
            assert len({kinds[index] for index in batch}) == 1
        for end, longest in shapes.ends(new):
            assert longest <= max(lengths)
            assert end >= 1


def test_uniform_lengths_need_hardly_more_tokens_than_equal_ones() -> None:
    lengths = [16 + 496 * number // 59 for number in range(60)]
    shapes = shapes_to_try(PromptLengths(tuple(lengths)), 8, 4096, 16)
    for each in shapes:
        filled = sum(rows * (length + 16) for rows, length in each.each)
        assert filled <= (1 + 1.2 / len(each.each)) * sum(length + 16 for length in lengths)
        assert max(rows * (length + 16) for rows, length in each.each) <= 1.15 * filled / len(each.each) + 528


def figures(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each number within costs by its name."""
    if is_dataclass(value):
        for each in fields(value):
            yield from figures(getattr(value, each.name), f"{name}.{each.name}")
    elif isinstance(value, tuple):
        for index, each in enumerate(value):
            yield from figures(each, f"{name}[{index}]")
    elif not isinstance(value, str | bool | None):
        yield name, value


CASES = [(name, 0) for name in ("llama", "gemma3", "deepseek-v3", "gpt-oss", "mamba2", "jamba", "bloom", "phi3")]
CASES += [(name, 8) for name in ("llama", "gemma3", "gpt-oss")]


@pytest.mark.wide
@pytest.mark.parametrize(("name", "chunk"), sampled(CASES, [("gemma3", 0), ("llama", 8)]))
def test_no_micro_batch_costs_more_than_is_planned_for(name: str, chunk: int) -> None:
    chain = Chain.from_config(make_config(CONFIGS[name]), "float32", Optimizer())
    ready_to_generate(chain.model)
    for shapes in shapes_to_try(PromptLengths(MIXED), 3, 64, NEW)[::2]:
        ends = [generation_costs(chain, rows, length, chunk) for rows, length in shapes.ends(NEW)]
        most = most_of(ends, NEW)
        bounds = dict(figures(most))
        for rows, length in shapes.each:
            own = generation_costs(chain, rows, length, chunk)
            for block in range(1, chain.num_blocks + 1):
                assert whole_bytes(own, NEW, block) <= whole_bytes(most, NEW, block)
            held = {key: size for key, size in figures(own) if "bytes" in key and not key.startswith(".cache_bytes")}
            assert {key: (size, bounds[key]) for key, size in held.items() if size > bounds[key]} == {}


def by_length(rows: int, chunk: int = 0, *, length: int = 64) -> GenerationCosts:
    """Return costs that grow with rows and tokens, of which reading weights is the most."""
    found, share = costs_of(rows), length / 64
    first = replace(
        found.first,
        flops=tuple(share * flops / 100 for flops in found.first.flops),
        workspace_bytes=round(share * found.first.workspace_bytes),
        hidden_bytes=round(share * found.first.hidden_bytes),
    )
    cache = tuple(round(share * size) for size in found.cache_bytes)
    return replace(found, prompt_length=length, first=first, cache_bytes=cache)


def asked(prompts: tuple[int, ...], **changes: Any) -> GenerationQuestion:
    changes |= {"prompt_length": max(prompts), "costs_of": partial(by_length, length=max(prompts))}
    return replace(question(260 * MIB, len(prompts)), **changes)


def planned(prompts: tuple[int, ...], **changes: Any) -> GenerationPlan:
    return make_generation_plan(asked(prompts, lengths=PromptLengths(prompts), **changes))


def test_mixed_prompts_take_about_as_many_passes_as_equal_ones() -> None:
    mixed = tuple(2 + 62 * number // 59 for number in range(60))
    equal = (sum(mixed) // len(mixed),) * len(mixed)
    assert planned(equal).shapes is None
    found = [planned(mixed), make_generation_plan(asked(mixed)), planned(equal)]
    assert found[0].fits
    assert found[0].shapes is not None
    passes = [-(-plan.micro_batches // plan.seats) for plan in found]
    assert passes[0] <= 1.25 * passes[2] < passes[1]
    speeds = [plan.forecast.tokens_per_second for plan in found if plan.forecast is not None]
    assert speeds[0] >= 0.8 * speeds[2] > speeds[1]


def test_rows_that_are_asked_for_stay() -> None:
    assert planned(tuple(range(1, 61)), rows=4).shapes is None


@pytest.mark.wide
def test_prompts_of_one_length_are_planned_as_ever() -> None:
    lengths = (64,) * 24
    assert planned(lengths).to_json() == make_generation_plan(asked(lengths)).to_json()
    assert "shapes" not in planned(lengths).to_json()


SHAPES = SeatShapes(((2, 12), (3, 9), (6, 5)))
LENGTHS = (3, 12, 5, 9, 2, 8, 1, 11, 4, 7, 5)


@pytest.mark.parametrize("place", ["compute", SSD])
@pytest.mark.parametrize("name", sampled(["llama", "qwen3-moe", "gemma3"], ["llama"]))
def test_short_prompts_have_more_rows_and_the_bits_of_generate(
    name: str, place: str, directory_of: Callable[..., Path], stock: Callable[..., Any], tmp_path: Path
) -> None:
    directory, settings = directory_of(name), {"max_new_tokens": NEW, "do_sample": True, "pad_token_id": 0, "eos_token_id": 2}
    rows = [tuple((7 * number + 3 * place) % 90 + 3 for place in range(length)) for number, length in enumerate(LENGTHS)]
    with Generator.open(directory, Budget(host="4GiB", ssd=tmp_path), compute_dtype="float32", seats=2) as generator:
        plan = generator.plan_only(len(rows), 12, NEW, shapes=SHAPES)
        homes = tuple(place if may else "compute" for may in plan.costs.tiered)
        if place == SSD:
            plan = replace(plan, caches=CachePlan(homes=homes, slots=2, page_bytes=PAGE_BYTES))
        generator.use(plan)
        found = dict(generator.generate(rows, seed=4, **settings))
        assert generator.plan is plan
    batches = composed(LENGTHS, [0] * len(rows), SHAPES.room)
    assert sorted(map(len, batches)) == [2, 3, 6]
    for number, batch in enumerate(batches):
        expected = stock(directory, "float32", [rows[index] for index in batch], 4 + number, settings)
        longest = max(len(rows[index]) for index in batch)
        for index, tokens in zip(batch, expected[:, longest:].tolist(), strict=True):
            assert list(found[index]) == tokens[: len(found[index])]
            assert set(tokens[len(found[index]) :]) <= {0}


@pytest.mark.wide
def test_a_killed_job_of_mixed_prompts_ends_with_the_same_bytes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [{"prompt": "w" * length, "max_new_tokens": 3} for length in (40, 2, 31, 5, 3, 22, 1, 13, 8, 2)]
    for name in ("whole", "killed"):
        write(tmp_path / name, lines)
    more: dict[str, Any] = {"rows": None, "seats": None}
    monkeypatch.setattr(jobs, "_micro_batch_seconds", lambda plan: 0.0 if plan.prompts <= 3 else 1e9)
    answer(model, options_for(tmp_path / "whole", **more))
    with pytest.raises(Killed):
        answer(model, options_for(tmp_path / "killed", **more), most=1)
    begun = json.loads((tmp_path / "killed/out.jsonl.job/record.json").read_text(encoding="utf-8"))
    assert begun["by_length"]
    assert len(set(map(len, begun["micro_batches"]))) > 1, "rows by length"
    answer(model, options_for(tmp_path / "killed", **more))
    whole, killed = ((tmp_path / name / "out.jsonl").read_bytes() for name in ("whole", "killed"))
    assert whole == killed


@pytest.mark.wide
def test_what_a_job_fixes_reaches_other_ranks() -> None:
    shape = JobShape(12, NEW, 0, {"few_rows": FewRows(packed=False, narrow=True), "attention": "device", "shapes": SHAPES})
    assert JobShape.from_json(json.loads(json.dumps(shape.to_json()))) == shape
