"""What dead runs left is told from what lives, was moved, or cannot be seen just now: only what is surely dead is removed.

Run: pytest tests/store/test_leftovers.py
"""

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from store_world import holds_step, ignore, make_store, open_store, write_step

from headrace.files import BlockFile
from headrace.store import Leftover, StateStore, find_leftovers, leftovers_of, lock_holder, remove_leftover
from headrace.store.manifest import withdraw_manifest
from headrace.terms.errors import ConfigError, DiskFull, RunDirectoryError


def committed(folder: Path) -> None:
    with make_store(folder) as store:
        write_step(store, 1)
        store.commit({"step": 1})


def ssds(folder: Path) -> list[Path]:
    return [folder / "ssd0", folder / "ssd1"]


def owners(folder: Path) -> set[str]:
    return {json.loads(path.read_text())["run_directory"] for path in folder.glob("ssd*/headrace-*/owner.json")}


def only(leftovers: list[Leftover]) -> Leftover:
    """One of the two folders of a run, of which the same is known."""
    first, second = leftovers
    assert (first.run_directory, first.resumable, first.in_doubt) == (second.run_directory, second.resumable, second.in_doubt)
    return first


def test_a_run_that_was_moved_is_in_use_while_it_is_open_and_in_doubt_before(tmp_path: Path) -> None:
    committed(tmp_path)
    (tmp_path / "run").rename(tmp_path / "moved")
    found = only(find_leftovers(ssds(tmp_path)))
    assert (found.resumable, found.in_doubt) == (False, True)
    with StateStore.open(tmp_path / "moved", sink=ignore) as store:
        assert find_leftovers(ssds(tmp_path)) == []
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()} again; nothing was removed"):
            remove_leftover(found)
        assert holds_step(store, 1)
    with StateStore.open(tmp_path / "moved", sink=ignore) as store:
        assert holds_step(store, 1)


def test_folders_know_where_their_run_was_opened_last(tmp_path: Path) -> None:
    committed(tmp_path)
    (tmp_path / "run").rename(tmp_path / "moved")
    StateStore.open(tmp_path / "moved", sink=ignore).close()
    assert owners(tmp_path) == {str((tmp_path / "moved").resolve())}
    assert only(find_leftovers(ssds(tmp_path))).resumable
    assert sorted(path.name for path in (tmp_path / "ssd0").glob("headrace-*/*")) == ["data", "lock", "owner.json"]


def test_folders_that_cannot_be_told_where_their_run_is_do_not_keep_it_from_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed(tmp_path)
    (tmp_path / "run").rename(tmp_path / "moved")
    really = Path.open

    def full(self: Path, mode: str = "r", *rest: object, **options: object) -> object:
        if "owner" in self.name and "w" in mode:
            raise OSError(errno.ENOSPC, "No space left on device")
        return really(self, mode, *rest, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", full)
    with StateStore.open(tmp_path / "moved", sink=ignore) as store:
        assert holds_step(store, 1)
        assert find_leftovers(ssds(tmp_path)) == []
    assert owners(tmp_path) == {str((tmp_path / "run").resolve())}


def another_run(folder: Path) -> None:
    """A new run where the moved one was."""
    (folder / "other").mkdir()
    make_store(folder, directories=[folder / "other"], weights=None).close()


def damage_the_manifest(folder: Path) -> None:
    (folder / "moved").rename(folder / "run")
    (folder / "run" / "state.json").write_text("{")


def a_file_on_the_way(folder: Path) -> None:
    (folder / "run").write_text("")


def an_empty_mount_point(folder: Path) -> None:
    (folder / "run").mkdir()


@pytest.mark.parametrize("change", [another_run, damage_the_manifest, a_file_on_the_way, an_empty_mount_point])
def test_a_run_that_is_not_where_it_was_is_in_doubt(tmp_path: Path, change) -> None:
    committed(tmp_path)
    (tmp_path / "run").rename(tmp_path / "moved")
    change(tmp_path)
    assert only(find_leftovers(ssds(tmp_path))).in_doubt


def killed_creation(folder: Path) -> None:
    """A process is killed between its last data file and the manifest."""
    code = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        "import headrace.store.assembly as parts\nfrom store_world import make_store\n"
        "parts.write_manifest = lambda *rest: os.kill(os.getpid(), signal.SIGKILL)\nmake_store(Path(sys.argv[1]))"
    )
    process = subprocess.run([sys.executable, "-c", code, str(folder)], cwd=Path(__file__).parent, check=False)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.process
def test_a_creation_that_was_killed_is_dead(tmp_path: Path) -> None:
    killed_creation(tmp_path)
    found = only(find_leftovers(ssds(tmp_path)))
    assert (found.resumable, found.in_doubt) == (False, False)
    for each in find_leftovers(ssds(tmp_path)):
        remove_leftover(each)
    assert [*(tmp_path / "ssd0").iterdir(), *(tmp_path / "ssd1").iterdir()] == []


@pytest.mark.process
def test_the_next_creation_takes_the_place_of_one_that_was_killed(tmp_path: Path) -> None:
    killed_creation(tmp_path)
    (tmp_path / "other").mkdir()
    with make_store(tmp_path, directories=[tmp_path / "other"], weights=None):
        assert [*(tmp_path / "ssd0").iterdir(), *(tmp_path / "ssd1").iterdir()] == []
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["commit.0", "commit.1", "lock", "state.json"]


@pytest.mark.process
def test_a_killed_creation_where_a_moved_run_was_says_nothing_of_that(tmp_path: Path) -> None:
    committed(tmp_path)
    (tmp_path / "run").rename(tmp_path / "moved")
    killed_creation(tmp_path)
    assert sorted(each.in_doubt for each in find_leftovers(ssds(tmp_path))) == [False, False, True, True]
    make_store(tmp_path).close()
    with StateStore.open(tmp_path / "moved", sink=ignore) as store:
        assert holds_step(store, 1)


def test_a_removal_that_was_cut_short_leaves_dead_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    committed(tmp_path)
    store = open_store(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("headrace.store.assembly.remove_folders", lambda *rest: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            store.remove()
    found = only(find_leftovers(ssds(tmp_path)))
    assert (found.resumable, found.in_doubt) == (False, False)


def test_a_removal_that_was_cut_short_is_found_from_its_run_directory(tmp_path: Path) -> None:
    committed(tmp_path)
    withdraw_manifest(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert leftovers_of(tmp_path / "copy") == []
    found = only(leftovers_of(tmp_path / "run"))
    assert (found.resumable, found.in_doubt) == (False, False)
    # Where the run directory was moved, it may as well be a copy that was taken before the run was whole.
    (tmp_path / "run").rename(tmp_path / "moved")
    assert only(leftovers_of(tmp_path / "moved")).in_doubt


def test_once_one_folder_is_removed_the_others_are_dead_and_the_records_go_with_the_last(tmp_path: Path) -> None:
    committed(tmp_path)
    first, second = find_leftovers(ssds(tmp_path))
    remove_leftover(first)
    with pytest.raises(RunDirectoryError, match=r"state\.json is missing"):
        open_store(tmp_path)
    rest = only_one(find_leftovers(ssds(tmp_path)))
    assert (rest.folder, rest.resumable, rest.in_doubt) == (second.folder, False, False)
    remove_leftover(rest)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["lock"]


def test_a_removal_killed_at_its_first_file_leaves_dead_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    committed(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("headrace.store.leftovers.remove_folder", lambda folder: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            remove_leftover(find_leftovers(ssds(tmp_path))[0])
    found = only(find_leftovers(ssds(tmp_path)))
    assert (found.resumable, found.in_doubt) == (False, False)


def test_the_records_of_a_run_stay_while_a_drive_of_it_is_away(tmp_path: Path) -> None:
    committed(tmp_path)
    (tmp_path / "ssd1").rename(tmp_path / "unplugged")
    remove_leftover(only_one(find_leftovers([tmp_path / "ssd0"])))
    (tmp_path / "unplugged").rename(tmp_path / "ssd1")
    rest = only_one(find_leftovers(ssds(tmp_path)))
    assert (rest.resumable, rest.in_doubt) == (False, False)


def test_the_records_of_another_run_that_took_the_place_stay(tmp_path: Path) -> None:
    committed(tmp_path)
    stale = find_leftovers(ssds(tmp_path))
    open_store(tmp_path).remove()
    committed(tmp_path)
    for each in stale:
        remove_leftover(each)
    with open_store(tmp_path) as store:
        assert holds_step(store, 1)


def test_what_belongs_to_a_run_directory_is_found_after_it_was_moved_but_not_from_a_copy(tmp_path: Path) -> None:
    committed(tmp_path)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert leftovers_of(tmp_path / "copy") == []
    (tmp_path / "run").rename(tmp_path / "moved")
    found = only(leftovers_of(tmp_path / "moved"))
    assert (found.run_directory, found.resumable, found.in_doubt) == ((tmp_path / "moved").resolve(), True, False)


def test_a_copy_of_a_run_directory_is_refused_while_the_first_works(tmp_path: Path) -> None:
    committed(tmp_path)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    with open_store(tmp_path), pytest.raises(RunDirectoryError, match=f"in use by process {os.getpid()}"):
        StateStore.open(tmp_path / "copy", sink=ignore)
    assert owners(tmp_path) == {str((tmp_path / "run").resolve())}


@pytest.mark.process
def test_a_moved_run_is_held_by_its_process_and_free_once_that_is_killed(tmp_path: Path) -> None:
    committed(tmp_path)
    (tmp_path / "run").rename(tmp_path / "moved")
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom headrace.store import StateStore\n"
        "store = StateStore.open(Path(sys.argv[1]), sink=print)\nprint('open', flush=True)\ntime.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "moved")], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        (tmp_path / "moved").rename(tmp_path / "moved again")
        assert find_leftovers(ssds(tmp_path)) == []
        process.send_signal(signal.SIGKILL)
    assert only(find_leftovers(ssds(tmp_path))).in_doubt
    with StateStore.open(tmp_path / "moved again", sink=ignore) as store:
        assert holds_step(store, 1)


def test_a_forked_child_neither_keeps_nor_frees_the_locks(tmp_path: Path) -> None:
    ended, end = os.pipe()
    told, tell = os.pipe()
    with make_store(tmp_path) as store:
        child = os.fork()
        if child == 0:
            try:
                os.close(end)  # else it would wait for itself
                store._parts.locks[0].release()  # as the end of an interpreter may do
                os.write(tell, b"x")
                os.read(ended, 1)
            finally:
                os._exit(0)
        try:
            os.close(tell)
            assert os.read(told, 1) == b"x"
            assert find_leftovers(ssds(tmp_path)) == []
            assert lock_holder(tmp_path / "run") == os.getpid()
            store.close()
            assert lock_holder(tmp_path / "run") is None
            assert len(find_leftovers(ssds(tmp_path))) == 2
        finally:
            os.close(end)
            os.waitpid(child, 0)
            os.close(ended)
            os.close(told)


def test_a_drive_without_locks_is_as_good_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really = fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        if "headrace-" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSYS, "Function not implemented")
        really(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    committed(tmp_path)
    with open_store(tmp_path) as store:
        assert holds_step(store, 1)
        assert find_leftovers(ssds(tmp_path)) == []
    for each in find_leftovers(ssds(tmp_path)):
        remove_leftover(each)
    assert [*(tmp_path / "ssd0").iterdir(), *(tmp_path / "ssd1").iterdir()] == []


def test_a_copy_of_a_run_directory_whose_state_was_not_copied_is_refused_and_the_first_untouched(tmp_path: Path) -> None:
    committed(tmp_path)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    said = r"copy: is a copy of the run in .*/run, and would change its state in .*"
    with pytest.raises(RunDirectoryError, match=said) as refused:
        StateStore.open(tmp_path / "copy", sink=ignore)
    assert "remove" not in str(refused.value)  # by another path the first may be this very directory
    assert owners(tmp_path) == {str((tmp_path / "run").resolve())}
    with open_store(tmp_path) as store:
        assert holds_step(store, 1)
    shutil.rmtree(tmp_path / "run")
    with StateStore.open(tmp_path / "copy", sink=ignore) as store:
        assert holds_step(store, 1)


def committed_inside(run: Path) -> None:
    """A run whose state lies in its own directory."""
    run.mkdir()
    with make_store(run.parent, directories=[run], weights=[1]) as store:
        write_step(store, 1)
        store.commit({"step": 1})


@pytest.mark.parametrize("inside", [False, True])
def test_a_moved_run_with_a_link_at_its_old_place_is_one_run(tmp_path: Path, inside: bool) -> None:
    run, big = tmp_path / "run", tmp_path / "big"
    committed_inside(run) if inside else committed(tmp_path)
    run.rename(big)
    run.symlink_to(big)
    listed = leftovers_of(big)
    assert len(listed) == (1 if inside else 2)
    assert all(each.resumable and each.run_directory == big.resolve() for each in listed)
    for place in (run, big, run):
        with StateStore.open(place, sink=ignore) as store:
            assert holds_step(store, 1)


def test_a_run_directory_and_a_drive_under_second_paths_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a bind mount has them; here links that are never resolved."""
    committed(tmp_path)
    (tmp_path / "again").symlink_to(tmp_path / "run")
    (tmp_path / "ssd again").symlink_to(tmp_path / "ssd0")
    really = Path.resolve

    def resolve(self: Path, strict: bool = False) -> Path:
        return self.absolute() if "again" in str(self) else really(self, strict)

    monkeypatch.setattr(Path, "resolve", resolve)
    assert only(leftovers_of(tmp_path / "again")).resumable
    assert only_one(find_leftovers([tmp_path / "ssd again"])).resumable
    with StateStore.open(tmp_path / "again", sink=ignore) as store:
        assert holds_step(store, 1)
    with open_store(tmp_path) as store:
        assert holds_step(store, 1)


@pytest.mark.parametrize("way", ["copied", "moved"])
def test_a_state_inside_its_run_directory_goes_along(way: str, tmp_path: Path) -> None:
    committed_inside(tmp_path / "run")
    if way == "moved":
        (tmp_path / "run").rename(tmp_path / "other")
    else:
        shutil.copytree(tmp_path / "run", tmp_path / "other")
    with StateStore.open(tmp_path / "other", sink=ignore) as store:
        write_step(store, 2)
        store.commit({"step": 2})
    with StateStore.open(tmp_path / "other", sink=ignore) as store:
        assert holds_step(store, 2)
    if way == "copied":
        with StateStore.open(tmp_path / "run", sink=ignore) as store:
            assert holds_step(store, 1)


def test_the_state_in_a_copy_is_not_the_first_runs(tmp_path: Path) -> None:
    """Whoever removes the copy's must not take the records of the run that it names for its own."""
    committed_inside(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    (found,) = find_leftovers([tmp_path / "copy"])
    assert (found.resumable, found.in_doubt) == (False, True)
    (mine,) = leftovers_of(tmp_path / "copy")
    assert mine.resumable
    assert mine.run_directory == (tmp_path / "copy").resolve()
    assert only_one(find_leftovers([tmp_path / "run"])).resumable


def only_one(leftovers: list[Leftover]) -> Leftover:
    (leftover,) = leftovers
    return leftover


def test_a_creation_that_fails_leaves_an_empty_run_directory_empty(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()

    def full(path: Path, create_bytes: int | None) -> BlockFile:
        raise DiskFull(f"{path}: no space")

    with pytest.raises(DiskFull):
        make_store(tmp_path, open_file=full)
    assert list((tmp_path / "run").iterdir()) == []
