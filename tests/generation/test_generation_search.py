"""The plan of a generation fits, is as fast as the best of all small placements, and no slower with more memory."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import sampled
from transformers import LlamaConfig, Qwen3MoeConfig

from headrace.cli import main
from headrace.generate.passes.asked import plan_generation
from headrace.generate.plan.cache_plan import CachePlan
from headrace.generate.plan.peaks import with_peaks
from headrace.generate.plan.plan import GenerationPlan
from headrace.generate.plan.schedule import build_pass
from headrace.generate.plan.search import GenerationQuestion, make_generation_plan
from headrace.generate.plan.seconds import seconds_of_all_tokens
from headrace.plan.clock.machine_profiles import load_profile
from headrace.plan.clock.nominal import nominal_machine
from headrace.plan.clock.rates import Rates
from headrace.plan.schedules.ledger import Snapshot
from headrace.plan.value.allowance import Allowance
from headrace.plan.value.expert_plan import ExpertFigures
from headrace.terms.costs import GenerationCosts, PassCosts
from headrace.terms.errors import PlanInfeasible
from headrace.terms.forms import DEVICE, SSD, UnitFigures
from headrace.terms.lanes import Lane
from headrace.terms.options.generate_options import GenerateOptions
from headrace.terms.sizes import MIB

BLOCKS, ELEMENTS = 4, 8 << 20


def costs_of(rows: int) -> GenerationCosts:
    first = PassCosts(flops=(4e9 * rows,) * BLOCKS, workspace_bytes=rows * MIB, call_bytes=4096, hidden_bytes=rows << 16)
    following = PassCosts(flops=(4e7 * rows,) * BLOCKS, workspace_bytes=rows << 14, call_bytes=64, hidden_bytes=rows << 10)
    return GenerationCosts(
        rows=rows,
        prompt_length=64,
        first=first,
        next=following,
        cache_bytes=(rows * MIB,) * BLOCKS,
        cache_token_bytes=(rows << 14,) * BLOCKS,
        head_flops=1e7 * rows,
        head_bytes=rows << 16,
        tiered=(True,) * BLOCKS,
    )


def question(host_bytes: int, prompts: int, device_bytes: int | None = None, *, made: bool = False) -> GenerationQuestion:
    stored = ELEMENTS * 2 if made else None
    end = UnitFigures(name="end", num_elements=1 << 20, num_parameters=1 << 20, home=DEVICE, trained_elements=0)
    block = replace(end, name="block", num_elements=ELEMENTS, num_parameters=ELEMENTS, home=SSD, stored_bytes=stored)
    allowance = Allowance(host_bytes=host_bytes, device_bytes=device_bytes, runtime_bytes=64 * MIB, cores=2)
    return GenerationQuestion(
        units=(end, *[block] * BLOCKS, end),
        num_blocks=BLOCKS,
        compute_dtype="bfloat16",
        costs_of=costs_of,
        prompts=prompts,
        prompt_length=64,
        new_tokens=16,
        allowance=allowance,
        machine=nominal_machine(2, host_bytes=1 << 34, device_bytes=None if device_bytes is None else 1 << 33),
    )


def mixture(host_bytes: int, prompts: int, device_bytes: int | None = None, choices: int = 2) -> GenerationQuestion:
    """The same as `question`, nearly all of whose blocks are 32 experts, which may come by themselves."""
    asked = question(host_bytes, prompts, device_bytes)
    end, block = asked.units[0], replace(asked.units[1], num_elements=ELEMENTS // 16, num_parameters=ELEMENTS // 16)
    one = ELEMENTS * 15 // 16 // 32
    figures = ExpertFigures(
        units=(end, *[block] * BLOCKS, end),
        num_experts=(0, *[32] * BLOCKS, 0),
        elements=one,
        stored_bytes=2 * one,
        is_made=False,
        making_bytes=0,
        num_parameters=one,
    )
    return replace(asked, experts=figures, costs_of=lambda rows: replace(costs_of(rows), choices=choices))


def seconds(plan: GenerationPlan, asked: GenerationQuestion) -> float:
    return seconds_of_all_tokens(plan, Rates(asked.machine, "bfloat16", asked.allowance.cores, None))


def fits(plan: GenerationPlan) -> bool:
    return all(plan.peak(tier) <= allowed for tier, allowed in plan.results.allowed_bytes.items())


def everything(asked: GenerationQuestion, chosen: GenerationPlan) -> list[GenerationPlan]:
    """All placements of a small question that fit."""
    found = []
    slots = range(2, BLOCKS + 1)
    devices = slots if asked.separate_device or chosen.makes_slots else [chosen.device_slots]
    for rows, seats, host, device, prefetch in itertools.product((1, 2, 3), (1, 2, 3), slots, devices, (1, 2)):
        if rows * (seats - 1) >= asked.prompts or min(host, device) < prefetch + 1:
            continue
        place = {"rows": rows, "seats": seats, "host_slots": host, "device_slots": device, "prefetch": prefetch}
        plan = with_peaks(replace(chosen, costs=costs_of(rows), **place), asked.allowance)
        found += [plan] if fits(plan) else []
    return found


@pytest.mark.parametrize("made", sampled([False, True]))
@pytest.mark.parametrize("device", sampled([None, 80 * MIB]))
@pytest.mark.parametrize("host", sampled([180 * MIB, 220 * MIB, 280 * MIB]))
def test_the_plan_is_as_fast_as_the_best_of_all(host: int, device: int | None, made: bool) -> None:
    asked = question(host, 3, device, made=made)
    plan = make_generation_plan(asked)
    assert fits(plan)
    best = min(seconds(each, asked) for each in everything(asked, plan))
    assert seconds(plan, asked) <= best * 1.01


@pytest.mark.wide
@pytest.mark.parametrize("host", [170 * MIB, 200 * MIB])
def test_caches_lie_where_it_is_fastest(host: int) -> None:
    """Of every division of the blocks' caches between memory and drives, with every number of rows, seats and slots."""
    asked = replace(question(host, 12), has_drives=True)
    plan = make_generation_plan(asked)
    assert fits(plan)
    best = math.inf
    for homes, slots in itertools.product(itertools.product(("compute", "ssd"), repeat=BLOCKS), (2, 4)):
        caches = CachePlan(homes=homes if "ssd" in homes else (), slots=slots)
        for rows, seats, held in itertools.product((1, 2, 4, 8, 12), (1, 2, 4, 8, 12), range(2, BLOCKS + 1)):
            if rows * (seats - 1) >= asked.prompts:
                continue
            place = {"rows": rows, "seats": seats, "host_slots": held, "prefetch": min(2, held - 1), "caches": caches}
            found = with_peaks(replace(plan, costs=costs_of(rows), **place), asked.allowance)
            best = min(best, seconds(found, asked) if fits(found) else math.inf)
    assert seconds(plan, asked) <= best * 1.02
    without = make_generation_plan(question(host, 12))
    assert seconds(plan, asked) <= seconds(without, asked) * 1.001


@settings(max_examples=10)
@given(st.integers(160, 300), st.integers(0, 120), st.integers(1, 40))
def test_with_drives_for_caches_more_memory_is_never_slower(host_mib: int, more_mib: int, prompts: int) -> None:
    asked, more = (replace(question(mib * MIB, prompts), has_drives=True) for mib in (host_mib, host_mib + more_mib))
    assert seconds(make_generation_plan(more), more) <= seconds(make_generation_plan(asked), asked) * 1.01


@settings(max_examples=25)
@given(st.integers(90, 300), st.integers(0, 120), st.integers(1, 40))
def test_more_memory_is_never_slower(host_mib: int, more_mib: int, prompts: int) -> None:
    asked = question(host_mib * MIB, prompts)
    try:
        plan = make_generation_plan(asked)
    except PlanInfeasible:
        assert host_mib < 160  # below what one seat takes
        return
    more = question((host_mib + more_mib) * MIB, prompts)
    assert seconds(make_generation_plan(more), more) <= seconds(plan, asked) * 1.01


@pytest.mark.parametrize("device", [None, 60 * MIB])
@pytest.mark.parametrize("prompts", [1, 64])
def test_experts_come_by_themselves_where_that_is_faster(prompts: int, device: int | None) -> None:
    asked = mixture(150 * MIB, prompts, device)
    plan = make_generation_plan(asked)
    assert fits(plan)
    whole = make_generation_plan(replace(asked, experts=None))
    assert seconds(plan, asked) <= seconds(whole, asked)
    if prompts == 1:
        assert plan.experts is not None
        assert not plan.experts.is_ahead(1)
        assert plan.forecast is not None
        assert whole.forecast is not None
        assert plan.forecast.read_bytes < 0.3 * whole.forecast.read_bytes, "two of 32 experts, and what every token reads"
        lanes = {op.lane for op in build_pass(plan, plan.seats, Snapshot())[0].ops}
        assert Lane.ROUTER in lanes, "waiting for routers is in the forecast"


def test_where_all_experts_are_wanted_they_are_read_ahead() -> None:
    asked = mixture(150 * MIB, 1)
    plan = make_generation_plan(asked)
    assert plan.experts is not None
    assert plan.experts.is_ahead(500), "as a prompt wants them"
    for unit in (1, 4):
        assert plan.experts.touched(unit, 1) == pytest.approx(2)
        assert plan.experts.touched(unit, 3) == pytest.approx(32 * (1 - (1 - 2 / 32) ** 3))
    passes = {
        ahead: replace(plan, experts=replace(plan.experts, ahead_share=share)) for ahead, share in ((True, 0.0), (False, 1.0))
    }
    assert seconds(passes[False], asked) < seconds(passes[True], asked), "of one row few are wanted"


def coded(kind: str, ratio: float, by_experts: bool, device_bytes: int | None = None) -> GenerationQuestion:
    """A question of one row whose blocks, or experts, are coded, little of which fits into memory."""
    asked = mixture(170 * MIB, 1, device_bytes) if by_experts else question(156 * MIB, 1, device_bytes)
    block = asked.units[1]
    own = replace(block, stored_bytes=int(2 * ELEMENTS / ratio), decodes=((kind, ELEMENTS),))
    asked = replace(asked, units=(asked.units[0], *[own] * BLOCKS, asked.units[-1]))
    if (experts := asked.experts) is not None:
        size = int(experts.stored_bytes / ratio)
        how = {"stored_bytes": size, "is_made": True, "decodes": ((kind, experts.elements),)}
        asked = replace(asked, experts=replace(experts, **how))
    return asked


@pytest.mark.parametrize("by_experts", [False, True])
@pytest.mark.parametrize("device", [None, 80 * MIB])
def test_decoding_is_in_the_forecast(by_experts: bool, device: int | None) -> None:
    """A core decodes 8e7 weights of NVFP4 a second: that is the pass; and a profile that knows better is believed."""
    slow, fast = (coded(kind, 3.8, by_experts, device) for kind in ("nvfp4", "ternary"))
    found = {kind: make_generation_plan(asked) for kind, asked in (("nvfp4", slow), ("ternary", fast))}
    made = sum(unit.num_elements for unit in found["nvfp4"].units[1:-1]) / BLOCKS
    rate = slow.machine.make_bytes_per_second / 96 if device else 8e7
    assert found["nvfp4"].forecast is not None
    assert found["ternary"].forecast is not None
    assert found["nvfp4"].forecast.pass_seconds > made / rate
    assert found["ternary"].forecast.pass_seconds < 0.9 * found["nvfp4"].forecast.pass_seconds  # Python takes as long in both
    better = replace(slow, machine=replace(slow.machine, decoded_per_second={"nvfp4": 3e9}))
    again = make_generation_plan(better).forecast
    if device is None:
        assert again == make_generation_plan(replace(fast, machine=better.machine)).forecast, "as fast as another kind"
    else:
        assert again == found["nvfp4"].forecast, "the device's own figures count"


@pytest.mark.wide
@settings(max_examples=15)
@given(st.integers(90, 300), st.integers(0, 120), st.sampled_from([1, 5, 40]))
def test_of_mixtures_more_memory_is_never_slower(host_mib: int, more_mib: int, prompts: int) -> None:
    asked = mixture(host_mib * MIB, prompts)
    try:
        plan = make_generation_plan(asked)
    except PlanInfeasible:
        return
    more = mixture((host_mib + more_mib) * MIB, prompts)
    assert seconds(make_generation_plan(more), more) <= seconds(plan, asked) * 1.01


@pytest.mark.deep
@pytest.mark.parametrize("batch", [1, 64])
def test_qwen3_235b_on_a_card_of_24_gb_with_four_drives(batch: int, tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        hidden_size=4096,
        moe_intermediate_size=1536,
        num_hidden_layers=94,
        num_attention_heads=64,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        vocab_size=151936,
        max_position_embeddings=40960,
        dtype="bfloat16",
    )
    config.save_pretrained(tmp_path)
    machine, options = load_profile("rtx4090-4ssd"), GenerateOptions.of({"host_memory": "64GiB"})
    how = {"prompts": batch, "prompt_length": 512, "new_tokens": 128}
    plan = plan_generation(str(tmp_path / "config.json"), options, machine, here=False, **how)
    assert fits(plan)
    assert plan.experts is not None
    assert plan.experts.is_ahead(batch) == (batch == 64)
    assert plan.peak("device") < 24e9


def test_a_generation_is_planned_without_weights(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    words = ["plan", str(tmp_path), "--generate", "--prompt-length", "20", "--new-tokens", "8", "--batch", "3"]
    with pytest.raises(SystemExit) as left:
        main([*words, "--machine", "rtx4090-4ssd"])
    assert not left.value.code
    out = capsys.readouterr().out
    assert "3 prompts of up to 20 tokens" in out
    assert "rtx4090-4ssd" in out


def test_what_widening_takes_is_in_the_forecast() -> None:
    """A core widens 2.5 GB of weights a second; for few rows it multiplies 9 GB a second as they are."""
    here = nominal_machine(2, host_bytes=1 << 34, device_bytes=None, widens=True)  # weights come as memory gives them
    narrow = replace(question(1 << 30, 64), rows=1, seats=1, machine=here)
    few = replace(narrow, costs_of=lambda rows: replace(costs_of(rows), widens=True))
    many = replace(few, rows=8)
    one, other, last = (make_generation_plan(asked).forecast for asked in (narrow, few, many))
    assert one is not None
    assert other is not None
    assert last is not None
    weights, turn = 2 * BLOCKS * ELEMENTS, narrow.machine.turn_seconds
    assert one.pass_seconds - turn < weights / 9e9 / 2 < other.pass_seconds - turn
    assert weights / 2.5e9 / 2 < last.pass_seconds


@pytest.mark.wide
def test_a_plan_that_reads_says_what_twice_the_memory_would_give(tmp_path: Path) -> None:
    LlamaConfig(hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, dtype="bfloat16").save_pretrained(tmp_path)
    how = {"prompts": 1, "prompt_length": 64, "new_tokens": 8, "here": False}
    machine, model = load_profile("rtx4090-4ssd"), str(tmp_path / "config.json")
    plans = [
        plan_generation(
            model,
            GenerateOptions.of({"host_memory": size, "device_memory": "650MiB"}),
            machine,
            say_instead=size == "400MiB",
            **how,
        )
        for size in ("400MiB", "800MiB")
    ]
    few, many = (plan.forecast for plan in plans)
    assert few is not None
    assert many is not None
    assert few.read_bytes > many.read_bytes
    ways = {each.change: each for each in few.instead}
    twice = ways["twice the host memory (800 MiB)"]
    assert twice.forecast.pass_seconds == many.pass_seconds
    assert twice.options == {"host_memory": 800 << 20}
    (coded,) = (each for change, each in ways.items() if change.startswith("--compress int4"))
    assert coded.forecast.pass_seconds < few.pass_seconds / 1.1
    assert many.instead == ()
    assert f"instead  {twice.change}" in plans[0].brief()
