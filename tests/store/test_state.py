"""What is written, committed, abandoned and opened again is what was meant. Run: pytest tests/store/test_state.py"""

import shutil
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from store_world import (
    LAYOUTS,
    expected_weights,
    filled,
    holds_step,
    make_store,
    num_chunks,
    open_store,
    quick_engine,
    read_states,
    read_weights,
    weight_value,
    write_step,
)

from headrace.files import Bytes
from headrace.machine.host_memory import huge_page_buffer
from headrace.store import StateStore, lock_holder
from headrace.store.lent import NothingLent
from headrace.terms.errors import StorageError
from headrace.terms.families import STATES, WEIGHTS
from headrace.testing import MemoryFile


def test_a_new_store_reads_as_zeros_without_any_transfer(tmp_path: Path) -> None:
    with make_store(tmp_path) as store:
        assert holds_step(store, 0)
        assert (store.bytes_read, store.bytes_written) == (0, 0)
        assert (store.record, store.committed_version) == ({}, 0)


def test_committed_steps_are_found_again(tmp_path: Path) -> None:
    with make_store(tmp_path) as store:
        for step in (1, 2, 3):
            write_step(store, step)
            assert holds_step(store, step)
            store.commit({"step": step, "rng": [1, 2]})
    with open_store(tmp_path) as store:
        assert store.record == {"step": 3, "rng": [1, 2]}
        assert store.committed_version == 3
        assert store.manifest.layouts == LAYOUTS
        assert store.manifest.identity == {"model": "tiny"}
        assert holds_step(store, 3)
        store.verify()


def test_an_import_of_weights_alone_leaves_the_states_virgin(tmp_path: Path) -> None:
    with make_store(tmp_path) as store:
        for unit, layout in enumerate(LAYOUTS):
            for chunk in range(num_chunks(layout)):
                store.write(unit, WEIGHTS, chunk, filled(4096, weight_value(7, unit, chunk)))
        store.commit({"step": 0})
    with open_store(tmp_path) as store:
        written = store.bytes_written
        assert np.array_equal(read_weights(store, 1), expected_weights(7, 1))
        before = store.bytes_read
        assert not read_states(store, 1, 0).any()
        assert (store.bytes_read, store.bytes_written) == (before, written)
        store.verify()


def test_what_was_not_committed_is_gone_after_opening(tmp_path: Path) -> None:
    with make_store(tmp_path) as store:
        write_step(store, 1)
        store.commit({"step": 1})
        write_step(store, 2)
    with open_store(tmp_path) as store:
        assert holds_step(store, 1)


def test_abandoned_writes_are_forgotten(tmp_path: Path) -> None:
    with make_store(tmp_path) as store:
        write_step(store, 1)
        store.commit({"step": 1})
        write_step(store, 2, units=(1,))
        assert holds_step(store, 2, units=(1,))
        store.abandon()
        assert holds_step(store, 1)
        store.commit({"step": 1, "skipped": True})
        write_step(store, 3)
        store.commit({"step": 3})
    with open_store(tmp_path) as store:
        assert holds_step(store, 3)


def test_a_commit_of_the_record_alone_keeps_every_slot(tmp_path: Path) -> None:
    with make_store(tmp_path) as store:
        write_step(store, 1)
        store.commit({"step": 1})
        for skipped in range(3):
            store.commit({"step": 1, "skipped": skipped})
    with open_store(tmp_path) as store:
        assert store.record["skipped"] == 2
        assert store.committed_version == 4
        assert holds_step(store, 1)


def test_units_written_in_different_steps_keep_their_own_slots(tmp_path: Path) -> None:
    with make_store(tmp_path) as store:
        write_step(store, 1)
        store.commit({"step": 1})
        write_step(store, 2, units=(0,))
        store.commit({"step": 2})
        write_step(store, 3, units=(0,))
        write_step(store, 4, units=(0,))  # over step 3, in the same slot
        store.commit({"step": 4})
        write_step(store, 5, units=(1,))
    with open_store(tmp_path) as store:
        assert holds_step(store, 4, units=(0,))
        assert holds_step(store, 1, units=(1,))
        store.verify()


def test_a_half_written_unit_is_not_read_and_not_committed(tmp_path: Path) -> None:
    with make_store(tmp_path) as store:
        write_step(store, 1)
        store.commit({"step": 1})
        store.write(1, WEIGHTS, 0, filled(4096, 5))
        assert holds_step(store, 1)
        with pytest.raises(StorageError, match=r"unit block 0, weights: commit asked while 2 of 3 chunks"):
            store.commit({"step": 2})
        assert store.committed_version == 1
        store.abandon()
        store.commit({"step": 2})


def test_a_record_that_is_not_json_changes_nothing(tmp_path: Path) -> None:
    with make_store(tmp_path) as store:
        write_step(store, 1)
        with pytest.raises(TypeError):
            store.commit({"step": object()})
        store.commit({"step": 1})
        assert holds_step(store, 1)


@pytest.mark.parametrize("size", [4096, 3 * 4096 * 5])
def test_buffers_of_another_size_are_refused_with_both_sizes(tmp_path: Path, size: int) -> None:
    with make_store(tmp_path) as store:
        with pytest.raises(StorageError, match=f"block 0, states: buffer of {size} bytes, expected 20480"):
            store.write(1, STATES, 0, huge_page_buffer(size))
        with pytest.raises(StorageError, match=f"block 0, states: buffer of {size} bytes"):
            store.read(1, STATES, huge_page_buffer(size), 0)
        with pytest.raises(StorageError, match="expected 12288"):
            store.read(1, WEIGHTS, huge_page_buffer(4096))


def test_scratch_is_read_back_grows_and_touches_no_state(tmp_path: Path) -> None:
    with make_store(tmp_path) as store:
        write_step(store, 1)
        store.commit({"step": 1})
        first, second = filled(16 * 4096, 1), filled(8 * 4096, 2)
        store.scratch_write(0, first).wait()
        with pytest.raises(StorageError, match=f"scratch bytes 65536 to 98304 asked, the region has {16 * 4096}"):
            store.scratch_write(16 * 4096, second)
        store.grow_scratch(24 * 4096)
        store.grow_scratch(4096)
        store.scratch_write(16 * 4096, second).wait()
        into = huge_page_buffer(24 * 4096)
        store.scratch_read(0, into).wait()
        assert np.array_equal(into, np.concatenate([first, second]))
        store.verify()
    with open_store(tmp_path) as store:
        store.grow_scratch(24 * 4096)
        assert holds_step(store, 1)


def test_remove_leaves_nothing_of_ours_and_everything_else(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    (tmp_path / "run" / "events.jsonl").write_text("kept")
    (tmp_path / "ssd0" / "photo").write_text("kept")
    write_step(store, 1)
    store.commit({"step": 1})
    store.remove()
    store.remove()
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["run/events.jsonl", "ssd0/photo"]
    assert sorted(path.name for path in (tmp_path / "ssd0").iterdir()) == ["photo"]
    make_store(tmp_path).close()


def test_close_frees_lock_and_threads_and_may_be_repeated(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    store = make_store(tmp_path)
    assert lock_holder(tmp_path / "run") is not None
    write_step(store, 1)
    store.close()
    store.close()
    assert lock_holder(tmp_path / "run") is None
    assert set(threading.enumerate()) <= before


class SlowFile(MemoryFile):
    """Holds transfers of one verb while `held` names it."""

    def __init__(self, size_bytes: int, gate: threading.Event, held: set[str]) -> None:
        super().__init__(size_bytes)
        self.gate, self.held = gate, held

    def read_into(self, offset: int, into: Bytes) -> None:
        assert "read" not in self.held or self.gate.wait(200)
        super().read_into(offset, into)

    def write_from(self, offset: int, data: Bytes) -> None:
        assert "write" not in self.held or self.gate.wait(200)
        super().write_from(offset, data)


def slow_store(tmp_path: Path) -> tuple[StateStore, threading.Event, set[str]]:
    gate, held = threading.Event(), set[str]()

    def open_slow(path: Path, create_bytes: int | None) -> MemoryFile:
        return SlowFile(create_bytes or 4096, gate, held if path.name == "data" else set())

    return make_store(tmp_path, open_file=open_slow, engine=quick_engine()), gate, held


def in_background(call: threading.Thread) -> bool:
    """Start `call`; return whether it is still at it after a moment."""
    call.start()
    call.join(0.1)
    return call.is_alive()


def test_a_write_waits_for_reads_of_the_place_it_goes_to(tmp_path: Path) -> None:
    store, gate, held = slow_store(tmp_path)
    write_step(store, 1)
    held.add("read")
    into = huge_page_buffer(3 * 4096)
    ticket = store.read(1, WEIGHTS, into)  # uncommitted, in the slot that the next version overwrites
    writer = threading.Thread(target=lambda: write_step(store, 2))
    assert in_background(writer)
    gate.set()
    ticket.wait()
    writer.join(200)
    assert np.array_equal(into, expected_weights(1, 1))
    assert holds_step(store, 2)
    store.close()


def test_a_read_waits_for_the_write_of_what_it_asks_for_and_keeps_nobody_else_waiting(tmp_path: Path) -> None:
    store, gate, held = slow_store(tmp_path)
    write_step(store, 1, units=(0,))
    store.commit({"step": 1})
    held.add("write")
    for chunk in range(3):
        store.write(1, WEIGHTS, chunk, filled(4096, weight_value(1, 1, chunk)))
    found: list[Bytes] = []
    reader = threading.Thread(target=lambda: found.append(read_weights(store, 1)))
    assert in_background(reader)
    assert np.array_equal(read_weights(store, 0), expected_weights(1, 0))  # of another unit: at once
    assert not store.write(0, STATES, 0, filled(20480, 3)).done  # started at once, though held
    assert reader.is_alive()
    gate.set()
    reader.join(200)
    assert np.array_equal(found[0], expected_weights(1, 1))
    store.close()


def test_a_write_that_waits_for_a_read_keeps_nobody_else_waiting(tmp_path: Path) -> None:
    store, gate, held = slow_store(tmp_path)
    write_step(store, 1)
    held.add("read")
    into = huge_page_buffer(3 * 4096)
    read = store.read(1, WEIGHTS, into)  # uncommitted, in the slot that the next version overwrites
    writer = threading.Thread(target=lambda: store.write(1, WEIGHTS, 0, filled(4096, 7)).wait())
    assert in_background(writer)
    store.write(0, WEIGHTS, 0, filled(4096, 8)).wait()
    assert writer.is_alive()
    gate.set()
    read.wait()
    writer.join(200)
    assert np.array_equal(into, expected_weights(1, 1))
    store.close()


def test_cpu_seconds_count_transfers_and_checksums(tmp_path: Path) -> None:
    engine = quick_engine()
    with make_store(tmp_path, engine=engine) as store:
        assert store.io_cpu_seconds == engine.cpu_seconds == 0
        write_step(store, 1)
        after_writes, transfers = store.io_cpu_seconds, engine.cpu_seconds
        assert after_writes > transfers > 0  # checksums are the rest
        read_weights(store, 1)
        assert store.io_cpu_seconds - after_writes == pytest.approx(engine.cpu_seconds - transfers)
    engine.close()


def test_bytes_of_lent_files_are_among_those_that_were_read(tmp_path: Path) -> None:
    class Lent(NothingLent):
        bytes_read = 4096

    store = make_store(tmp_path)
    write_step(store, 1)
    store.commit({"step": 1})
    read_weights(store, 0)
    alone = store.bytes_read
    store.lend(Lent())
    assert alone >= LAYOUTS[0].num_elements * 2
    assert store.bytes_read == alone + 4096
    store.close()


def test_reads_go_on_during_a_commit(tmp_path: Path) -> None:
    store, gate, held = slow_store(tmp_path)
    write_step(store, 1)
    store.commit({"step": 1})
    held.add("write")
    store.write(0, WEIGHTS, 0, filled(4096, 3))
    committer = threading.Thread(target=lambda: store.commit({"step": 2}))
    assert in_background(committer)
    assert np.array_equal(read_weights(store, 1), expected_weights(1, 1))
    gate.set()
    committer.join(200)
    assert store.committed_version == 2
    store.close()


class StoreMachine(RuleBasedStateMachine):
    """The store against a dictionary, under any order of writes, commits, abandonments and reopenings."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="headrace-model-"))
        self.store = make_store(self.folder)
        zeros = {(kind, unit): 0 for kind in ("weights", "states") for unit in range(len(LAYOUTS))}
        self.committed: dict[tuple[str, int], int] = zeros
        self.current = dict(zeros)
        self.begun: dict[tuple[str, int], int] = {}
        self.fresh: set[tuple[str, int]] = set()
        self.sequence = 0

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)

    def write(self, kind: str, unit: int, chunk: int, value: int) -> None:
        self.store.write(unit, kind, chunk, filled(4096 if kind == "weights" else 20480, value + chunk))

    @rule(kind=st.sampled_from(["weights", "states"]), unit=st.sampled_from([0, 1]), value=st.integers(1, 2**40))
    def write_unit(self, kind: str, unit: int, value: int) -> None:
        # A chunk written already comes first: written again it still belongs to the version begun.
        begun = self.begun.pop((kind, unit), 0)
        for chunk in sorted(range(num_chunks(LAYOUTS[unit])), key=lambda chunk: chunk != begun):
            self.write(kind, unit, chunk, value)
        self.current[kind, unit] = value
        self.fresh.add((kind, unit))

    @rule(value=st.integers(1, 2**40), chunk=st.integers(0, 2))
    def begin_unit(self, value: int, chunk: int) -> None:
        if ("weights", 1) in self.fresh:
            return  # that version would be lost: refused when it is read, which has its own test
        # One chunk alone never completes this unit of three.
        chunk = self.begun.setdefault(("weights", 1), chunk)
        self.write("weights", 1, chunk, value)

    @rule()
    def commit(self) -> None:
        if self.begun:
            with pytest.raises(StorageError, match="commit asked"):
                self.store.commit({"sequence": self.sequence})
            return
        self.sequence += 1
        self.store.commit({"sequence": self.sequence})
        self.committed = dict(self.current)
        self.fresh.clear()

    @rule()
    def abandon(self) -> None:
        self.store.abandon()
        self.current = dict(self.committed)
        self.begun.clear()
        self.fresh.clear()

    @rule()
    def reopen(self) -> None:
        if self.sequence == 0:
            return  # nothing was ever committed: there is nothing to open
        self.store.close()
        self.store = open_store(self.folder)
        self.current = dict(self.committed)
        self.begun.clear()
        self.fresh.clear()

    @rule()
    def verify(self) -> None:
        self.store.verify()

    @invariant()
    def reads_agree(self) -> None:
        assert self.store.committed_version == self.sequence
        assert self.store.record == ({"sequence": self.sequence} if self.sequence else {})
        for (kind, unit), value in self.current.items():
            chunks = range(num_chunks(LAYOUTS[unit]))
            size = 4096 if kind == "weights" else 20480
            expected = [filled(size, value + chunk) if value else np.zeros(size, np.uint8) for chunk in chunks]
            if kind == "weights":
                assert np.array_equal(read_weights(self.store, unit), np.concatenate(expected))
            else:
                for chunk in chunks:
                    assert np.array_equal(read_states(self.store, unit, chunk), expected[chunk])


StoreMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=20, deadline=None)
TestStoreAgainstADictionary = StoreMachine.TestCase
