"""What a run directory holds, as found on disk: a run that was killed while the model came in is begun, not committed.

Run: pytest tests/runs/test_run_state.py
"""

import errno
import os
import shutil
from pathlib import Path

import pytest

from headrace.files.durable import write_new
from headrace.runs.engines import discard, state_of
from headrace.runs.protocols import StateKind
from headrace.store import StateStore, StoreRequest, leftovers_of, remove_leftover
from headrace.store.manifest import withdraw_manifest
from headrace.store.run_directory import RunDirectory
from headrace.terms.errors import RunDirectoryError
from headrace.terms.events import Event
from headrace.terms.families import trained_unit
from headrace.terms.layout import lay_out
from headrace.terms.options.run_options import RunOptions
from headrace.update.rules.adamw import adamw_planes


def ignore(event: Event) -> None:
    """Sink of a test that does not look at events."""


def create(run: Path, ssd: Path) -> StateStore:
    ssd.mkdir(exist_ok=True)
    layouts = (lay_out("prologue", [("embed.weight", (40, 32), (1.0, 0.1))]),)
    units = [trained_unit(layout, adamw_planes("bfloat16"), 2048) for layout in layouts]
    return StateStore.create(run, StoreRequest([ssd], units, 0, allow_tmpfs=True), sink=ignore)


def test_only_a_commit_makes_a_run_committed(tmp_path: Path) -> None:
    run, ssd = tmp_path / "run", tmp_path / "ssd"
    assert state_of(run) is StateKind.NONE
    store = create(run, ssd)
    assert state_of(run) is StateKind.BEGUN
    store.commit({"step": 0})
    assert state_of(run) is StateKind.COMMITTED
    store.close()
    assert state_of(run) is StateKind.COMMITTED


def test_a_run_that_imports_in_another_process_is_not_discarded(tmp_path: Path) -> None:
    """`headrace resume` beside a `headrace train` that imports: it is begun and not committed, and lives."""
    run, ssd = tmp_path / "run", tmp_path / "ssd"
    store = create(run, ssd)
    before = {path: path.stat().st_ino for folder in (run, ssd) for path in folder.rglob("*")}
    with pytest.raises(RunDirectoryError, match=f"{run}: in use by process {os.getpid()}"):
        discard(run)
    assert {path: path.stat().st_ino for folder in (run, ssd) for path in folder.rglob("*")} == before
    store.commit({"step": 1})
    store.close()
    with StateStore.open(run, sink=ignore) as again:
        assert again.record == {"step": 1}


def test_a_run_that_was_killed_in_its_import_is_discarded(tmp_path: Path) -> None:
    run, ssd = tmp_path / "run", tmp_path / "ssd"
    create(run, ssd).close()
    (run / "config.yaml").touch()
    discard(run)
    assert list(ssd.iterdir()) == []
    assert {path.name for path in run.iterdir()} <= {"config.yaml", "lock"}
    create(run, ssd).close()
    discard(tmp_path / "nothing")


def test_what_was_committed_meanwhile_is_not_discarded(tmp_path: Path) -> None:
    run, ssd = tmp_path / "run", tmp_path / "ssd"
    with create(run, ssd) as store:
        store.commit({"step": 1})
    discard(run)
    assert state_of(run) is StateKind.COMMITTED
    assert any(ssd.iterdir())


def test_a_copy_that_is_discarded_leaves_the_first_ones_state(tmp_path: Path) -> None:
    run, ssd, copy = tmp_path / "run", tmp_path / "ssd", tmp_path / "copy"
    create(run, ssd).close()
    shutil.copytree(run, copy)
    before = sorted(ssd.rglob("*"))
    discard(copy)
    assert sorted(ssd.rglob("*")) == before
    assert state_of(run) is StateKind.BEGUN


def test_a_copy_whose_original_is_away_does_not_discard_what_that_may_have_trained(tmp_path: Path) -> None:
    """Copied during the import, its records are empty; the state on the SSD may be trained by now."""
    run, ssd, copy = tmp_path / "run", tmp_path / "ssd", tmp_path / "copy"
    with create(run, ssd) as store:
        shutil.copytree(run, copy)
        store.commit({"step": 1})
    run.rename(tmp_path / "away")
    before = {path: path.stat().st_ino for path in (*ssd.rglob("*"), *copy.rglob("*"))}
    with pytest.raises(RunDirectoryError, match=f"{copy}: .*{run}.*headrace clean {copy} --unfinished"):
        discard(copy)
    assert {path: path.stat().st_ino for path in (*ssd.rglob("*"), *copy.rglob("*"))} == before
    with StateStore.open(tmp_path / "away", sink=ignore) as again:
        assert again.record == {"step": 1}


def test_a_moved_run_that_was_killed_in_its_import_begins_anew_as_it_is_told(tmp_path: Path) -> None:
    run, ssd, moved = tmp_path / "run", tmp_path / "ssd", tmp_path / "moved"
    create(run, ssd).close()
    run.rename(moved)
    with pytest.raises(RunDirectoryError, match="--unfinished"):
        discard(moved)
    for leftover in leftovers_of(moved):
        remove_leftover(leftover)
    assert list(ssd.iterdir()) == []
    assert state_of(moved) is StateKind.NONE
    discard(moved)


def test_a_moved_run_that_was_killed_in_its_import_takes_its_own_state_along(tmp_path: Path) -> None:
    """Inside the run directory no other run's state can lie."""
    run, moved = tmp_path / "run", tmp_path / "moved"
    run.mkdir()
    create(run, run / "ssd").close()
    run.rename(moved)
    discard(moved)
    assert list((moved / "ssd").iterdir()) == []


def test_a_removal_that_was_cut_short_is_ended(tmp_path: Path) -> None:
    """The run is finished, its model exported: nobody would look for what is left on the SSD."""
    run, ssd = tmp_path / "run", tmp_path / "ssd"
    with create(run, ssd) as store:
        store.commit({"step": 1})
    withdraw_manifest(run)
    discard(run)
    assert list(ssd.iterdir()) == []
    assert {path.name for path in run.iterdir()} == {"lock"}


def test_options_that_have_no_space_on_a_drive_without_links_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*names: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    written: list[int] = []
    fsync = os.fsync

    def full(descriptor: int) -> None:
        written.append(descriptor)
        if len(written) == 2:  # the first is beside its place, where it had the space
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "link", no_links)
    monkeypatch.setattr(os, "fsync", full)
    config = RunOptions.of({"model": "m", "data": "d.jsonl"})
    with pytest.raises(RunDirectoryError, match="No space left on device"):
        RunDirectory(tmp_path / "run").write_config(config)
    assert list(tmp_path.iterdir()) == []
    RunDirectory(tmp_path / "run").write_config(config)
    with pytest.raises(FileExistsError):
        write_new(tmp_path / "run" / "config.yaml", "another's")
    assert RunDirectory(tmp_path / "run").read_config() == config
