"""Attention of new tokens on the host: the compiled loop against float64, generations against `generate`, and its plans."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from answered_jobs import answered
from hypothesis import given, settings
from hypothesis import strategies as st
from test_caches import COMMON, NEW, PLACES, WAYS, micro_batches
from test_generation_search import costs_of, fits, question, seconds
from tiers import pairwise, sampled

from headrace.generate.passes.generator import Generator
from headrace.generate.passes.micro_batches import Generated
from headrace.generate.passes.seat_caches import SeatCache
from headrace.generate.plan.cache_plan import HOST, CachePlan
from headrace.generate.plan.peaks import with_peaks
from headrace.generate.plan.plan import GenerationPlan
from headrace.generate.plan.schedule import build_pass
from headrace.generate.plan.search import GenerationQuestion, make_generation_plan
from headrace.model.seats.host_attention import attended
from headrace.plan.clock.rates import Rates
from headrace.plan.schedules.ledger import Snapshot
from headrace.terms.errors import ConfigError
from headrace.terms.lanes import Lane
from headrace.terms.options.budget import Budget
from headrace.terms.program import Verb
from headrace.terms.sizes import MIB, PAGE_BYTES

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2e-6, torch.float16: 2e-6}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_loop_is_attention_in_float64(data: st.DataObject) -> None:
    """Groups of heads, lengths around the loop's pieces, masks of padding and of windows, additive masks, sinks, widths."""
    draw = data.draw
    dtype = draw(st.sampled_from(list(TOLERANCES)))
    rows, heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4, 7]))
    width, deep = draw(st.sampled_from([8, 16, 24, 64])), draw(st.sampled_from([8, 20, 64]))
    tokens = draw(st.sampled_from([1, 2, 63, 64, 65, 130, 200]))
    drawn = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    numbers = (torch.randn(tokens, rows * heads * (width + deep), generator=drawn) * draw(st.sampled_from([0.1, 1, 5]))).to(
        dtype
    )
    keys = numbers[:, : rows * heads * width].view(tokens, rows, heads, width).permute(1, 2, 0, 3)
    values = numbers[:, rows * heads * width :].view(tokens, rows, heads, deep).permute(1, 2, 0, 3)
    query = torch.randn(rows, heads * group, 1, width, generator=drawn) * width**-0.5
    seen = torch.ones(rows, tokens, dtype=torch.bool)
    for row in range(rows):  # padding on the left, and a window on the right
        seen[row, : draw(st.integers(0, tokens - 1))] = False
        seen[row, : tokens - draw(st.integers(1, tokens))] = False
    added = torch.where(seen, torch.randn(rows, tokens, generator=drawn), -math.inf)
    mask = draw(st.sampled_from([None, seen, added]))
    sinks = draw(st.sampled_from([None, torch.randn(heads * group, generator=drawn)]))
    found = attended(
        query,
        numbers.view(torch.uint8).view(-1),
        keys,
        values,
        None if mask is None else mask[:, None, None],
        sinks,
    )
    asked = query.double().view(rows, heads, group, width)
    scores = asked @ keys.double().transpose(-1, -2)
    if mask is not None:
        scores += torch.where(seen, 0.0, -math.inf)[:, None, None] if mask is seen else added.double()[:, None, None]
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().view(1, heads, group, 1).expand(rows, -1, -1, -1)], dim=-1)
    expected = scores.softmax(-1)[..., :tokens] @ values.double()
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= TOLERANCES[dtype] * max(1.0, float(values.abs().max()))


def test_a_row_that_sees_nothing_gets_zeros() -> None:
    numbers = torch.randn(3, 2 * 8)
    keys, values = (numbers[:, part].view(3, 1, 1, 8).permute(1, 2, 0, 3) for part in (slice(0, 8), slice(8, 16)))
    mask = torch.zeros(1, 1, 1, 3, dtype=torch.bool)
    assert not attended(torch.ones(1, 1, 1, 8), numbers.view(torch.uint8).view(-1), keys, values, mask).any()


def generated(
    directory: Path,
    ssd: Path,
    dtype: str,
    place: str,
    asked: dict[str, Any],
    interpreter: str = "overlapped",
    seen: list[Lane] | None = None,
) -> list[Generated]:
    homes, device = PLACES[place]
    homes = tuple(HOST if home == "compute" else home for home in homes)
    budget = Budget(host="4GiB", device="64MiB" if device else None, ssd=ssd)

    def sink(event: Any) -> None:
        if seen is not None and hasattr(event, "lane"):
            seen.append(event.lane)

    how: dict[str, Any] = {"compute_dtype": dtype, "rows": 2, "seats": 2, "interpreter": interpreter, "sink": sink}
    with Generator.open(directory, budget, attention="host", **how) as generator:
        whole = generator.model.settings(48, None, asked)
        plan = generator.prepare(5, 48, NEW)
        assert plan.caches.attends
        tiered = [homes[block % len(homes)] if may else "compute" for block, may in enumerate(plan.costs.tiered)]
        generator.use(replace(plan, caches=CachePlan(homes=tuple(tiered), slots=2, page_bytes=PAGE_BYTES, attends=True)))
        return sorted(generator.run(micro_batches(whole, 48)), key=lambda done: done.batch.number)


SUPPORTED = ("llama", "qwen3", "gemma3", "mixtral", "qwen3-moe", "gpt2")
CASES = [(name, place, way) for name in SUPPORTED for place in PLACES for way in WAYS]
FEW = [("llama", "host", "greedy"), ("qwen3", "drives", "sampled"), ("gemma3", "all", "greedy")]


@pytest.mark.parametrize(("name", "place", "way"), sampled(CASES, FEW))
def test_in_float32_the_bits_are_those_of_generate(
    name: str, place: str, way: str, directory_of: Callable[..., Path], stock: Callable[..., Any], tmp_path: Path
) -> None:
    # An end is named, as a model's own configuration may have one that is no token of the text.
    asked, directory, lanes = {**COMMON, **WAYS[way], "eos_token_id": 2}, directory_of(name), list[Lane]()
    for each in generated(directory, tmp_path, "float32", place, asked, seen=lanes):
        expected = stock(directory, "float32", each.batch.rows, each.batch.seed, asked)
        assert torch.equal(each.raw.sequences, expected.sequences)
        for one, other in zip(each.raw.logits, expected.logits, strict=True):
            assert torch.equal(one, other)
    assert (Lane.ATTENTION in lanes) == PLACES[place][1], "beside a device it is a lane of its own"


@pytest.mark.parametrize(("name", "dtype"), sampled([(name, "bfloat16") for name in SUPPORTED], [("llama", "bfloat16")]))
def test_in_16_bits_every_placement_and_interpreter_gives_the_same_bits(
    name: str, dtype: str, directory_of: Callable[..., Path], stock: Callable[..., Any], tmp_path: Path
) -> None:
    asked, directory = {**COMMON, **WAYS["greedy"]}, directory_of(name, dtype)
    ways = [(place, "overlapped") for place in PLACES] + [("host", "plain")]
    first, *others = [generated(directory, tmp_path, dtype, place, asked, way) for place, way in ways]
    for other in others:
        for one, same in zip(first, other, strict=True):
            assert torch.equal(one.raw.sequences, same.raw.sequences)
            assert all(torch.equal(a, b) for a, b in zip(one.raw.logits, same.raw.logits, strict=True))
    for each in first:  # the first token comes of the prompt; those after it are rounded otherwise
        expected = stock(directory, dtype, each.batch.rows, each.batch.seed, asked)
        assert (each.raw.logits[1] - expected.logits[1]).abs().max() < 0.05


def asked_of(
    host: int, device: int, prompts: int, token_bytes: int = 1 << 14, attended_rate: float = 20e9
) -> GenerationQuestion:
    """A question beside a GPU, whose host attends at such a rate; caches grow by `token_bytes` for each token of a row."""

    def costs(rows: int) -> Any:
        found = costs_of(rows)
        blocks = len(found.cache_bytes)
        asked = replace(found.next, query_bytes=(rows << 12,) * blocks, result_bytes=(rows << 12,) * blocks)
        kept = {"cache_bytes": (64 * rows * token_bytes,) * blocks, "cache_token_bytes": (rows * token_bytes,) * blocks}
        return replace(found, next=asked, **kept)

    asked = question(host, prompts, device)
    machine = replace(asked.machine, attended_bytes_per_second=attended_rate)
    return replace(asked, costs_of=costs, attention=(False, True), machine=machine)


def everywhere(asked: GenerationQuestion, plan: GenerationPlan) -> list[GenerationPlan]:
    """All plans of a small question that fit: every number of rows, seats and slots, every home of caches, both places."""
    found = []
    blocks = plan.num_blocks
    for rows, seats in ((rows, seats) for rows in (1, 2, 4, 8) for seats in (1, 2, 4, 8) if rows * (seats - 1) < asked.prompts):
        for away, attends, slots in ((0, False, 0), *((blocks, way, n) for way in (False, True) for n in (2, 4))):
            caches = CachePlan(homes=(HOST,) * away, slots=slots, attends=attends)
            for device_slots in range(2, blocks + 1):
                place = {"rows": rows, "seats": seats, "host_slots": blocks, "device_slots": device_slots, "caches": caches}
                whole = replace(plan, costs=asked.costs_of(rows), prefetch=min(2, device_slots - 1), **place)
                found.append(with_peaks(whole, asked.allowance))
    return [each for each in found if fits(each)]


@pairwise(rate=[0.5e9, 8e9, 200e9], device=[90 * MIB, 140 * MIB])
def test_attention_is_where_it_is_fastest(rate: float, device: int) -> None:
    asked = asked_of(1 << 30, device, 8, token_bytes=1 << 15, attended_rate=rate)
    plan = make_generation_plan(asked)
    assert fits(plan)
    assert seconds(plan, asked) <= 1.01 * min(seconds(each, asked) for each in everywhere(asked, plan))
    elsewhere = make_generation_plan(replace(asked, attention=(False,)))
    assert seconds(plan, asked) <= seconds(elsewhere, asked), "where it does not pay it is left out"


@pytest.mark.wide
@settings(max_examples=10, deadline=None)
@given(st.integers(80, 300), st.integers(0, 150), st.sampled_from([2, 8, 24]), st.sampled_from([2e9, 30e9]))
def test_with_attention_on_the_host_more_memory_is_never_slower(device: int, more: int, prompts: int, rate: float) -> None:
    asked, larger = (asked_of(1 << 30, mib * MIB, prompts, attended_rate=rate) for mib in (device, device + more))
    assert seconds(make_generation_plan(larger), larger) <= 1.01 * seconds(make_generation_plan(asked), asked)


@pytest.mark.parametrize("times", [0.25, 0.8, 1.25, 4.0])
def test_where_caches_alone_cross_the_link_the_roofline_decides(times: float) -> None:
    """One operation for each byte: below the first turning point of the hierarchical roofline the host attends."""
    asked = asked_of(1 << 32, 1 << 30, 8, token_bytes=1 << 20)
    machine = asked.machine
    link = machine.host_to_device_bytes_per_second
    asked = replace(asked, machine=replace(machine, attended_bytes_per_second=times * link, host_memory_bytes_per_second=1e12))
    plan = make_generation_plan(replace(asked, rows=2, seats=4))
    rates = Rates(asked.machine, "bfloat16", 2, None)
    moving = replace(plan, caches=CachePlan(homes=(HOST,) * plan.num_blocks, slots=2))
    staying = replace(moving, caches=replace(moving.caches, attends=True))
    there = rates.bytes_per_second[Lane.ATTENTION]
    assert (link < there) == (seconds(staying, asked) < seconds(moving, asked)) == (times > 1)


def test_the_forecast_counts_what_crosses_and_where() -> None:
    asked = asked_of(1 << 30, 1 << 30, 8)
    plan = make_generation_plan(replace(asked, rows=2, seats=4))
    plan = replace(plan, caches=CachePlan(homes=(HOST,) * plan.num_blocks, slots=2, attends=True))
    program, _ = build_pass(plan, 4, Snapshot())
    by_verb = {verb: [op for op in program.ops if op.verb is verb] for verb in Verb}
    blocks = range(1, plan.num_blocks + 1)
    assert not by_verb[Verb.CACHE_IN]
    assert len(by_verb[Verb.ATTEND]) == len(by_verb[Verb.QUERY]) == 4 * plan.num_blocks
    assert {op.lane for op in by_verb[Verb.ATTEND]} == {Lane.ATTENTION}
    held = sum(plan.costs.cache_bytes[block - 1] + 8 * plan.costs.cache_token_bytes[block - 1] for block in blocks)
    assert sum(op.bytes for op in by_verb[Verb.ATTEND]) == 4 * held
    assert sum(op.bytes for op in by_verb[Verb.RESULT_IN]) == 4 * plan.num_blocks * (2 << 12)
    mixed, _ = build_pass(plan, 4, Snapshot(), attends=(True, False, True, False))
    assert [op.micro for op in mixed.ops if op.verb is Verb.CACHE_IN and op.unit == 1] == [1, 3], "prompts come in as ever"
    for op in program.ops:
        assert all(index < op.index for index in op.after)


JOB: dict[str, Any] = {"compute_dtype": "bfloat16", "device_memory": "64MiB", "max_new_tokens": 12}


@pytest.mark.wide
def test_a_job_goes_on_where_its_attention_was(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, attend, calls = answered(model, tmp_path / "whole", attention="host", **JOB), SeatCache.attend, list[int]()
    with pytest.raises(KeyboardInterrupt):
        answered(model, tmp_path / "broken", most=1, attention="host", **JOB)

    def counted(cache: SeatCache, op: Any) -> None:
        calls.append(op.unit)
        attend(cache, op)

    monkeypatch.setattr(SeatCache, "attend", counted)
    assert answered(model, tmp_path / "broken", **JOB) == whole
    assert calls
    calls.clear()
    answered(model, tmp_path / "new", **JOB)
    assert not calls, "where the CPU is the device, nothing attends on the host unasked"


@pytest.mark.parametrize(
    ("name", "more", "why"),
    sampled(
        [
            ("llama", {}, "there is no device"),
            ("gemma2", {"device": "64MiB"}, "softcap"),
            ("llama", {"device": "64MiB", "copies": 3}, "beams"),
        ]
    ),
)
def test_what_the_host_cannot_do_is_refused_in_a_line(
    name: str, more: dict[str, Any], why: str, directory_of: Callable[..., Path]
) -> None:
    budget = Budget(host="4GiB", device=more.get("device"))
    with Generator.open(directory_of(name), budget, attention="host") as generator:
        with pytest.raises(ConfigError, match=f"attention: host was asked for.*{why}") as refused:
            generator.prepare(2, 12, 4, more.get("copies", 0))
        assert "\n" not in str(refused.value)
        assert generator.plan is None
