"""Power cuts at every write and every sync: the store opens at step t or t+1, byte for byte.

Run: pytest tests/store/test_crash.py
"""

from pathlib import Path

import pytest
from store_world import holds_step, make_store, open_store, quick_engine, write_step
from tiers import sampled

from headrace.files import BlockFile
from headrace.terms.errors import RunDirectoryError
from headrace.testing import PowerGone, PowerSupply


def run_until_cut(folder: Path, cut_at: int, seed: int) -> tuple[int, int, int]:
    """Run three steps; return the last step whose commit returned, the last whose commit began, and the calls used."""
    supply = PowerSupply(cut_at, seed)
    returned = begun = 0
    with quick_engine() as engine:
        store = make_store(folder, open_file=supply.open_file, engine=engine)
        try:
            for step in (1, 2, 3):
                write_step(store, step)
                begun = step
                store.commit({"step": step})
                returned = step
        except PowerGone:
            pass
        finally:
            store.close()
    supply.cut()
    return returned, begun, supply.calls


def test_a_power_cut_at_any_moment_leaves_the_old_or_the_new_step(tmp_path: Path) -> None:
    outcomes = set()
    cut_at, finished = 0, False
    while not finished:
        folder = tmp_path / str(cut_at)
        folder.mkdir()
        returned, begun, calls = run_until_cut(folder, cut_at, seed=cut_at)
        finished = calls <= cut_at
        try:
            with open_store(folder) as store:
                found = store.record["step"]
                assert returned <= found <= begun, f"cut at {cut_at}"
                assert holds_step(store, found), f"cut at {cut_at}"
                store.verify()
                write_step(store, found + 1)  # and the run goes on
                store.commit({"step": found + 1})
        except RunDirectoryError:
            found = 0
            assert returned == 0, f"cut at {cut_at}: step {returned} is lost"
        outcomes.add((found, returned, begun))
        cut_at += 1
    assert cut_at > 50
    # Both sides of the moment have been seen: a commit cut off that is there, and one that is not.
    assert {(1, 1, 2), (2, 2, 2), (2, 2, 3), (3, 3, 3)} <= outcomes


def test_what_a_killed_process_left_unsynced_is_kept_once_it_counts(tmp_path: Path) -> None:
    killed, after = PowerSupply(10_000, 0), PowerSupply(10_000, 1)
    with quick_engine() as engine:
        store = make_store(tmp_path, open_file=killed.open_file, engine=engine)
        for step in (1, 2):
            write_step(store, step)
            store.commit({"step": step})
        write_step(store, 3)
        killed.cut_at = killed.calls + len(killed.files) - 1  # all is synced but the record that was just written
        with pytest.raises(PowerGone):
            store.commit({"step": 3})
        store.close()
    unsynced = {file.path: file.unsynced for file in killed.files}

    def open_again(path: Path, create_bytes: int | None) -> BlockFile:
        file = after.open_file(path, create_bytes)
        after.files[-1].unsynced += unsynced[path]  # a process was killed; the drives go on
        return file

    with quick_engine() as engine:
        store = open_store(tmp_path, open_file=open_again, engine=engine)
        found = store.record["step"]
        write_step(store, found + 1)
        store.close()
    after.random.random = lambda: 0.0  # type: ignore[method-assign]
    after.cut()
    with open_store(tmp_path) as store:
        assert (found, store.record["step"]) == (3, 3)
        assert holds_step(store, 3)


@pytest.mark.parametrize("seed", sampled(range(12), range(4)))
def test_a_power_cut_inside_the_record_tears_it_and_the_store_opens(tmp_path: Path, seed: int) -> None:
    # The writes and syncs of a step without a cut, up to the write of its record.
    _, _, calls = run_until_cut(tmp_path, 10_000, seed)
    (tmp_path / "again").mkdir()
    record_write = calls - 2
    returned, begun, _ = run_until_cut(tmp_path / "again", record_write, seed)
    assert (returned, begun) == (2, 3)
    with open_store(tmp_path / "again") as store:
        found = store.record["step"]
        assert found in (2, 3)
        assert holds_step(store, found)


def test_a_record_torn_at_any_byte_gives_the_old_or_the_new_step(tmp_path: Path) -> None:
    with make_store(tmp_path) as store:
        for step in (1, 2):
            write_step(store, step)
            store.commit({"step": step})
        before = (tmp_path / "run" / "commit.1").read_bytes()
        write_step(store, 3)
        store.commit({"step": 3})
    path = tmp_path / "run" / "commit.1"
    after = path.read_bytes()
    length = max(index for index, (old, new) in enumerate(zip(before, after, strict=True)) if old != new) + 1
    for cut in [*range(0, length, 37), length - 1, length]:
        path.write_bytes(after[:cut] + before[cut:])
        with open_store(tmp_path) as store:
            assert store.record["step"] == (3 if cut == length else 2)
            assert holds_step(store, store.record["step"])
