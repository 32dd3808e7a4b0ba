"""Default budgets: parts of what is free, and never beyond a limit."""

from dataclasses import replace
from pathlib import Path

import pytest

from headrace.machine import available_memory_bytes, cuda, limits
from headrace.plan.profiles import load_profile
from headrace.planning import allowances, default_device_bytes, default_host_bytes, default_ssd_bytes
from headrace.planning.allowances import default_device_overhead_bytes
from headrace.spec.errors import ConfigError


def test_a_machine_that_is_not_here_is_taken_by_its_profile() -> None:
    rig = load_profile("rtx4090-1ssd")
    assert default_host_bytes(rig, here=False) == int(0.7 * rig.host_memory_bytes)
    assert default_device_bytes(rig, here=False) == int(0.9 * rig.device_memory_bytes)
    assert default_ssd_bytes(rig, ()) == int(0.9 * rig.drives[0].capacity_bytes)


def test_here_it_is_what_is_available() -> None:
    assert default_host_bytes(load_profile("h100-1ssd"), here=True) == pytest.approx(0.7 * available_memory_bytes(), rel=0.1)


def test_under_wsl_no_more_than_can_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allowances.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(limits, "available_memory_bytes", lambda root: 1000)
    monkeypatch.setattr(limits, "pinnable_memory_bytes", lambda root: 500)
    assert default_host_bytes(None, here=True) == 500


def test_space_is_what_is_free_less_a_tenth(tmp_path: Path) -> None:
    import os

    status = os.statvfs(tmp_path)
    assert default_ssd_bytes(None, (tmp_path,)) == pytest.approx(0.9 * status.f_bavail * status.f_frsize, rel=0.05)


def test_space_of_one_file_system_is_counted_once(tmp_path: Path) -> None:
    directories = [tmp_path / name for name in ("one", "two", "three")]
    for directory in directories:
        directory.mkdir()
    for rig in (None, load_profile("rtx4090-4ssd")):
        assert default_ssd_bytes(rig, directories) == pytest.approx(default_ssd_bytes(rig, [tmp_path]), rel=0.05)


def test_a_directory_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="are the same directory"):
        default_ssd_bytes(None, [tmp_path, tmp_path / "." / ".." / tmp_path.name])


def test_nothing_is_known_of_space_without_directory_and_profile() -> None:
    assert default_ssd_bytes(None, ()) is None


def test_what_libraries_take_of_a_gpu_is_what_the_machine_counts() -> None:
    rig = load_profile("rtx4090-1ssd")
    assert default_device_overhead_bytes(rig, here=False) == cuda.GPU_OVERHEAD_BYTES
    assert default_device_overhead_bytes(replace(rig, has_device=False, device_memory_bytes=0), here=False) == 0
