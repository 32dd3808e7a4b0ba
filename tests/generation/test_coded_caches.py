"""Caches in few bits: the tokens of stock transformers whose past is rounded, wherever caches lie, within the plan's bytes."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_caches import COMMON, NEW, PLACES, WAYS, _arithmetic, micro_batches
from tiers import sampled
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from headrace.codec.cache_codes import CACHE_CODES
from headrace.generate.passes.generator import Generator
from headrace.generate.passes.micro_batches import Generated
from headrace.generate.plan.cache_plan import CachePlan, whole_bytes
from headrace.generate.plan.plan import GenerationPlan
from headrace.terms.errors import ConfigError
from headrace.terms.events import Event, Notice
from headrace.terms.options.budget import Budget
from headrace.terms.options.generate_options import CACHE_DTYPES
from headrace.terms.sizes import PAGE_BYTES

HOMES = {**PLACES, "compute": (("compute",), False), "device": (("compute",), True)}


def generated(
    directory: Path, ssd: Path, dtype: str, place: str, asked: dict[str, Any], code: str, sink: Callable[[Event], None]
) -> list[Generated]:
    homes, device = HOMES[place]
    budget = Budget(host="4GiB", device="64MiB" if device else None, ssd=ssd)
    how: dict[str, Any] = {"compute_dtype": dtype, "rows": 2, "seats": 2, "sink": sink, "cache_dtype": code}
    with Generator.open(directory, budget, **how) as generator:
        whole = generator.model.settings(48, None, asked)
        plan = generator.prepare(5, 48, NEW)
        tiered = [homes[block % len(homes)] if may else "compute" for block, may in enumerate(plan.costs.tiered)]
        generator.use(replace(plan, caches=CachePlan(homes=tuple(tiered), slots=2, page_bytes=PAGE_BYTES)))
        return sorted(generator.run(micro_batches(whole, 48)), key=lambda done: done.batch.number)


def rounded(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Return what is left of keys or values (rows, heads, tokens, width) in few bits; written from the page, not the code."""
    lines, levels, parts = numbers.transpose(1, 2).float().flatten(2), 2**bits - 1, []
    count = -(-lines.shape[2] // 64)
    for group in lines.split(4 * -(-lines.shape[2] // (4 * count)), dim=2):
        least = group.min(dim=2, keepdim=True).values.half().float()
        step = ((group.max(dim=2, keepdim=True).values - least) / levels).half().float()
        codes = torch.where(step > 0, (group - least) / step, 0.0).round().clamp(0, levels)
        parts.append(codes * step + least)
    return torch.cat(parts, dim=2).to(numbers.dtype).view(numbers.transpose(1, 2).shape).transpose(1, 2)


class RoundedLayer(DynamicLayer):  # type: ignore[misc]
    """A layer of stock transformers whose past is rounded; a pass sees its own tokens as they are."""

    bits = 4

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = super().update(key_states, value_states, *args, **kwargs)
        before = found[0].shape[2] - key_states.shape[2]
        self.keys, self.values = (
            torch.cat([every[:, :, :before], rounded(every[:, :, before:], self.bits)], dim=2) for every in found
        )
        return found


CASES = [
    (name, place, way, dtype, code)
    for name in ("llama", "deepseek-v3", "gpt-oss", "qwen3-moe", "gemma3", "gpt2")
    for place in HOMES
    for way in WAYS
    for dtype in ("float32", "bfloat16")
    for code in CACHE_DTYPES
]
FEW = [("llama", "all", "sampled", "float32", "int4"), ("gemma3", "compute", "greedy", "bfloat16", "int8")]


@pytest.mark.wide
@pytest.mark.parametrize(("name", "place", "way", "dtype", "code"), sampled(CASES, FEW))
def test_answers_are_those_of_stock_transformers_with_a_rounded_past(
    name: str,
    place: str,
    way: str,
    dtype: str,
    code: str,
    directory_of: Callable[..., Path],
    stock: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, directory, told = {**COMMON, **WAYS[way]}, directory_of(name, dtype), list[Event]()
    own = DynamicCache.__init__

    def with_rounded(cache: Any, *args: Any, **kwargs: Any) -> None:
        own(cache, *args, **kwargs)
        cache.layers = [RoundedLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]

    found = generated(directory, tmp_path, dtype, place, asked, code, told.append)
    monkeypatch.setattr(RoundedLayer, "bits", int(code.removeprefix("int")))
    monkeypatch.setattr(DynamicCache, "__init__", with_rounded)
    for each in found:
        with _arithmetic(dtype):
            expected = stock(directory, dtype, each.batch.rows, each.batch.seed, asked)
        assert torch.equal(each.raw.sequences, expected.sequences)
        for one, other in zip(each.raw.logits, expected.logits, strict=True):
            assert torch.equal(one, other)
    assert len([event for event in told if isinstance(event, Notice) and "lossy" in event.text]) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("code", sampled(CACHE_DTYPES))
def test_the_error_of_attention_is_that_of_rounded_keys_and_values(
    code: str, directory_of: Callable[..., Path], stock: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last token's attention in float64, over what stock transformers attends to, and over that rounded."""
    asked, told, errors = {**COMMON, **WAYS["greedy"]}, list[Event](), list[float]()
    attend = torch.nn.functional.scaled_dot_product_attention

    def noted(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: Any = None, **more: Any) -> Any:
        if len(errors) < 3:  # the blocks over the prompt
            each = query.shape[1] // key.shape[1]
            lossy = [rounded(part, int(code.removeprefix("int"))) for part in (key, value)]
            shown = torch.ones(1, 1, 1, key.shape[2], dtype=torch.bool) if attn_mask is None else attn_mask[:, :, -1:]
            found = []
            for keys, values in ((key, value), lossy):
                keys, values = (part.double().repeat_interleave(each, dim=1) for part in (keys, values))
                scores = query[:, :, -1:].double() @ keys.transpose(2, 3) * query.shape[3] ** -0.5
                found.append(scores.masked_fill(~shown, -math.inf).softmax(-1) @ values)
            errors.append(float((found[1] - found[0]).norm() / found[0].norm()))
        return attend(query, key, value, attn_mask=attn_mask, **more)

    first, *_ = generated(directory_of("llama"), tmp_path, "float32", "compute", asked, code, told.append)
    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", noted)
    stock(directory_of("llama"), "float32", first.batch.rows, 0, asked)
    (text,) = [event.text for event in told if isinstance(event, Notice) and "lossy" in event.text]
    assert len(errors) == 3
    mean, worst = math.sqrt(sum(error**2 for error in errors) / 3), max(errors)
    assert f"off by {mean:.2%} of its norm (root mean square of 3 blocks), {worst:.2%} in block" in text
    assert 0.0005 < mean < (0.15 if code == "int4" else 0.01)


REFUSED = [
    ({"num_beams": 2}, {}, "cache_dtype: beams"),
    ({"prompt_lookup_num_tokens": 2}, {}, "cache_dtype: beams"),
    ({}, {"attention": "host"}, "cache_dtype and attention"),
    ({}, {"prompt_lookup": 2}, "cache_dtype: beams"),
]


@pytest.mark.parametrize(("settings", "options", "words"), REFUSED)
def test_what_codes_cannot_do_is_refused_by_name(
    settings: dict[str, Any], options: dict[str, Any], words: str, directory_of: Callable[..., Path]
) -> None:
    with (
        pytest.raises(ConfigError, match=words),
        Generator.open(directory_of("llama"), cache_dtype="int4", **options) as generator,
    ):
        list(generator.generate([[5, 6, 7]], max_new_tokens=3, **settings))


def test_an_architecture_without_caches_of_full_attention_is_refused(directory_of: Callable[..., Path]) -> None:
    with (
        pytest.raises(ConfigError, match="are not kept in int8: it has no caches of full attention"),
        Generator.open(directory_of("mamba2"), cache_dtype="int8") as generator,
    ):
        list(generator.generate([[5, 6, 7]], max_new_tokens=3))


def test_the_plan_counts_codes_on_every_tier(directory_of: Callable[..., Path], tmp_path: Path) -> None:
    def plan(code: str | None, **more: Any) -> GenerationPlan:
        with Generator.open(directory_of("llama"), host_memory="4GiB", cache_dtype=code, rows=64, seats=1, **more) as generator:
            return generator.plan_only(64, 400, 100)

    plain, coded = plan(None), plan("int4")
    share = CACHE_CODES["int4"].coded_bytes(16) / (16 * 4)
    assert coded.results.peak_bytes["host"]["cache"] == pytest.approx(
        share * plain.results.peak_bytes["host"]["cache"], rel=0.02
    )
    assert "int4, lossy" in coded.explain()
    assert "lossy" not in plain.explain()
    assert whole_bytes(coded.costs, 100, 1) == share * whole_bytes(plain.costs, 100, 1)
    assert "coded" not in plain.to_json()["costs"]
    assert coded.to_json()["costs"]["coded"]["name"] == "int4"
