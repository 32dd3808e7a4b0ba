"""Experts that come one at a time: the bits of whole blocks, each read once for all seats, and only where it is wanted."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from banked_plans import with_banks
from some_prompts import prompts
from tiers import sampled
from tiny_architectures import CONFIGS, make_config, make_plain
from transformers import AutoModelForCausalLM

from headrace.generate.passes.generator import Generator
from headrace.generate.passes.micro_batches import Generated, SeatRows
from headrace.terms.events import Event, GenerationPass
from headrace.terms.options.budget import Budget

# By name: slots for what every token reads, experts that stay, when all are read ahead, a separate device, interpreter.
PLACES: dict[str, dict[str, Any]] = {
    "routed": {"ahead_share": 1.0},
    "ahead": {"ahead_share": 0.0},
    "two at a time, half of them kept": {"ahead_share": 1.0, "in_round": 2, "cached": 6},
    "few kept, those used last": {"ahead_share": 1.0, "in_round": 2, "cached": 3, "policy": "last-used"},
    "device": {"ahead_share": 1.0, "device": "64MiB"},
    "few kept there, those used last": {"ahead_share": 1.0, "in_round": 2, "cached": 3, "on_device": 5, "device": "64MiB"},
    "device, ahead, plain": {"ahead_share": 0.0, "cached": 3, "device": "64MiB", "interpreter": "plain"},
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_p": 0.9},
}
COMMON = {"max_new_tokens": 5, "pad_token_id": 0, "eos_token_id": 2, "return_dict_in_generate": True, "output_logits": True}


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
            SeatRows(number, tuple(map(tuple, rows[2 * number : 2 * number + 2])), 40 + number, whole) for number in range(3)
        ]
        return sorted(generator.run(batches), key=lambda done: done.batch.number)


NAMES = ("mixtral", "qwen3-moe", "gpt-oss", "deepseek-v3", "nemotron-h", "granite-hybrid")
QUICK = (
    ("mixtral", "two at a time, half of them kept", "sampled"),
    ("mixtral", "few kept, those used last", "greedy"),
    ("mixtral", "few kept there, those used last", "greedy"),
    ("gpt-oss", "device", "greedy"),
)


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


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with 64 experts in a block, each of 192 KiB."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
    config = make_config(("qwen3_moe", {**CONFIGS["qwen3-moe"][1], **sizes, "num_experts": 64}))
    directory = tmp_path_factory.mktemp("many")
    make_plain(config).save_pretrained(directory)
    return directory


@pytest.mark.wide
def test_of_64_experts_those_are_read_that_tokens_are_sent_to_once_for_all(many: Path) -> None:
    """Two micro-batches of a row each; which experts they want is seen in stock transformers, step by step."""
    rows = prompts(2)
    model = AutoModelForCausalLM.from_pretrained(many, experts_implementation="eager").eval()
    wanted: list[set[int]] = []
    for row in rows:
        step = itertools.count()

        def note(module: Any, args: Any, steps: Any = step) -> None:
            place = next(steps)
            wanted.extend(set() for _ in range(place + 1 - len(wanted)))
            chosen = next(value for value in args if value.dtype is torch.int64)
            wanted[place] |= set(chosen.flatten().tolist())

        hooks = [block.mlp.experts.register_forward_pre_hook(note) for block in model.model.layers]
        asked = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "use_cache": True}
        model.generate(torch.tensor([row]), attention_mask=torch.ones(1, len(row), dtype=torch.int64), **asked)
        for hook in hooks:
            hook.remove()
    passes: list[GenerationPass] = []

    def sink(event: Event) -> None:
        passes.extend([event] if isinstance(event, GenerationPass) else [])

    with Generator.open(many, Budget(host="4GiB"), sink=sink) as generator:
        plan = with_banks(generator, generator.plan_only(2, 12, 6), ahead_share=1.0)
        generator.use(replace(plan, rows=1, seats=2, host_slots=2))
        source = generator.model.source
        assert source.by_experts is not None
        before = source.bytes_read
        settings = generator.model.settings(12, None, {**COMMON, "do_sample": False, "eos_token_id": None, "max_new_tokens": 6})
        assert len(list(generator.run([SeatRows(place, (tuple(row),), 0, settings) for place, row in enumerate(rows)]))) == 2
        read = source.bytes_read - before
        common = sum(plan.stored_bytes(unit) for unit in (1, 2))  # once: both blocks have a place
        sizes = [
            source.by_experts.expert(1 + place % 2, expert).num_bytes for place, each in enumerate(wanted) for expert in each
        ]
    assert read == common + sum(sizes)
    assert sum(each.wanted for each in passes) == len(sizes)
    needed = 3 * 128 * 128 * 4
    assert len(sizes) < 0.6 * len(wanted) * 64, "most experts are left alone"
    assert sum(sizes) <= 1.1 * len(sizes) * needed
