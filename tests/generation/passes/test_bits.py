"""A generation gives the bits of transformers' `generate` on the same micro-batches, wherever weights live."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from some_prompts import prompts
from tiers import pairwise, sampled

from headrace.generate.passes.generator import Generator
from headrace.generate.passes.micro_batches import Generated, SeatRows
from headrace.model.kernels.products import WideProducts
from headrace.terms.options.budget import Budget

# By name: slots in host memory and where compute reads made or uploaded weights, a separate device, interpreter.
PLACEMENTS: dict[str, dict[str, Any]] = {
    "all in memory": {},
    "two slots": {"host_slots": 2, "device_slots": 2, "prefetch": 1},
    "three slots, plain": {"host_slots": 3, "device_slots": 2, "prefetch": 1, "interpreter": "plain"},
    "device": {"host_slots": 2, "device_slots": 2, "prefetch": 1, "device": "64MiB"},
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1},
    "beams": {"do_sample": False, "num_beams": 3},
}
COMMON = {"max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": 2, "return_dict_in_generate": True, "output_logits": True}


def generated(directory: Path, dtype: str, placement: str, settings: dict[str, Any], seats: int = 2) -> list[Generated]:
    place = dict(PLACEMENTS[placement])
    budget = Budget(host="4GiB", device=place.pop("device", None))
    interpreter = place.pop("interpreter", "overlapped")
    changes: dict[str, Any] = {"compute_dtype": dtype, "narrow_products": False}
    with Generator.open(directory, budget, interpreter=interpreter, **changes) as generator:
        rows = prompts(5)
        whole = generator.model.settings(12, None, settings)
        plan = generator.prepare(len(rows), 12, 6)
        generator.use(replace(plan, rows=2, seats=seats, **place))
        batches = [
            SeatRows(number, tuple(map(tuple, rows[2 * number : 2 * number + 2])), 40 + number, whole) for number in range(3)
        ]
        return sorted(generator.run(batches), key=lambda done: done.batch.number)


def check(done: list[Generated], reference: Callable[[Generated], Any], *, logits: bool) -> None:
    for each in done:
        expected = reference(each)
        assert torch.equal(each.raw.sequences, expected.sequences)
        for one, other in zip(each.raw.logits, expected.logits, strict=True) if logits else ():
            assert torch.equal(one, other)


@pairwise(name=("llama", "mixtral"), placement=tuple(PLACEMENTS), way=tuple(WAYS))
def test_float32_is_stock_to_the_bit(
    name: str, placement: str, way: str, directory_of: Callable[..., Path], stock: Callable[..., Any]
) -> None:
    settings = {**COMMON, **WAYS[way]}
    directory = directory_of(name)
    done = generated(directory, "float32", placement, settings)
    check(done, lambda each: stock(directory, "float32", each.batch.rows, each.batch.seed, settings), logits=True)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("stored", "dtype"), sampled([("bfloat16", "bfloat16"), ("bfloat16", "float32")], [("bfloat16", "bfloat16")])
)
@pytest.mark.parametrize("name", sampled(["llama-tied", "qwen3-moe", "gpt-oss"], ["qwen3-moe"]))
def test_16_bits_are_stock_within_the_same_arithmetic(
    name: str, stored: str, dtype: str, directory_of: Callable[..., Path], stock: Callable[..., Any]
) -> None:
    settings = {**COMMON, **WAYS["sampled"]}
    directory = directory_of(name, stored)

    def reference(each: Generated) -> Any:
        with WideProducts():
            return stock(directory, dtype, each.batch.rows, each.batch.seed, settings)

    def narrow(each: Generated) -> Any:
        return stock(directory, dtype, each.batch.rows, each.batch.seed, settings)

    done = generated(directory, dtype, "two slots", settings)
    check(done, reference if dtype == "bfloat16" and not _multiplies() else narrow, logits=True)


@pytest.mark.wide
def test_a_seat_that_comes_in_late_and_one_that_ends_early_change_nothing(
    directory_of: Callable[..., Path], stock: Callable[..., Any]
) -> None:
    settings = {**COMMON, **WAYS["greedy"], "eos_token_id": list(range(100, 160))}  # many texts end soon
    directory = directory_of("gemma3")
    done = generated(directory, "float32", "two slots", settings)
    assert any(len(tokens) < 6 for each in done for tokens in each.tokens)
    check(done, lambda each: stock(directory, "float32", each.batch.rows, each.batch.seed, settings), logits=True)


@pytest.mark.wide
def test_what_modules_keep_between_passes_is_each_seats_own(
    directory_of: Callable[..., Path], stock: Callable[..., Any]
) -> None:
    """Recurrent states of a block, which stock `generate` keeps for the next micro-batch, too."""
    settings, directory = {**COMMON, **WAYS["sampled"]}, directory_of("recurrent-gemma")
    done = generated(directory, "float32", "two slots", settings)
    check(done, lambda each: stock(directory, "float32", each.batch.rows, each.batch.seed, settings, fresh=True), logits=True)


def _multiplies() -> bool:
    from headrace.machine.cpu import CpuMachine

    return CpuMachine().multiplies("bfloat16")
