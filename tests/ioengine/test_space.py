"""What may be written to directories: part of what is free, once for each file system."""

import errno
import os
from pathlib import Path

import pytest

from headrace.ioengine import DirectFile, default_ssd_bytes
from headrace.plan.profiles import load_profile
from headrace.spec.errors import ConfigError, DiskFull, StorageError


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
