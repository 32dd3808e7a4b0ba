"""Directories are described and measured, and left as they were. Run: pytest tests/files/test_measured_directories.py"""

import dataclasses
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.files import (
    Bandwidth,
    DirectFile,
    describe_directory,
    file_systems,
    measure_directory,
    stripe_shares,
)
from headrace.plan.clock.machine_profiles import load_profile
from headrace.terms.errors import DiskFull, StorageError
from headrace.terms.machine.drives import striped_shares
from headrace.terms.sizes import MIB


def test_speeds_are_measured_and_nothing_stays(tmp_path: Path) -> None:
    measured = measure_directory(tmp_path, 4 * MIB)
    assert min(measured) > 1e5
    assert list(tmp_path.iterdir()) == []


def test_nothing_stays_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pwritev", fail)
    with pytest.raises(StorageError, match="Input/output error"):
        measure_directory(tmp_path, 4 * MIB)
    monkeypatch.setattr(os, "posix_fallocate", lambda *args: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space")))
    with pytest.raises(DiskFull):
        measure_directory(tmp_path, 4 * MIB)
    assert list(tmp_path.iterdir()) == []


def test_the_file_has_no_name_while_it_is_measured_so_that_a_killed_process_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[Path]] = []

    def looking(really: Callable[..., Any]) -> Callable[..., Any]:
        def look(*arguments: Any) -> Any:
            seen.append(list(tmp_path.iterdir()))
            return really(*arguments)

        return look

    for name in ("posix_fallocate", "pwritev", "preadv"):
        monkeypatch.setattr(os, name, looking(getattr(os, name)))
    measure_directory(tmp_path, 4 * MIB)
    # The read is one that tries whether O_DIRECT works, before there is any space taken.
    assert len(seen) > 3
    assert [found for found in seen[1:] if found] == []


def test_a_file_without_a_name_says_what_its_directory_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", lambda *args: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space")))
    with pytest.raises(DiskFull, match=f"needed, .* free in {tmp_path};"):
        DirectFile.nameless(tmp_path, 4 * MIB)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_is_described(tmp_path: Path) -> None:
    facts = describe_directory(tmp_path)
    assert facts.exists
    assert facts.is_directory
    assert facts.writable
    assert facts.free_bytes > 0
    assert facts.file_system
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_directory_is_described_without_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    missing, file = describe_directory(tmp_path / "nothing"), describe_directory(tmp_path / "file")
    assert (missing.exists, missing.is_directory, missing.writable) == (False, False, False)
    assert (file.exists, file.is_directory, file.writable) == (True, False, False)
    with pytest.raises(StorageError, match="cannot create a file"):
        measure_directory(tmp_path / "nothing", 4 * MIB)


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="no tmpfs at /dev/shm here")
def test_memory_is_told_from_a_drive() -> None:
    assert describe_directory(Path("/dev/shm")).in_memory


@pytest.mark.parametrize("systems", [(0, 0, 2), (0, 1, 0), (0, 1, 2), (0, 0, 0), (0, 1, 1)])
def test_stripes_go_by_drives_as_the_forecast_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, systems: tuple[int, ...]
) -> None:
    """However many directories lie on one of them: each is measured alone, and has the drive to itself then."""
    directories = [tmp_path / name for name in ("one", "two", "three")]
    for directory in directories:
        directory.mkdir()
    rig = load_profile("rtx4090-1ssd")
    rates = {system: 6e9 / (1 + system) for system in systems}
    drives = [dataclasses.replace(rig.drives[0], mixed_bytes_per_second=rates[system]) for system in systems]
    speeds = {directory: rates[system] for directory, system in zip(directories, systems, strict=True)}
    monkeypatch.setattr("headrace.files.directory_facts.file_systems", lambda found: systems)
    monkeypatch.setattr(
        "headrace.files.directory_facts.measure_directory", lambda found, size_bytes: Bandwidth(6e9, 6e9, speeds[found])
    )
    weights = stripe_shares(directories)
    assert weights is not None
    forecast = striped_shares(dataclasses.replace(rig, drives=tuple(drives)).of_directories(systems).drives)
    for system, share in zip(dict.fromkeys(systems), forecast, strict=True):
        on_it = sum(weight for weight, other in zip(weights, systems, strict=True) if other == system)
        assert on_it / sum(weights) == pytest.approx(share, abs=0.02)


def test_directories_of_one_file_system_are_known(tmp_path: Path) -> None:
    directories = [tmp_path / name for name in ("one", "two")]
    for directory in directories:
        directory.mkdir()
    assert file_systems(directories) == (0, 0)
    assert file_systems([tmp_path]) == (0,)
    assert file_systems([tmp_path, tmp_path / "nowhere"]) == (0, 1)  # refused later, by whoever needs it
    if os.path.ismount("/dev/shm") and os.stat("/dev/shm").st_dev != os.stat(tmp_path).st_dev:
        assert file_systems([directories[0], Path("/dev/shm"), directories[1]]) == (0, 1, 0)


def test_what_the_system_refuses_to_look_at_is_described_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = describe_directory(tmp_path / ("x" * 300))
    assert (facts.exists, facts.is_directory, facts.writable) == (False, False, False)
    assert facts.refusal == os.strerror(errno.ENAMETOOLONG)

    def closed(path: Path, **options: object) -> os.stat_result:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "stat", closed)
    assert describe_directory(tmp_path).refusal == os.strerror(errno.EACCES)


def test_mount_points_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drive = tmp_path / "süd\u00a0 1"
    drive.mkdir()
    escaped = str(drive).replace(" ", "\\040")  # as the kernel writes it
    known = f"36 35 98:0 / / rw - other root rw\n37 36 98:1 / {escaped} rw - named drive rw\n".encode()

    def read_bytes(path: Path) -> bytes:
        return known + b"38 36 98:2 / /not-\xff-utf-8 rw - third drive rw\n"

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    assert describe_directory(drive).file_system == "named"
    assert describe_directory(tmp_path).file_system == "other"
