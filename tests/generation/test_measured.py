"""What passes count: prompts that end, experts that were in memory; and the line that a generation ends with."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from banked_plans import with_banks
from some_prompts import prompts
from tiers import sampled

from headrace.flow.weights.expert_source import ExpertSource
from headrace.generate.passes.generator import Generator
from headrace.generate.passes.measured import Measured
from headrace.generate.passes.micro_batches import SeatRows
from headrace.generate.plan.cache_plan import SSD, CachePlan
from headrace.serve.figures import ServerFigures
from headrace.terms.events import Event, GenerationPass
from headrace.terms.options.budget import Budget
from headrace.terms.sizes import PAGE_BYTES

GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 6}


def test_bytes_of_caches_are_not_counted_as_weights(directory_of: Callable[..., Path], tmp_path: Path) -> None:
    """By passes, and by the figures that a server shows."""
    events, figures = list[Event](), ServerFigures()
    places: dict[str, Any] = {"rows": 1, "seats": 2, "compute_dtype": "float32", "sink": events.append}
    with Generator.open(directory_of("llama"), Budget(host="4GiB", ssd=tmp_path), **places) as own:
        plan = own.prepare(2, 106, 6)  # of 100 tokens some pages are full
        homes = tuple(SSD if may else "compute" for may in plan.costs.tiered)
        own.use(replace(plan, caches=CachePlan(homes=homes, slots=2, page_bytes=PAGE_BYTES)))
        before = own.model.source.bytes_read
        settings = own.model.settings(106, None, GREEDY)
        rows = (tuple(range(start, start + 100)) for start in (3, 5))
        list(own.run([SeatRows(place, (row,), 0, settings) for place, row in enumerate(rows)]))
        weights, file = own.model.source.bytes_read - before, own._cache_file
        assert file is not None
        caches = file.bytes_read
    for event in events:
        figures.take(event)
    lines = dict(line.rsplit(" ", 1) for line in figures.text().decode().splitlines() if not line.startswith("#"))
    assert float(lines["headrace_weight_bytes_read_total"]) == weights
    assert float(lines["headrace_cache_bytes_read_total"]) == caches > 0
    assert sum(each.bytes_read for each in events if isinstance(each, GenerationPass)) == weights + caches


def pass_of(number: int, seconds: float, **counts: float) -> GenerationPass:
    values = {"seats": 1, "rows": 2, "finished": 0, "bytes_read": 1000, **counts}
    return GenerationPass(number=number, seconds=seconds, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize("cached", sampled([0, 5]))
def test_experts_that_are_wanted_and_not_found_are_read(
    cached: int, directory_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    events, read = list[Event](), list[tuple[int, int]]()
    own = ExpertSource.read_expert

    def noted(source: ExpertSource, unit: int, expert: int, into: Any) -> Any:
        read.append((unit, expert))
        return own(source, unit, expert, into)

    monkeypatch.setattr(ExpertSource, "read_expert", noted)
    with Generator.open(directory_of("mixtral"), Budget(host="4GiB"), sink=events.append) as generator:
        plan = with_banks(generator, generator.plan_only(2, 12, 6), ahead_share=1.0, cached=cached)
        generator.use(replace(plan, rows=1, seats=2, host_slots=plan.num_blocks, device_slots=plan.num_blocks))
        settings = generator.model.settings(12, None, GREEDY)
        list(generator.run([SeatRows(place, (tuple(row),), 0, settings) for place, row in enumerate(prompts(2))]))
    passes = [event for event in events if isinstance(event, GenerationPass)]
    wanted, found = sum(each.wanted for each in passes), sum(each.found for each in passes)
    assert len(read) == wanted - found
    assert (found > 0) == (cached > 0)
    assert all(each.router_seconds > 0 for each in passes)
    assert [(each.entering, each.begun) for each in passes] == [(2, 2), *[(0, 0)] * 5]


def test_a_prompt_in_chunks_ends_with_its_last_chunk(directory_of: Callable[..., Path]) -> None:
    events: list[Event] = []
    with Generator.open(directory_of("llama"), Budget(host="4GiB"), sink=events.append) as generator:
        list(generator.generate([tuple(range(3, 13))], prefill_chunk_size=4, **GREEDY))
    passes = [event for event in events if isinstance(event, GenerationPass)]
    assert [(each.entering, each.begun) for each in passes[:4]] == [(1, 0), (1, 0), (1, 1), (0, 0)]


def test_the_line_has_what_was_measured_beside_what_was_planned(directory_of: Callable[..., Path]) -> None:
    heard: list[Event] = []
    measured = Measured(heard.append)
    with Generator.open(directory_of("mixtral"), Budget(host="4GiB")) as generator:
        plan = with_banks(generator, generator.plan_only(2, 12, 6), cached=3)
    assert measured.words(plan, 0) == ""
    events = [
        pass_of(1, 1.0, entering=1, wanted=6),
        pass_of(2, 2.0, entering=1, begun=1, wanted=4, found=1),
        pass_of(3, 0.5, wanted=5, found=4, router_seconds=0.5),
        pass_of(4, 1.5, wanted=5, found=5, router_seconds=0.0, bytes_read=3000),
    ]
    for event in events:
        measured(event)
    assert heard == events
    words = measured.words(plan, 6)
    assert plan.experts is not None
    parts = (
        "1.2 tokens/s (",
        "1.0 s a token",
        "3.0 s before the first (",
        "1.95 KiB read",
        "50% of the wanted",
        "; 10% of the",
    )
    assert [part for part in parts if part not in words] == [], words
    assert f"({plan.experts.cached_share:.0%} if all" in words
