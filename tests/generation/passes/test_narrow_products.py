"""Generation with narrow products gives the bits of `generate` under the same loop, wherever weights live, and jobs keep to it.

Run: pytest tests/generation/passes/test_narrow_products.py
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from answered_jobs import answered
from some_prompts import prompts
from tiers import sampled
from tiny_architectures import CONFIGS, make_config

from headrace.ask.place import multiplies
from headrace.generate.passes import planner
from headrace.generate.passes.asked import plan_generation
from headrace.generate.passes.generator import Generator
from headrace.generate.passes.micro_batches import Generated, SeatRows
from headrace.generate.plan.plan import GenerationPlan
from headrace.model.kernels import narrow
from headrace.model.kernels.narrow import NARROW_ROWS, NarrowProducts
from headrace.model.kernels.products import WideProducts
from headrace.model.seats.generation_check import why_not_narrow
from headrace.terms.errors import ConfigError
from headrace.terms.options.budget import Budget
from headrace.terms.options.generate_options import GenerateOptions

# Multi-head, grouped, latent, windows, mixture, state-space.
NAMES = ("opt", "qwen2", "deepseek-v3", "gemma3", "mixtral", "bamba")
PLACEMENTS: dict[str, dict[str, Any]] = {
    "all in memory": {},
    "two slots": {"host_slots": 2, "device_slots": 2, "prefetch": 1},
    "device": {"host_slots": 2, "device_slots": 2, "prefetch": 1, "device": "64MiB"},
}
JOB: dict[str, Any] = {"compute_dtype": "bfloat16", "max_new_tokens": 6}
SETTINGS = {
    "max_new_tokens": 5,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "return_dict_in_generate": True,
    "output_logits": True,
    "do_sample": True,
    "temperature": 0.8,
}


def generated(directory: Path, placement: str, wanted: bool | None, interpreter: str = "overlapped") -> list[Generated]:
    place = dict(PLACEMENTS[placement])
    budget = Budget(host="4GiB", device=place.pop("device", None))
    changes: dict[str, Any] = {"compute_dtype": "bfloat16", "narrow_products": wanted}
    with Generator.open(directory, budget, interpreter=interpreter, **changes) as generator:
        rows = prompts(4)
        plan = generator.prepare(4, 12, 5)
        assert plan.narrow_rows == (NARROW_ROWS if wanted else 0)
        generator.use(replace(plan, rows=2, seats=2, **place))
        settings = generator.model.settings(12, None, SETTINGS)
        batches = [SeatRows(at, tuple(map(tuple, rows[2 * at : 2 * at + 2])), 40 + at, settings) for at in range(2)]
        return sorted(generator.run(batches), key=lambda done: done.batch.number)


@contextlib.contextmanager
def arithmetic(*, by_loop: bool) -> Iterator[None]:
    plain = multiplies("bfloat16", None, here=True)
    with contextlib.nullcontext() if plain else WideProducts(), NarrowProducts() if by_loop else contextlib.nullcontext():
        yield


@pytest.mark.parametrize("placement", sampled(PLACEMENTS))
@pytest.mark.parametrize("name", sampled(NAMES, ("qwen2", "mixtral")))
def test_bits_are_those_of_generate_with_the_same_loop(
    name: str,
    placement: str,
    directory_of: Callable[..., Path],
    stock: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, multiplied = list[int](), narrow.multiplied

    def counted(inputs: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        rows.append(inputs.numel() // inputs.shape[-1])
        return multiplied(inputs, *others)

    monkeypatch.setattr(narrow, "multiplied", counted)
    directory = directory_of(name, "bfloat16")
    for wanted in (True, False):
        rows.clear()
        done = generated(directory, placement, wanted, "plain" if placement == "two slots" else "overlapped")
        assert set(rows) <= {1, 2, 3, 4}
        assert (rows.count(2) > 2 * 5 * 2) is wanted, "all products of a token's pass, the head's among them"
        for each in done:
            with arithmetic(by_loop=wanted):
                expected = stock(directory, "bfloat16", each.batch.rows, each.batch.seed, SETTINGS, fresh=True)
            assert torch.equal(each.raw.sequences, expected.sequences)
            assert torch.equal(torch.stack(each.raw.logits), torch.stack(expected.logits))


@pytest.mark.parametrize("name", sampled(NAMES, ("gemma3",)))
def test_an_architecture_is_tried_with_the_loop(name: str) -> None:
    config = make_config(CONFIGS[name])
    assert why_not_narrow(config) == ""


def plan_of(directory: Path, *, rows: int = 1, **options: Any) -> GenerationPlan:
    asked = GenerateOptions(rows=rows, host_memory="4GiB", **options)
    return plan_generation(str(directory), asked, None, here=True, prompts=rows, prompt_length=12, new_tokens=4)


def test_the_plan_says_whether_the_loop_is_used(directory_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    directory = directory_of("llama", "bfloat16")
    monkeypatch.setattr(planner, "has_kernel", lambda: True)
    by_itself, without = plan_of(directory), plan_of(directory, narrow_products=False)
    assert (by_itself.narrow_rows, without.narrow_rows) == (NARROW_ROWS, 0)
    assert "narrow_rows" in by_itself.to_json()
    assert "narrow_rows" not in without.to_json()
    assert "by Headrace's own loop" in by_itself.explain()
    assert plan_of(directory, compute_dtype="float32").narrow_rows == 0
    with pytest.raises(ConfigError, match=r"narrow_products: asked for, .* here blocks are computed in float32 on the CPU"):
        plan_of(directory, compute_dtype="float32", narrow_products=True)
    monkeypatch.setattr(planner, "why_not_narrow", lambda config: "tokens differ")
    tried = plan_of(directory)
    assert tried.narrow_rows == 0
    assert "tokens differ" in tried.explain()
    monkeypatch.setattr(planner, "has_kernel", lambda: False)
    assert plan_of(directory).narrow_rows == 0


def test_forecasts_count_it(directory_of: Callable[..., Path]) -> None:
    plan = replace(plan_of(directory_of("llama", "bfloat16"), narrow_products=True), compute_threads=1)
    widening = replace(plan, costs=replace(plan.costs, widens=True))
    for rows, least in ((1, 2.0), (3, 1.05), (4, 3.9)):  # three rows are torch's own products, four are widened
        taken, before = (replace(widening, narrow_rows=most).multiplied_bytes(1000, rows) for most in (4, 0))
        assert 1000 <= taken <= before / least
    assert widening.multiplied_bytes(1000, 5) == replace(widening, narrow_rows=0).multiplied_bytes(1000, 5)


@pytest.mark.wide
def test_a_job_goes_on_as_it_was_begun(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = answered(model, tmp_path / "whole", **JOB, narrow_products=True)
    with pytest.raises(KeyboardInterrupt):
        answered(model, tmp_path / "killed", most=1, **JOB, narrow_products=True)
    assert answered(model, tmp_path / "killed", **JOB, narrow_products=None) == whole
    with pytest.raises(KeyboardInterrupt):
        answered(model, tmp_path / "other", most=1, **JOB, narrow_products=False)
    monkeypatch.setattr(narrow, "multiplied", None)
    monkeypatch.setattr(planner, "has_kernel", lambda: True)  # the plan alone would choose it
    answered(model, tmp_path / "other", **JOB, narrow_products=None)
    with pytest.raises(TypeError):
        answered(model, tmp_path / "new", **JOB, narrow_products=True)
