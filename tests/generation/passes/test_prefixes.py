"""Prompts in chunks from their first token, and kept beginnings of prompts: the bits of transformers' own code in those chunks.

Run: pytest tests/generation/passes/test_prefixes.py
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from saved_models import DTYPES
from test_caches import COMMON, PLACES, WAYS
from tiers import sampled
from tiny_architectures import CONFIGS, make_config
from transformers import AutoModelForCausalLM, DynamicCache

from headrace.generate.passes.generator import Generator
from headrace.generate.passes.micro_batches import SeatRows
from headrace.model.caches.prefixes import Prefixes
from headrace.model.seats.prefix_check import why_not_prefixed
from headrace.terms.errors import ConfigError
from headrace.terms.options.budget import Budget
from headrace.terms.sizes import PAGE_BYTES

CHUNK = 7
CASES = [
    (name, place)
    for name in ("llama", "gemma3", "deepseek-v3", "gpt-oss", "bamba", "qwen3-next")
    for place in ("memory", *PLACES, "int8")
]
Rows = list[tuple[int, ...]]


def tokens(seed: int, count: int) -> tuple[int, ...]:
    return tuple(torch.randint(3, 40, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


def batches(prompts: Rows, whole: dict[str, Any]) -> Iterator[SeatRows]:
    for number, row in enumerate(prompts):
        yield SeatRows(number, (row,), 40 + number, whole, owner="one")


def keeping(directory: Path, place: str, tmp_path: Path, chunk: int = CHUNK) -> Generator:
    """Return a generator with two seats for prompts of 40 tokens, which are kept."""
    device = PLACES.get(place, ((), False))[1]
    budget = Budget(host="4GiB", device="64MiB" if device else None, ssd=tmp_path if place in PLACES else ())
    code = {"cache_dtype": "int8"} if place == "int8" else {}
    found = Generator.open(directory, budget, rows=1, seats=2, prefix_chunk=chunk, **code)
    found.planner = found.planner.keeping_prefixes(1 << 22, 0, 40, 12, 0)
    plan = found.planner.plan(4, 40, 12)
    if place in PLACES:
        homes = PLACES[place][0]
        tiered = tuple(homes[block % len(homes)] if may else "compute" for block, may in enumerate(plan.costs.tiered))
        plan = replace(plan, caches=replace(plan.caches, homes=tiered, slots=2, page_bytes=PAGE_BYTES))
    found.use(plan)
    return found


@pytest.mark.parametrize(("name", "place"), sampled(CASES, [("gemma3", "drives"), ("bamba", "memory"), ("llama", "int8")]))
def test_behind_what_is_kept_answers_have_the_bits_of_chunks_that_are_read(
    name: str, place: str, directory_of: Callable[..., Path], stock: Callable[..., Any], tmp_path: Path
) -> None:
    """Sampled, two at a time, the third and the fourth behind what the first and the second left."""
    first, second = tokens(1, 31), tokens(2, 40)
    prompts = [first, second, first[:14] + tokens(3, 15), second[:35] + tokens(4, 3)]
    asked = {**COMMON, **WAYS["sampled"], "eos_token_id": 1}
    with keeping(directory_of(name), place, tmp_path) as generator:
        assert generator.plan is not None
        mixture = bool(generator.plan.costs.choices)
        assert generator.plan.costs.chunks == (1 if mixture else 6)
        whole = generator.model.settings(40, None, asked)
        done = sorted(generator.run(batches(prompts, whole)), key=lambda each: each.batch.number)
    apart = mixture and place != "memory"  # experts may come one by one, and so may caches: nothing is kept
    assert [each.cached for each in done] == [0, 0, *([0, 0] if apart else [14, 35])]
    if place == "int8":
        with keeping(directory_of(name), place, tmp_path) as other:
            alone = [next(other.run([replace(each.batch, owner=None)])) for each in done]
    for number, each in enumerate(done):
        own = {**asked, "prefill_chunk_size": CHUNK}
        expected = (
            alone[number].raw
            if place == "int8"
            else stock(directory_of(name), "float32", each.batch.rows, each.batch.seed, own)
        )
        assert torch.equal(each.raw.sequences, expected.sequences)
        for one, other_logits in zip(each.raw.logits, expected.logits, strict=True):
            assert torch.equal(one, other_logits)


def test_chunks_give_the_logits_of_a_plain_forward_in_those_chunks(directory_of: Callable[..., Path], tmp_path: Path) -> None:
    """The model itself is called chunk by chunk, without `generate`."""
    directory, prompt = directory_of("qwen3"), tokens(5, 30)
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=DTYPES["float32"]).eval()
    for parameter in plain.parameters():
        parameter.data = parameter.data.clone()  # as loaded they lie at borders that change float32 sums
    cache, ids = DynamicCache(config=plain.config), torch.tensor([prompt])
    with torch.no_grad():
        for chunk in ids.split(CHUNK, dim=1):
            logits = plain(input_ids=chunk, past_key_values=cache, logits_to_keep=1).logits[:, -1]
    with Generator.open(directory, rows=1, prefix_chunk=CHUNK) as generator:
        found = list(generator.generate([prompt], max_new_tokens=1, do_sample=False))
        whole = generator.model.settings(30, None, {"max_new_tokens": 1, "do_sample": False, **COMMON})
        done = next(generator.run([SeatRows(0, (prompt,), 0, whole)]))
    assert torch.equal(done.raw.logits[0], logits.float())
    assert found[0][1] == (int(logits.argmax()),)


def test_where_prompts_are_not_read_in_chunks_it_is_said(directory_of: Callable[..., Path]) -> None:
    with Generator.open(directory_of("mamba2"), rows=1) as generator:
        planner = generator.planner.keeping_prefixes(None, 0, 40, 4, 0)
        plan = planner.plan(1, 40, 4)
        assert plan.prefixes is None
        assert "note     beginnings of prompts are not kept: its own generate raises ValueError" in plan.explain()
    with (
        Generator.open(directory_of("mamba2"), rows=1, prefix_chunk=8) as generator,
        pytest.raises(ConfigError, match="prefix_chunk: prompts are not read in chunks here: its own generate raises"),
    ):
        generator.planner.plan(1, 40, 4)


def test_a_plan_says_what_is_kept_and_counts_it(directory_of: Callable[..., Path]) -> None:
    with Generator.open(directory_of("llama"), Budget(host="2GiB"), rows=1, seats=1, prefix_chunk=8) as generator:
        bare = generator.planner.plan(1, 40, 4)
        given = generator.planner.keeping_prefixes(1 << 20, 0, 40, 4, 0).plan(1, 40, 4)
        rest = generator.planner.keeping_prefixes(None, 0, 40, 4, 0).plan(1, 40, 4)
    assert given.peak("host") == bare.peak("host") + (1 << 20)
    assert rest.peak("host") == rest.results.allowed_bytes["host"] == 2 << 30
    assert given.prefixes is not None
    size = 8 * sum(given.costs.cache_token_bytes)
    assert given.prefixes.chunk_bytes == size
    assert f"prefixes {(1 << 20) // size} chunks of 8 tokens are kept: 1 MiB of host memory" in given.explain()


@functools.cache
def refused(name: str) -> str:
    return why_not_prefixed(make_config(CONFIGS[name]))


@pytest.mark.parametrize("name", sampled([*CONFIGS], ["llama", "gemma2", "qwen3-next"]))
def test_beginnings_of_most_architectures_are_kept(name: str) -> None:
    """All but those whose own code takes no chunks."""
    lacking = {"mamba", "mamba2", "falcon-mamba", "minimax", "recurrent-gemma"}
    assert bool(refused(name)) == (name in lacking)


TURNS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(1, 9)), min_size=2, max_size=7)


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=TURNS, room=st.integers(0, 9))
def test_trees_of_conversations_answer_as_if_nothing_were_kept(
    turns: list[tuple[int, int, int]], room: int, directory_of: Callable[..., Path], tmp_path: Path
) -> None:
    """A turn goes on from an earlier one, of two owners, whose answer is cut and has another turn behind it. Room is short."""
    with keeping(directory_of("llama"), "memory", tmp_path, chunk=3) as generator:
        assert generator.kept.prefixes is not None
        generator.kept.prefixes = Prefixes(3, generator.kept.prefixes._chunk_bytes, room * generator.kept.prefixes._chunk_bytes)
        whole = generator.model.settings(40, None, {**COMMON, "max_new_tokens": 4, "eos_token_id": 1})
        told: Rows = [()]
        for number, (which, cut, count) in enumerate(turns):
            said = told[which % len(told)]
            prompt = (said[: max(0, len(said) - cut)] + tokens(number, count))[:36]
            batch = SeatRows(number, (prompt,), number, whole, owner=number % 2)
            (kept,) = generator.run([batch])
            (alone,) = generator.run([replace(batch, owner=None)])
            assert kept.tokens == alone.tokens
            assert torch.equal(kept.raw.logits[0], alone.raw.logits[0])
            assert generator.kept.prefixes.num_bytes <= generator.kept.prefixes.most_bytes
            told.append((*prompt, *kept.tokens[0]))
