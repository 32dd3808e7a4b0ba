"""Experts that come one at a time: the bits of whole blocks, each read once for all seats, and only where it is wanted."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from some_prompts import prompts
from tiers import sampled

from headrace.engine.generator import Generated, Generator, MicroBatch
from headrace.plan.experts import ExpertPlan
from headrace.plan.generation import GenerationPlan
from headrace.terms.budget import Budget

# By name: slots for what every token reads, experts that stay, when all are read ahead, a separate device, interpreter.
PLACES: dict[str, dict[str, Any]] = {
    "routed": {"ahead_share": 1.0},
    "ahead": {"ahead_share": 0.0},
    "two at a time, half of them kept": {"ahead_share": 1.0, "in_round": 2, "cached": 6},
    "device": {"ahead_share": 1.0, "device": "64MiB"},
    "device, ahead, plain": {"ahead_share": 0.0, "cached": 3, "device": "64MiB", "interpreter": "plain"},
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_p": 0.9},
}
COMMON = {"max_new_tokens": 5, "pad_token_id": 0, "eos_token_id": 2, "return_dict_in_generate": True, "output_logits": True}


def with_banks(generator: Generator, plan: GenerationPlan, **place: Any) -> GenerationPlan:
    """Return the plan with experts that come by themselves."""
    source = generator.model.source.by_experts
    assert source is not None, "the architecture has experts"
    experts = ExpertPlan(figures=source.expert_figures, choices=plan.costs.choices, **{"in_round": 1, **place})
    slots = {"host_slots": 2, "device_slots": 2, "prefetch": 1}
    return replace(plan, units=source.figures, experts=experts, **slots)


def generated(directory: Path, dtype: str, place: dict[str, Any], settings: dict[str, Any]) -> list[Generated]:
    place = dict(place)
    budget = Budget(host="4GiB", device=place.pop("device", None))
    interpreter = place.pop("interpreter", "overlapped")
    with Generator.open(directory, budget, compute_dtype=dtype, interpreter=interpreter) as generator:
        rows = prompts(5)
        whole = generator.model.settings(12, None, settings)
        plan = generator.plan_only(len(rows), 12, 6)
        generator.use(replace(with_banks(generator, plan, **place), rows=2, seats=2))
        batches = [
            MicroBatch(number, tuple(map(tuple, rows[2 * number : 2 * number + 2])), 40 + number, whole) for number in range(3)
        ]
        return sorted(generator.run(batches), key=lambda done: done.batch.number)


NAMES = ("mixtral", "qwen3-moe", "gpt-oss", "deepseek-v3", "nemotron-h", "granite-hybrid")
QUICK = (("mixtral", "two at a time, half of them kept", "sampled"), ("gpt-oss", "device", "greedy"))


@pytest.mark.parametrize(("name", "place", "way"), sampled(itertools.product(NAMES, PLACES, WAYS), QUICK))
def test_experts_one_at_a_time_are_stock_to_the_bit(
    name: str, place: str, way: str, directory_of: Callable[..., Path], stock: Callable[..., Any]
) -> None:
    settings = {**COMMON, **WAYS[way]}
    directory = directory_of(name)
    for each in generated(directory, "float32", PLACES[place], settings):
        expected = stock(directory, "float32", each.batch.rows, each.batch.seed, settings)
        assert torch.equal(each.raw.sequences, expected.sequences)
        for one, other in zip(each.raw.logits, expected.logits, strict=True):
            assert torch.equal(one, other)
