"""Bad directories, locks, manifests and leftovers: one clear message each, before anything is made.

Run: pytest tests/store/test_directories.py
"""

import contextlib
import dataclasses
import errno
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from store_world import LAYOUTS, UNITS, holds_step, ignore, make_store, open_store, write_step

from headrace.files import Beside, BlockFile
from headrace.store import RunLock, StateStore, find_leftovers, lock_holder, open_direct, read_manifest, remove_leftover
from headrace.terms.errors import ConfigError, DiskFull, HeadraceError, RunDirectoryError, StorageError
from headrace.terms.events import Event, Notice
from headrace.terms.families import Unit


def files_under(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def refused(tmp_path: Path, error: type[HeadraceError], match: str, **changes: object) -> None:
    for name in ("ssd0", "ssd1"):
        (tmp_path / name).mkdir(exist_ok=True)
    before = files_under(tmp_path)
    with pytest.raises(error, match=match):
        make_store(tmp_path, **changes)
    assert files_under(tmp_path) == before


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    refused(
        tmp_path, ConfigError, "nothing: SSD directory does not exist", directories=[tmp_path / "ssd0", tmp_path / "nothing"]
    )


def test_no_directory_and_wrong_weights_are_refused(tmp_path: Path) -> None:
    refused(tmp_path, ConfigError, "no SSD directory given", directories=[], weights=None)
    refused(tmp_path, ConfigError, "2 SSD directories and 3 striping weights", weights=[1, 1, 1])
    refused(tmp_path, StorageError, r"expected one integer >= 1 per file, found \[1, 0\]", weights=[1, 0])


def test_a_file_in_place_of_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(tmp_path, ConfigError, "expected a directory, found a file", directories=[tmp_path / "ssd0", tmp_path / "file"])


def test_a_directory_named_twice_is_refused_even_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "ssd0").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "ssd0")
    for twin in (tmp_path / "ssd0", tmp_path / "link", tmp_path / "ssd0" / ".." / "ssd0"):
        refused(tmp_path, ConfigError, "are the same directory", directories=[tmp_path / "ssd0", twin])


def test_a_read_only_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really = os.open

    def read_only(path: object, flags: int, *rest: int) -> int:
        if flags & os.O_CREAT and tmp_path in Path(str(path)).parents:
            raise OSError(errno.EROFS, "Read-only file system")
        return really(str(path), flags, *rest)

    monkeypatch.setattr(os, "open", read_only)  # permissions do not bind a superuser
    refused(tmp_path, ConfigError, r"cannot be written to \(Read-only file system\)")


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="no tmpfs at /dev/shm here")
def test_memory_is_refused_unless_allowed_and_then_warned_of(tmp_path: Path) -> None:
    folder = Path("/dev/shm") / f"headrace-test-{os.getpid()}"
    folder.mkdir()
    try:
        refused(tmp_path, ConfigError, "tmpfs lies in memory", directories=[folder], weights=None, allow_tmpfs=False)
        events: list[Event] = []
        with make_store(tmp_path, directories=[folder], weights=None, sink=events.append) as store:
            write_step(store, 1)
            store.commit({"step": 1})
        assert any(isinstance(event, Notice) and "lies in memory" in event.text for event in events)
        with open_store(tmp_path) as store:
            assert holds_step(store, 1)
            store.remove()
    finally:
        shutil.rmtree(folder)


def test_too_little_space_names_needed_and_free_for_each_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(tmp_path, DiskFull, r"ssd0: .*TiB needed, .* free; .*ssd1: .*TiB needed", scratch_bytes=1 << 60)
    # Both together do not fit on the file system that they share, though each alone would.
    real = os.statvfs

    def small(path: object) -> os.statvfs_result:
        fields = list(real(path))  # type: ignore[arg-type]
        fields[0:2], fields[4] = [4096, 4096], 40
        return os.statvfs_result(fields)

    monkeypatch.setattr(os, "statvfs", small)
    refused(tmp_path, DiskFull, "the state needs", scratch_bytes=4096)


@pytest.mark.parametrize("same", [True, False])
def test_what_will_lie_beside_the_state_has_space_besides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: bool) -> None:
    """On the file system of the state with what that takes, on another one without."""
    free_bytes, real, where = 1 << 30, os.stat, tmp_path / "elsewhere"
    where.mkdir()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2 * free_bytes, free_bytes, free_bytes))
    if not same:
        fields = list(real(where))
        fields[2] += 1  # its device
        other = os.stat_result(fields)
        monkeypatch.setattr(os, "stat", lambda path, **rest: other if path == where else real(path, **rest))
    state = r", and the state [\d.]+ KiB on the same file system" if same else ""
    beside = Beside("the finished model", where / "run" / "final", free_bytes + 1)
    words = rf"^{where}/run/final: the finished model needs 1 GiB there{state}; free are 1 GiB; free some space, or name"
    refused(tmp_path, DiskFull, words, beside=beside)
    fits = replace(beside, num_bytes=free_bytes)
    if same:
        refused(tmp_path, DiskFull, words, beside=fits)
        fits = replace(beside, num_bytes=free_bytes - (1 << 20))
    make_store(tmp_path, beside=fits).close()


def test_unit_sizes_are_checked_first(tmp_path: Path) -> None:
    (weights, *rest) = UNITS[0].families
    odd = Unit("prologue", (dataclasses.replace(weights, borders=(0, 1000, weights.layout.num_elements)), *rest))
    refused(tmp_path, ConfigError, "ends at element 1000; expected a multiple of 2048", units=(odd, UNITS[1]))


@pytest.mark.parametrize("failing", ["ssd0", "ssd1", "commit.0", "commit.1", "state.json"])
def test_a_creation_that_fails_midway_removes_what_it_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def open_file(path: Path, create_bytes: int | None) -> BlockFile:
        if failing in path.parts:
            raise DiskFull(f"{path}: {create_bytes} bytes needed, 0 bytes free")
        return open_direct(path, create_bytes)

    if failing == "state.json":
        monkeypatch.setattr("headrace.store.assembly.write_manifest", lambda *args: open_file(Path(failing), 0))
    refused(tmp_path, DiskFull, failing, open_file=open_file)
    assert lock_holder(tmp_path / "run") is None


STEPS = [("write_whole", "state.json.new"), ("Path.rename", "state.json"), ("sync", "state.json")]


@pytest.mark.parametrize(("reason", "error"), [(errno.ENOSPC, DiskFull), (errno.EIO, StorageError)])
@pytest.mark.parametrize(("step", "name"), STEPS)
def test_a_manifest_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, name: str, reason: int, error: type[StorageError]
) -> None:
    def failing(*rest: object) -> None:
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(f"headrace.store.manifest.{step}", failing)
    refused(tmp_path, error, rf"run/{name}: cannot be written \({os.strerror(reason)}\); ")


def test_a_manifest_that_cannot_be_withdrawn_keeps_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(tmp_path)
    write_step(store, 1)
    store.commit({"step": 1})

    def read_only(self: Path, target: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", read_only)
        with pytest.raises(StorageError, match=r"run/state.json: cannot be renamed \(Read-only file system\); "):
            store.remove()
    with open_store(tmp_path) as store:
        assert holds_step(store, 1)


def test_an_identity_that_is_not_json_leaves_nothing(tmp_path: Path) -> None:
    for name in ("ssd0", "ssd1"):
        (tmp_path / name).mkdir()
    before = files_under(tmp_path)
    with pytest.raises(TypeError):
        make_store(tmp_path, identity={"model": object()})
    assert files_under(tmp_path) == before


def test_a_run_directory_with_a_run_is_refused(tmp_path: Path) -> None:
    make_store(tmp_path).close()
    refused(tmp_path, RunDirectoryError, "holds a run already")


def test_two_directories_on_one_file_system_are_noted(tmp_path: Path) -> None:
    events: list[Event] = []
    make_store(tmp_path, sink=events.append).close()
    assert any(isinstance(event, Notice) and "same file system" in event.text for event in events)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nothing"):
        before = files_under(tmp_path)
        with pytest.raises(RunDirectoryError, match=r"no run of Headrace, state\.json is missing"):
            StateStore.open(folder, sink=ignore)
        assert files_under(tmp_path) == before


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda fields: {**fields, "format": 99}, "format 99, this version reads format 2"),
        (lambda fields: {**fields, "format": 1}, "format 1, this version reads format 2; use the version that wrote it"),
        (lambda fields: [], "format None"),
        (lambda fields: {key: value for key, value in fields.items() if key != "units"}, "damaged, KeyError"),
        (lambda fields: {**fields, "units": {"layouts": [1], "units": []}}, "damaged, TypeError"),
    ],
)
def test_another_format_or_a_damaged_manifest_is_refused(tmp_path: Path, change, match: str) -> None:
    make_store(tmp_path).close()
    path = tmp_path / "run" / "state.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(RunDirectoryError, match=match):
        open_store(tmp_path)
    path.write_text("{")
    with pytest.raises(RunDirectoryError, match="cannot be read as JSON"):
        open_store(tmp_path)


def test_the_manifest_survives_the_file(tmp_path: Path) -> None:
    with make_store(tmp_path) as store:
        found = read_manifest(tmp_path / "run")
        assert found == replace(store.manifest, identity=dict(store.manifest.identity))
        assert (found.units, found.layouts, found.chunk_elements) == (UNITS, LAYOUTS, 2048)


def test_missing_and_short_data_files_are_named(tmp_path: Path) -> None:
    with make_store(tmp_path) as store:
        write_step(store, 1)
        store.commit({"step": 1})
        path = store.manifest.data_paths()[1]
    size = path.stat().st_size
    os.truncate(path, size - 4096)
    with pytest.raises(RunDirectoryError, match=rf"{path} has {size - 4096} bytes .* expected {size}"):
        open_store(tmp_path)
    path.unlink()
    with pytest.raises(RunDirectoryError, match=f"its data file {path} is missing"):
        open_store(tmp_path)
    assert lock_holder(tmp_path / "run") is None


def test_a_second_store_is_refused_with_the_holder(tmp_path: Path) -> None:
    with make_store(tmp_path) as store:
        write_step(store, 1)
        store.commit({"step": 1})
        with pytest.raises(RunDirectoryError, match=f"in use by process {os.getpid()}"):
            open_store(tmp_path)
        assert holds_step(store, 1)
    open_store(tmp_path).close()


@pytest.mark.process
def test_the_lock_goes_with_the_process(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom headrace.store.lock import RunLock\n"
        "lock = RunLock(Path(sys.argv[1]))\nprint('held', flush=True)\ntime.sleep(60)"
    )
    with make_store(tmp_path) as store:
        store.commit({})
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "run")], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        assert lock_holder(tmp_path / "run") == process.pid
        with pytest.raises(RunDirectoryError, match=f"in use by process {process.pid}"):
            open_store(tmp_path)
        process.kill()
    open_store(tmp_path).close()


def test_leftovers_are_listed_and_removed_and_living_runs_are_not(tmp_path: Path) -> None:
    (tmp_path / "ssd0" / "headrace-notes").mkdir(parents=True)  # somebody else's
    directories = [tmp_path / "ssd0"]
    with make_store(tmp_path, directories=directories, weights=None) as store:
        assert find_leftovers(directories) == []
        path = store.manifest.data_paths()[0]
    (found,) = find_leftovers(directories)
    assert (found.folder, found.run_directory, found.resumable) == (path.parent, (tmp_path / "run").resolve(), True)
    assert found.num_bytes == path.stat().st_size
    with make_store(tmp_path / "ssd0", directories=[tmp_path / "ssd1"], weights=None):
        assert len(find_leftovers([*directories, tmp_path / "ssd1"])) == 1
    (tmp_path / "run" / "state.json").unlink()
    (found,) = find_leftovers(directories)
    assert not found.resumable
    remove_leftover(found)
    assert find_leftovers(directories) == []
    assert [entry.name for entry in (tmp_path / "ssd0").iterdir() if entry.name.startswith("headrace")] == ["headrace-notes"]


def test_a_leftover_that_was_taken_up_again_stays(tmp_path: Path) -> None:
    with make_store(tmp_path) as store:
        store.commit({})
    found = find_leftovers([tmp_path / "ssd0"])[0]
    with open_store(tmp_path) as store:
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
            remove_leftover(found)
        store.verify()


@pytest.fixture
def network_drive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drives of NFS or FUSE: a file that is unlinked while it is open takes a hidden name, and goes when it is closed."""
    really_close = os.close

    def unlink(self: Path, missing_ok: bool = False) -> None:
        opened = []
        for descriptor in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                opened.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        if str(self.resolve()) in opened:
            os.rename(self, self.with_name(f".nfs{self.name}"))
            return
        with contextlib.suppress(*[FileNotFoundError] * missing_ok):
            os.unlink(self)

    def close(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        really_close(descriptor)
        if name.name.startswith(".nfs"):
            os.unlink(name)

    monkeypatch.setattr(Path, "unlink", unlink)
    monkeypatch.setattr(os, "close", close)


@pytest.mark.usefixtures("network_drive")
def test_a_store_on_network_drives_is_removed_whole(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.remove()
    assert files_under(tmp_path) == ["run", "ssd0", "ssd1"]


@pytest.mark.usefixtures("network_drive")
def test_leftovers_on_network_drives_are_removed_whole(tmp_path: Path) -> None:
    make_store(tmp_path).close()
    for each in find_leftovers([tmp_path / "ssd0", tmp_path / "ssd1"]):
        remove_leftover(each)
    assert not list(tmp_path.glob("ssd*/*"))


def test_what_cannot_be_removed_keeps_nothing_else_and_is_named_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(tmp_path)
    held, really = store.manifest.data_paths()[0], Path.unlink

    def unlink(self: Path, missing_ok: bool = False) -> None:
        if self == held:
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        really(self, missing_ok=missing_ok)

    named = rf"^{held}: cannot be removed: Permission denied"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", unlink)
        with pytest.raises(StorageError, match=rf"{named}; .*headrace clean {tmp_path / 'ssd0'}"):
            store.remove()
        assert list((tmp_path / "ssd1").iterdir()) == []
        (found,) = find_leftovers([tmp_path / "ssd0"])
        assert (found.resumable, found.in_doubt) == (False, False)
        with pytest.raises(StorageError, match=named):
            remove_leftover(found)
    (held.parent / "photo").write_text("somebody else's")
    with pytest.raises(StorageError, match=rf"^{held.parent}: cannot be removed: Directory not empty"):
        remove_leftover(found)
    assert [path.name for path in held.parent.iterdir()] == ["photo"]


@pytest.mark.parametrize("made", [True, False])
def test_a_creation_that_comes_second_takes_nothing_from_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: bool
) -> None:
    """Both find no run directory; this one makes it, the other is the first to lock it."""
    first: list[RunLock] = []
    mkdir = Path.mkdir

    def mkdir_and_lose(path: Path, *rest: Any, **options: Any) -> None:
        mkdir(path, *rest, **options)
        if path == tmp_path / "run":
            first.append(RunLock(path))
            if made:
                (path / "precious").touch()

    monkeypatch.setattr(Path, "mkdir", mkdir_and_lose)
    with pytest.raises(RunDirectoryError, match=f"in use by process {os.getpid()}"):
        make_store(tmp_path)
    assert lock_holder(tmp_path / "run") == os.getpid()
    first[0].release()


def test_a_run_directory_that_cannot_be_locked_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("headrace.store.lock.fcntl.flock", no_locks)
    refused(tmp_path, RunDirectoryError, "cannot be locked")


def test_what_a_failed_creation_could_not_remove_is_dead_and_goes_as_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink = Path.unlink

    def refusing(path: Path, missing_ok: bool = False) -> None:
        if path.name == "data" and tmp_path / "ssd0" in path.parents:
            raise OSError(errno.EIO, "Input/output error", str(path))
        unlink(path, missing_ok=missing_ok)

    def no_manifest(run_directory: Path) -> None:
        raise DiskFull("no space for the manifest")

    with monkeypatch.context() as patches:
        patches.setattr(Path, "unlink", refusing)
        patches.setattr("headrace.store.assembly.write_manifest", no_manifest)
        with pytest.raises(StorageError, match="headrace clean"):
            make_store(tmp_path)
    (left,) = find_leftovers([tmp_path / "ssd0", tmp_path / "ssd1"])
    assert (left.resumable, left.in_doubt) == (False, False)
    remove_leftover(left)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["lock"]
    make_store(tmp_path).close()
