"""Weights cross the link in pages, and no copy that a micro-batch waits for waits behind more than one of them.

In the simulator by brute force over everything that happened, and in the engine's own diary of its lanes.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_banks import with_banks
from test_caches import COMMON, NEW, WAYS, micro_batches

from headrace.generate.passes.generator import Generator
from headrace.generate.plan.cache_plan import HOST, CachePlan
from headrace.generate.plan.plan import GenerationPlan
from headrace.generate.plan.schedule import build_pass
from headrace.plan.clock.nominal import nominal_machine
from headrace.plan.clock.simulate import Timed, Timeline, simulate
from headrace.plan.schedules.ledger import Snapshot
from headrace.plan.value.expert_plan import ExpertFigures, ExpertPlan
from headrace.terms.costs import GenerationCosts, PassCosts
from headrace.terms.events import OpDone
from headrace.terms.forms import DEVICE, SSD, UnitFigures
from headrace.terms.lanes import Lane
from headrace.terms.options.budget import Budget
from headrace.terms.program import Program, Verb
from headrace.terms.sizes import MIB, PAGE_BYTES

ELEMENTS = 16 << 20


def plan_of(blocks: int, seats: int, slots: int, caches: CachePlan, experts: int = 0) -> GenerationPlan:
    """A plan of a device whose caches of `caches` lie in host memory, and all of whose weights do."""
    end = UnitFigures(name="end", num_elements=1 << 20, num_parameters=1 << 20, home=DEVICE, trained_elements=0)
    block = replace(end, name="block", home=SSD, num_elements=ELEMENTS // 8 if experts else ELEMENTS)
    units = (end, *[block] * blocks, end)
    passed = PassCosts(flops=(4e9,) * blocks, workspace_bytes=MIB, call_bytes=4096, hidden_bytes=1 << 16)
    costs = GenerationCosts(
        rows=2,
        prompt_length=64,
        first=passed,
        next=passed,
        cache_bytes=(2 * MIB,) * blocks,
        cache_token_bytes=(1 << 14,) * blocks,
        head_flops=1e7,
        head_bytes=1 << 16,
        tiered=(True,) * blocks,
        choices=2 if experts else 0,
    )
    figures = ExpertFigures(
        units=units,
        num_experts=(0, *[experts] * blocks, 0),
        elements=ELEMENTS // 8,
        stored_bytes=ELEMENTS // 4,
        is_made=False,
        making_bytes=0,
        num_parameters=ELEMENTS // 8,
    )
    return GenerationPlan(
        compute_dtype="bfloat16",
        separate_device=True,
        units=units,
        num_blocks=blocks,
        rows=2,
        seats=seats,
        prompts=2 * seats,
        prompt_length=64,
        new_tokens=16,
        host_slots=blocks,
        device_slots=slots,
        prefetch=1,
        compute_threads=1,
        costs=costs,
        caches=caches,
        experts=ExpertPlan(figures=figures, choices=2, in_round=1, ahead_share=0.0) if experts else None,
    )


def passes(plan: GenerationPlan, seats: int) -> list[Program]:
    programs, before = [], Snapshot()
    for _ in range(4):
        program, before = build_pass(plan, seats, before)
        programs.append(program)
    return programs


def pages_before(timeline: Timeline) -> Iterator[int]:
    """Yield, for each small copy, how many pages went since it could have gone and its micro-batch wanted it."""
    ends = {(timed.program, timed.op.index): timed.stop_seconds for timed in timeline.ops}

    def ready(timed: Timed, but: int = -1) -> float:
        waits = [(timed.program, each) for each in timed.op.after if each != but]
        waits += [(timed.program - 1, each) for each in timed.op.after_previous]
        return max((ends[each] for each in waits), default=0.0)

    link = [timed for timed in timeline.ops if timed.op.lane is Lane.HOST_TO_DEVICE]
    computed = [timed for timed in timeline.ops if timed.op.lane is Lane.COMPUTE]
    for earlier, use in pairwise(computed):
        for small in link:
            if small.program == use.program and small.op.verb is Verb.CACHE_IN and small.op.index in use.op.after:
                since = max(ready(small), ready(use, small.op.index), earlier.stop_seconds)
                yield sum(
                    page.op.verb is Verb.UPLOAD and page.stop_seconds > since and page.start_seconds < small.start_seconds
                    for page in link
                )


def link_of(program: Program) -> list[tuple[Verb, int]]:
    return [(op.verb, op.unit) for op in program.lane(Lane.HOST_TO_DEVICE)]


def most_pages_between(link: list[tuple[Verb, int]]) -> int:
    """The most pages between two consecutive small copies of one block."""
    places = [place for place, (verb, _) in enumerate(link) if verb is Verb.CACHE_IN]
    return max((later - sooner - 1 for sooner, later in pairwise(places) if link[sooner][1] == link[later][1]), default=0)


@settings(max_examples=25)
@given(
    blocks=st.integers(2, 5),
    seats=st.integers(1, 6),
    fewer=st.integers(0, 3),
    slots=st.integers(2, 5),
    moved=st.integers(1, 31),
    lookahead=st.sampled_from([2, 4]),
    ahead=st.integers(1, 3),
    experts=st.sampled_from([0, 0, 5]),
    link=st.floats(0.05, 20),
)
def test_nothing_small_waits_behind_more_than_one_page(
    blocks: int, seats: int, fewer: int, slots: int, moved: int, lookahead: int, ahead: int, experts: int, link: float
) -> None:
    """Whichever blocks' caches are elsewhere; with weights that come further ahead, if all are."""
    homes = tuple(HOST if moved >> block & 1 else "compute" for block in range(blocks))
    if HOST not in homes:
        homes = (HOST,) * blocks
    plan = plan_of(blocks, seats, min(slots, blocks), CachePlan(homes=homes, slots=lookahead), experts)
    if all(home == HOST for home in homes):
        plan = replace(plan, prefetch=min(ahead, plan.device_slots - 1))
    nominal = nominal_machine(2, host_bytes=1 << 34, device_bytes=1 << 33)
    machine = replace(nominal, host_to_device_bytes_per_second=link * nominal.host_to_device_bytes_per_second)
    timeline = simulate(passes(plan, max(1, seats - fewer)), machine)
    most = plan.experts.slot_bytes if plan.experts is not None else plan.page_bytes(1)
    assert all(each.op.bytes <= max(most, plan.page_bytes(1)) for each in timeline.ops if each.op.verb is Verb.UPLOAD)
    assert max(pages_before(timeline)) <= 1


def test_pages_are_as_many_as_seats_and_cover_each_block_once() -> None:
    plan = plan_of(4, 3, 2, CachePlan(homes=(HOST,) * 4, slots=2))
    uploads = [op for op in passes(plan, 3)[-1].ops if op.verb is Verb.UPLOAD]
    assert Counter(op.unit for op in uploads) == dict.fromkeys(range(1, 5), 3)
    for unit in range(1, 5):
        pages = [op for op in uploads if op.unit == unit]
        assert [op.chunk for op in pages] == [0, 1, 2]
        assert sum(op.bytes for op in pages) == plan.sent_bytes(unit) == 2 * ELEMENTS


def test_blocks_that_stay_are_spread_evenly() -> None:
    """From pass to pass other blocks may stay, but no two of those that go are neighbours where every other one stays."""
    plan = plan_of(8, 1, 5, CachePlan())
    for program in passes(plan, 1)[1:]:
        come = sorted({op.unit for op in program.ops if op.verb is Verb.UPLOAD})
        assert len(come) == 4
        assert all(later - sooner == 2 for sooner, later in pairwise(come))


@pytest.mark.parametrize("name", ["llama", pytest.param("mixtral", marks=pytest.mark.deep)])
def test_the_engine_sends_pages_in_the_plans_order_with_the_bits_of_generate(
    name: str, directory_of: Callable[..., Path], stock: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The diary of the link is the program's queue, on a processor that plays a device."""
    monkeypatch.setattr("headrace.plan.value.placement.LEAST_PAGE_BYTES", PAGE_BYTES)
    asked, directory, diary = {**COMMON, **WAYS["sampled"]}, directory_of(name), list[OpDone]()

    def note(event: Any) -> None:
        if isinstance(event, OpDone) and event.lane is Lane.HOST_TO_DEVICE:
            diary.append(event)

    with Generator.open(directory, Budget(host="4GiB", device="64MiB"), rows=2, seats=3, sink=note) as generator:
        whole = generator.model.settings(48, None, asked)
        plan = replace(generator.prepare(5, 48, NEW), device_slots=2, prefetch=1)
        if name == "mixtral":
            plan = with_banks(generator, plan, ahead_share=0.0)
        generator.use(replace(plan, caches=CachePlan(homes=(HOST,) * plan.num_blocks, slots=2)))
        for each in generator.run(micro_batches(whole, 48)):
            expected = stock(directory, "float32", each.batch.rows, each.batch.seed, asked)
            assert torch.equal(each.raw.sequences, expected.sequences)
        programs = [program for program, _ in generator._programs.values()]
        assert plan.experts is not None or any(op.chunk > 0 for program in programs for op in program.ops)
    for number in {event.step for event in diary}:
        link = [(event.verb, event.unit) for event in diary if event.step == number]
        assert link in [link_of(program) for program in programs]
        assert name != "llama" or most_pages_between(link) <= 1
