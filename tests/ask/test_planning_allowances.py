"""Default budgets: parts of what is free, and never beyond a limit."""

from dataclasses import replace

import pytest

from headrace.ask import place
from headrace.ask.place import default_device_bytes, default_device_overhead_bytes, default_host_bytes
from headrace.machine import cuda, limits
from headrace.machine.limits import available_memory_bytes
from headrace.plan.clock.machine_profiles import load_profile


def test_a_machine_that_is_not_here_is_taken_by_its_profile() -> None:
    rig = load_profile("rtx4090-1ssd")
    assert default_host_bytes(rig, here=False) == int(0.7 * rig.host_memory_bytes)
    assert default_device_bytes(rig, here=False) == int(0.9 * rig.device_memory_bytes)


def test_here_it_is_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    available = available_memory_bytes()  # as other processes come and go, it is another the next time
    monkeypatch.setattr(limits, "available_memory_bytes", lambda root: available)
    assert default_host_bytes(load_profile("h100-1ssd"), here=True) == pytest.approx(0.7 * available, rel=1e-6)


def test_under_wsl_no_more_than_can_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(limits, "available_memory_bytes", lambda root: 1000)
    monkeypatch.setattr(limits, "pinnable_memory_bytes", lambda root: 500)
    assert default_host_bytes(None, here=True) == 500


def test_what_libraries_take_of_a_gpu_is_what_the_machine_counts() -> None:
    rig = load_profile("rtx4090-1ssd")
    assert default_device_overhead_bytes(rig, here=False) == cuda.GPU_OVERHEAD_BYTES
    assert default_device_overhead_bytes(replace(rig, has_device=False, device_memory_bytes=0), here=False) == 0
