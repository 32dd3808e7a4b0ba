"""An exported directory appears whole, is on the drive when it does, and leaves nothing beside it. Links and mount points too.

Run: pytest tests/model/test_export_directory.py
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from saved_models import import_all, save

from headrace.files.durable import appearing, is_mount_point
from headrace.model import Exporter
from headrace.terms.errors import ExportFailed


@pytest.fixture
def exporter(tmp_path: Path) -> Callable[[Path], Exporter]:
    directory, _ = save(tmp_path)
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool.jinja").write_text("{{ messages }}")
    checkpoint, chain, planes, _ = import_all(directory, "bfloat16")
    return lambda out: Exporter(checkpoint, chain, out, lambda unit: planes[unit], shard_bytes=20000)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_every_file_is_on_the_drive_before_the_directory_appears(
    tmp_path: Path, exporter: Callable[[Path], Exporter], monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[str] = set()
    waiting: list[str] = []
    really_sync, really_replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        really_sync(descriptor)
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))

    def replace(source: Path, target: Path) -> None:
        waiting.extend(str(path) for path in [source, *Path(source).rglob("*")] if str(path) not in synced)
        really_replace(source, target)
        synced.clear()

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    out = exporter(tmp_path / "out").write()
    assert {"config.json", "model.safetensors.index.json", "additional_chat_templates"} < names(out)
    assert waiting == []
    assert synced == {str(tmp_path)}  # after it: its name


def killed_export(out: Path) -> None:
    """A process is killed while it writes a model."""
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom headrace.files.durable import appearing\n"
        "with appearing(Path(sys.argv[1])) as partial:\n"
        "    (partial / 'model.safetensors').write_bytes(b'half')\n    os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(out)], check=False).returncode == -signal.SIGKILL


@pytest.mark.process
def test_what_a_killed_export_left_is_removed_by_the_next(tmp_path: Path, exporter: Callable[[Path], Exporter]) -> None:
    killed_export(tmp_path / "out")
    killed_export(tmp_path / "outer")
    (tmp_path / ".out.partial-notes").write_text("somebody's")
    assert sum(name.startswith(".out.partial-") for name in names(tmp_path)) == 2
    exporter(tmp_path / "out").write()
    (other,) = tmp_path.glob(".outer.partial-*")
    assert names(tmp_path) == {"model", "out", ".out.partial-notes", other.name}


def test_an_export_that_lives_is_left_alone(tmp_path: Path, exporter: Callable[[Path], Exporter]) -> None:
    def write_twice() -> None:
        with appearing(tmp_path / "out") as living:
            (living / "mine").write_text("")
            exporter(tmp_path / "out").write()
            assert names(living) == {"mine"}

    with pytest.raises(OSError, match="not empty"):  # the other one was quicker
        write_twice()
    assert names(tmp_path) == {"model", "out"}
    assert "config.json" in names(tmp_path / "out")


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_is_followed(tmp_path: Path, exporter: Callable[[Path], Exporter], exists: bool) -> None:
    drive = tmp_path / "drive"
    drive.mkdir()
    (tmp_path / "out").symlink_to(drive / "here")
    if exists:
        (drive / "here").mkdir()
    assert exporter(tmp_path / "out").write() == tmp_path / "out"
    assert (tmp_path / "out").is_symlink()
    assert names(drive) == {"here"}
    assert "config.json" in names(drive / "here")


def test_a_mount_point_is_refused_before_anything_is_written(
    tmp_path: Path, exporter: Callable[[Path], Exporter], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "drive").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "drive")
    monkeypatch.setattr("headrace.model.written.export.is_mount_point", lambda path: path == tmp_path / "drive")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ExportFailed, match=r"out: it is a mount point.*choose a directory inside it"):
        exporter(tmp_path / "out").write()
    assert sorted(tmp_path.rglob("*")) == before


def test_mount_points_are_known(tmp_path: Path) -> None:
    assert is_mount_point(Path("/proc"))
    assert is_mount_point(Path("/"))
    assert not is_mount_point(tmp_path)
    assert not is_mount_point(tmp_path / "nothing")
