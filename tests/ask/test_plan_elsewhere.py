"""A plan for ceilings that are given asks nothing of the host that it is made on: every host makes the same plan."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from planned_models import llama_small, saved

from headrace.ask import place
from headrace.ask.answer import plan_model
from headrace.ask.plan_report import PlanReport
from headrace.machine import cpu, limits
from headrace.model.costs import cost_meter
from headrace.plan.clock.machine_profiles import load_profile
from headrace.plan.clock.nominal import nominal_machine
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.options.options import Options
from headrace.terms.sizes import GIB, MIB

Host = Callable[[pytest.MonkeyPatch], None]


def small_and_old(patch: pytest.MonkeyPatch) -> None:
    """One core without products of 16-bit numbers, little memory, ordinary pages, and a process that has loaded nothing."""
    patch.setattr(cpu, "processor_flags", lambda: frozenset({"avx2"}))
    patch.setattr(torch, "get_num_threads", lambda: 1)
    patch.setattr(limits, "available_memory_bytes", lambda *root: 200 * MIB)
    patch.setattr(place, "anonymous_bytes", lambda: 60 * MIB)
    patch.setattr(cost_meter, "_allocates_huge_pages", lambda: False)


def large_and_new(patch: pytest.MonkeyPatch) -> None:
    """Many cores with every instruction, much memory, huge pages, a process that has loaded much, and a GPU, nearly full."""
    patch.setattr(cpu, "processor_flags", lambda: frozenset({"avx512_bf16", "avx512_fp16"}))
    patch.setattr(torch, "get_num_threads", lambda: 96)
    patch.setattr(limits, "available_memory_bytes", lambda *root: 900 * GIB)
    patch.setattr(place, "anonymous_bytes", lambda: 3 * GIB)
    patch.setattr(cost_meter, "_allocates_huge_pages", lambda: True)
    patch.setattr(place, "torch", _TorchWithGpu)


class _TorchWithGpu:
    """What of torch plans ask about a GPU."""

    get_num_threads = torch.get_num_threads

    class cuda:
        @staticmethod
        def is_available() -> bool:
            return True

        @staticmethod
        def mem_get_info() -> tuple[int, int]:
            return 2 * GIB, 8 * GIB


def cpu_machine() -> Ceilings:
    return replace(nominal_machine(4, host_bytes=8 * GIB, device_bytes=None), name="a CPU", fresh_pages_share=0.75)


@pytest.mark.wide
@pytest.mark.parametrize("machine", [lambda: load_profile("rtx4090-1ssd"), cpu_machine], ids=["gpu", "cpu"])
def test_every_host_makes_the_same_plan_for_given_ceilings(machine: Callable[[], Ceilings], tmp_path: Path) -> None:
    model, ceilings = saved(tmp_path / "model", llama_small(), num_hidden_layers=2), machine()

    def asked(host: Host) -> PlanReport:
        with pytest.MonkeyPatch.context() as patch:
            host(patch)
            lengths = {"tokens_per_step": 256, "sequence_length": 256}
            return plan_model(model, Options(host_memory="600MiB", machine=ceilings, max_grad_norm=None, **lengths), here=False)

    first, other = asked(small_and_old), asked(large_and_new)
    assert first.fits
    assert other.plan == first.plan
    assert other.to_json() == first.to_json()


@pytest.mark.wide
def test_a_profile_says_what_its_processor_multiplies_in_float32(tmp_path: Path) -> None:
    """No library keeps code of products of 16 bits for it: that is another footprint."""
    model, ceilings = saved(tmp_path / "model", llama_small(), num_hidden_layers=2), cpu_machine()

    def libraries(machine: Ceilings) -> int:
        lengths = {"tokens_per_step": 256, "sequence_length": 256}
        found = plan_model(model, Options(machine=machine, max_grad_norm=None, **lengths), here=False)
        assert found.plan is not None
        return found.plan.results.peak_bytes["host"]["libraries"]

    assert libraries(replace(ceilings, widened_dtypes=("bfloat16",))) < libraries(ceilings)
