"""What may be written to directories: part of what is free, once for each file system."""

import dataclasses
import errno
import os
from pathlib import Path

import pytest

from headrace.files import Beside, DirectFile, default_ssd_bytes, describe_directory, space
from headrace.plan.clock.machine_profiles import load_profile
from headrace.terms.errors import ConfigError, DiskFull, StorageError


def test_a_machine_that_is_not_here_is_taken_by_its_profile() -> None:
    rig = load_profile("rtx4090-1ssd")
    assert default_ssd_bytes(rig, ()) == int(0.9 * rig.drives[0].capacity_bytes)


def test_space_is_what_is_free_less_a_tenth(tmp_path: Path) -> None:
    status = os.statvfs(tmp_path)
    assert default_ssd_bytes(None, (tmp_path,)) == pytest.approx(0.9 * status.f_bavail * status.f_frsize, rel=0.05)


def test_space_of_one_file_system_is_counted_once(tmp_path: Path) -> None:
    directories = [tmp_path / name for name in ("one", "two", "three")]
    for directory in directories:
        directory.mkdir()
    for rig in (None, load_profile("rtx4090-4ssd")):
        assert default_ssd_bytes(rig, directories) == pytest.approx(default_ssd_bytes(rig, [tmp_path]), rel=0.05)


@pytest.mark.parametrize(
    ("systems", "free", "halves", "thirds"), [((0, 0, 2), (40, 40, 50), 80, 75), ((0, 1, 0), (40, 30, 40), 60, 45)]
)
def test_space_goes_by_the_stripes_of_each_drive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, systems: tuple[int, ...], free: tuple[int, ...], halves: int, thirds: int
) -> None:
    """Two equal drives get half of the stripes each, also where two directories lie on one; else one and two thirds."""
    directories = [tmp_path / name for name in ("one", "two", "three")]
    for directory in directories:
        directory.mkdir()
    described = {
        directory: dataclasses.replace(describe_directory(directory), free_bytes=num_bytes << 30)
        for directory, num_bytes in zip(directories, free, strict=True)
    }
    monkeypatch.setattr(space, "describe_directory", described.__getitem__)
    monkeypatch.setattr(space, "file_systems", lambda found: systems)
    for rig in (None, load_profile("rtx4090-4ssd").of_directories(systems)):
        assert default_ssd_bytes(rig, directories) == pytest.approx(0.9 * (halves << 30), rel=1e-6)
    rig = load_profile("rtx4090-1ssd")
    faster = dataclasses.replace(rig.drives[0], mixed_bytes_per_second=2 * rig.drives[0].mixed_bytes_per_second)
    uneven = dataclasses.replace(rig, drives=(rig.drives[0], faster))
    assert default_ssd_bytes(uneven, directories) == pytest.approx(0.9 * (thirds << 30), rel=1e-6)


@pytest.mark.parametrize(("num_bytes", "allowed"), [(5, 90), (10, 90), (30, 70), (100, 0), (200, 0)])
def test_what_will_lie_beside_the_state_takes_the_rest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int, allowed: int
) -> None:
    described = dataclasses.replace(describe_directory(tmp_path), free_bytes=100 << 30)
    monkeypatch.setattr(space, "describe_directory", lambda directory: described)
    beside = Beside("the model", tmp_path / "runs" / "final", num_bytes << 30)
    assert default_ssd_bytes(None, [tmp_path], beside=beside) == pytest.approx(allowed << 30, rel=1e-9)
    elsewhere = tmp_path.stat().st_dev + 1
    monkeypatch.setattr(Beside, "device", property(lambda self: elsewhere))
    assert default_ssd_bytes(None, [tmp_path], beside=beside) == 90 << 30


def test_a_directory_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="are the same directory"):
        default_ssd_bytes(None, [tmp_path, tmp_path / "." / ".." / tmp_path.name])


def test_where_there_is_no_space_only_a_runs_own_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it: it is reserved already, whatever else a drive may keep free."""

    def full(directory: Path, num_bytes: int) -> None:
        try:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        except OSError as error:
            raise DiskFull("full") from error

    monkeypatch.setattr(DirectFile, "nameless", full)
    assert default_ssd_bytes(None, [tmp_path], held_bytes=1000) == 1000
    with pytest.raises(StorageError, match="no space; free some"):
        default_ssd_bytes(None, [tmp_path])


def test_nothing_is_known_of_space_without_directory_and_profile() -> None:
    assert default_ssd_bytes(None, ()) is None


def test_what_cannot_be_looked_at_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="File name too long; name another --ssd"):
        default_ssd_bytes(None, [tmp_path / ("x" * 300)])
