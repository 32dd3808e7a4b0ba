"""Questions: one figure for what libraries take, budgets that the machine has, and variants that it could give.

Run: pytest tests/ask/test_question.py
"""

from dataclasses import replace
from pathlib import Path

import pytest
from planned_models import llama_small, saved
from transformers import Qwen3MoeConfig

from headrace.ask import place
from headrace.ask.answer import plan_model
from headrace.ask.place import KEPT_PRODUCTS_BYTES, runtime_bytes, runtime_here
from headrace.generate.passes.asked import plan_generation
from headrace.machine.cpu import CpuMachine
from headrace.machine.limits import machine_memory_bytes
from headrace.plan.clock.machine_profiles import load_profile
from headrace.terms.errors import ConfigError
from headrace.terms.options.generate_options import GenerateOptions
from headrace.terms.options.options import Options
from headrace.terms.sizes import GIB, MIB

STEP = {"tokens_per_step": 1024, "sequence_length": 512}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("model") / "small", llama_small())


def test_what_a_process_did_before_does_not_count() -> None:
    assert len({runtime_bytes(measured * MIB) for measured in (60, 281, 303, 339)}) == 1
    assert runtime_bytes(339 * MIB) >= 339 * MIB
    assert runtime_bytes(3 * GIB) >= 3 * GIB  # a program that holds more than any run of the command


def test_a_build_for_gpus_takes_more(monkeypatch: pytest.MonkeyPatch) -> None:
    builds = []
    for version in (None, "12.8"):
        monkeypatch.setattr(place.torch.version, "cuda", version)
        builds.append(runtime_bytes(0))
    assert builds[1] == builds[0] + 140 * MIB


@pytest.mark.parametrize(
    ("mixture", "dtype", "multiplies", "kept"),
    [
        (True, "bfloat16", True, KEPT_PRODUCTS_BYTES),
        pytest.param(True, "bfloat16", False, 0, marks=pytest.mark.wide),
        pytest.param(True, "float32", True, 0, marks=pytest.mark.wide),
        (False, "bfloat16", True, 0),
    ],
)
def test_plans_count_the_products_that_onednn_keeps_of_a_mixture(
    mixture: bool, dtype: str, multiplies: bool, kept: int, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of training and of generation: experts get another number of tokens each time, so its cache is full."""
    monkeypatch.setattr(CpuMachine, "multiplies", lambda self, asked: multiplies)
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
    }
    model = saved(tmp_path / "mixture", Qwen3MoeConfig(**sizes, num_attention_heads=4)) if mixture else small
    plain, budget = runtime_here(), {"host_memory": "4GiB", "compute_dtype": dtype}
    asked = {"prompts": 2, "prompt_length": 8, "new_tokens": 8}
    training = plan_model(model, Options(**STEP, **budget)).plan
    generation = plan_generation(str(model), GenerateOptions(**budget), None, here=True, **asked)
    assert training is not None
    for plan in (training, generation):
        assert plan.results.peak_bytes["host"]["runtime"] == plain + kept


@pytest.mark.parametrize("tier", ["host", "device"])
def test_more_than_the_machine_has_is_refused(small: Path, tier: str) -> None:
    rig = load_profile("rtx4090-1ssd")
    most = {"host": rig.host_memory_bytes, "device": rig.device_memory_bytes}[tier]
    with pytest.raises(
        ConfigError, match=rf"{tier} memory: .* given, rtx4090-1ssd has .*; give less, or leave {tier}_memory out"
    ):
        plan_model(small, Options(machine=rig, **{f"{tier}_memory": most + 1}, **STEP), here=False)
    with pytest.raises(ConfigError, match=r"host memory: .* given, this machine has"):
        plan_model(small, Options(host_memory=machine_memory_bytes() + 1, **STEP))


@pytest.mark.wide
def test_no_variant_asks_for_more_than_the_machine_can_give(small: Path) -> None:
    """A card of 24 GiB has less than that for a run: what needs 24 GiB is not helped by being told to take them."""
    rig = load_profile("rtx4090-1ssd")
    needed = plan_model(small, Options(machine=rig, device_memory="1MiB", **STEP), here=False).needed_bytes["device"]
    for card, offered in ((2 * needed, True), (needed + MIB, False)):
        found = plan_model(
            small, Options(machine=replace(rig, device_memory_bytes=card), device_memory="1MiB", **STEP), here=False
        )
        assert not found.fits
        asked = [each.options["device_memory"] for each in found.alternatives if "device_memory" in each.options]
        assert bool(asked) == offered
        assert all(size <= 0.9 * card for size in asked)
