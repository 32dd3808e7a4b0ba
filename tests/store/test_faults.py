"""Drives that fail give a named error, never a wrong number or a hang. Run: pytest tests/store/test_faults.py"""

import os
import re
from pathlib import Path

import numpy as np
import pytest
from store_world import (
    LAYOUTS,
    UNITS,
    filled,
    holds_step,
    make_store,
    open_store,
    quick_engine,
    read_weights,
    write_step,
)

from headrace.files import BlockFile, Bytes, DirectFile, patience
from headrace.machine.host_memory import huge_page_buffer
from headrace.store import OpenFile, StateStore, open_direct, place_units
from headrace.store.checksum import checksum
from headrace.terms.errors import CorruptData, DeviceStalled, DiskFull, RunDirectoryError, ShortTransfer, StorageError
from headrace.terms.events import Event, Notice
from headrace.terms.families import WEIGHTS
from headrace.testing import Fault, FaultKind, FaultyFile


def faulty(name: str, *script: Fault) -> OpenFile:
    """Open files directly, and let the script happen to those called `name`."""

    def open_file(path: Path, create_bytes: int | None) -> BlockFile:
        file = open_direct(path, create_bytes)
        return FaultyFile(file, script) if path.name == name else file

    return open_file


def committed_store(tmp_path: Path, num_directories: int = 1) -> None:
    directories = [tmp_path / f"ssd{index}" for index in range(num_directories)]
    for directory in directories:
        directory.mkdir()
    with make_store(tmp_path, directories=directories, weights=None) as store:
        write_step(store, 1)
        store.commit({"step": 1})


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(FaultKind.SHORT, ShortTransfer), (FaultKind.EIO, StorageError)],
)
def test_a_failed_write_fails_reads_and_the_commit_until_it_is_written_again(
    tmp_path: Path, kind: FaultKind, expected: type[StorageError]
) -> None:
    committed_store(tmp_path)
    with open_store(tmp_path, open_file=faulty("data", Fault(verb="write", call=0, kind=kind))) as store:
        data = filled(4096, 2_000_005)
        tickets = [store.write(0, WEIGHTS, 0, data)]
        with pytest.raises(expected, match="data"):
            tickets[0].wait()
        with pytest.raises(expected, match="data"):
            read_weights(store, 0)
        for _ in range(2):
            with pytest.raises(expected, match="data"):
                store.commit({"step": 2})
        assert store.committed_version == 1
        write_step(store, 2)
        store.commit({"step": 2})
        assert holds_step(store, 2)
    with open_store(tmp_path) as store:
        assert holds_step(store, 2)
        store.verify()


def without_space(name: str) -> OpenFile:
    return faulty(name, *(Fault(verb="write", call=call, kind=FaultKind.NO_SPACE) for call in range(3)))


@pytest.mark.parametrize("name", ["data", "commit.0"])
def test_what_finds_no_space_waits_until_there_is_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(patience, "EVERY_SECONDS", 0.01)
    committed_store(tmp_path)
    told: list[Event] = []
    with open_store(tmp_path, open_file=without_space(name), sink=told.append) as store:
        write_step(store, 2)
        store.commit({"step": 2})
        assert holds_step(store, 2)
    words = [event.text for event in told if isinstance(event, Notice)]
    assert len(words) == 2, "one line when it waits, and one when it goes on"
    assert name in words[0]
    assert "goes on by itself" in words[0]
    with open_store(tmp_path) as store:
        assert holds_step(store, 2)


def test_whoever_is_to_stop_waits_for_no_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "EVERY_SECONDS", 0.01)
    committed_store(tmp_path)

    def stop() -> None:
        raise KeyboardInterrupt

    with open_store(tmp_path, open_file=without_space("data")) as store:
        store.heed(stop)
        ticket = store.write(0, WEIGHTS, 0, filled(4096, 2))
        with pytest.raises(DiskFull, match="data"):
            ticket.wait()
        assert store.committed_version == 1
    with open_store(tmp_path, open_file=without_space("data")) as store:
        monkeypatch.setattr(patience, "EVERY_SECONDS", 600)
        store.write(0, WEIGHTS, 0, filled(4096, 2))  # closed while it waits
    with open_store(tmp_path) as store:
        assert holds_step(store, 1)


def test_a_failed_write_can_be_abandoned(tmp_path: Path) -> None:
    committed_store(tmp_path)
    with open_store(tmp_path, open_file=faulty("data", Fault(verb="write", call=0, kind=FaultKind.EIO))) as store:
        store.write(0, WEIGHTS, 0, filled(4096, 2))
        store.abandon()
        store.commit({"step": 1})
        assert holds_step(store, 1)


@pytest.mark.parametrize("kind", [FaultKind.SHORT, FaultKind.EIO])
def test_a_failed_read_is_an_error_once(tmp_path: Path, kind: FaultKind) -> None:
    committed_store(tmp_path)
    with open_store(tmp_path, open_file=faulty("data", Fault(verb="read", call=0, kind=kind))) as store:
        with pytest.raises(StorageError, match="read"):
            read_weights(store, 0)
        assert holds_step(store, 1)


def test_writes_lost_by_a_failed_sync_must_be_abandoned(tmp_path: Path) -> None:
    committed_store(tmp_path)
    # Opening syncs once.
    with open_store(tmp_path, open_file=faulty("data", Fault(verb="sync", call=1, kind=FaultKind.EIO))) as store:
        write_step(store, 2)
        with pytest.raises(StorageError, match="sync"):
            store.commit({"step": 2})
        with pytest.raises(StorageError, match="abandon"):
            store.commit({"step": 2})
        store.abandon()
        assert holds_step(store, 1)
        write_step(store, 3)
        store.commit({"step": 3})
    with open_store(tmp_path) as store:
        assert holds_step(store, 3)


RECORD_FAULTS = [
    Fault(verb="write", call=0, kind=FaultKind.EIO),
    Fault(verb="write", call=0, kind=FaultKind.SHORT),
    Fault(verb="sync", call=1, kind=FaultKind.EIO),  # the record is there, whole, and yet the commit failed
]


@pytest.mark.parametrize("fault", RECORD_FAULTS)
def test_a_failed_record_can_be_repeated(tmp_path: Path, fault: Fault) -> None:
    committed_store(tmp_path)
    with open_store(tmp_path, open_file=faulty("commit.0", fault)) as store:
        write_step(store, 2)
        with pytest.raises(StorageError, match=r"commit\.0"):
            store.commit({"step": 2})
        assert store.committed_version == 1
        with pytest.raises(StorageError, match="commit again or abandon"):
            store.write(0, WEIGHTS, 0, filled(4096, 3))
        store.commit({"step": 2})
    with open_store(tmp_path) as store:
        assert holds_step(store, 2)


@pytest.mark.parametrize("fault", RECORD_FAULTS)
def test_a_failed_record_that_is_abandoned_never_comes_back(tmp_path: Path, fault: Fault) -> None:
    committed_store(tmp_path)
    with open_store(tmp_path, open_file=faulty("commit.0", fault)) as store:
        write_step(store, 2)
        with pytest.raises(StorageError, match=r"commit\.0"):
            store.commit({"step": 2})
        store.abandon()
        write_step(store, 3)  # over what the failed record spoke of
    with open_store(tmp_path) as store:
        assert store.record == {"step": 1}
        assert holds_step(store, 1)
        store.verify()


def test_a_stalled_drive_is_an_error_and_close_ends(tmp_path: Path) -> None:
    committed_store(tmp_path)
    script = Fault(verb="write", call=0, kind=FaultKind.STALL, seconds=2.0)
    with (
        quick_engine(deadline_seconds=0.2) as engine,
        open_store(tmp_path, open_file=faulty("data", script), engine=engine) as store,
    ):
        store.write(0, WEIGHTS, 0, filled(4096, 2))
        with pytest.raises(DeviceStalled, match="data"):
            store.commit({"step": 2})
        with pytest.raises(DeviceStalled):
            store.abandon()  # the write may still happen: its place is not free
        assert store.committed_version == 1


def flip_byte(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize("target", [("prologue", "weights", 0), ("block 0", "states", 2)])
def test_a_flipped_bit_is_found_and_located(tmp_path: Path, target: tuple[str, str, int]) -> None:
    (tmp_path / "ssd0").mkdir()
    with make_store(tmp_path, directories=[tmp_path / "ssd0"], weights=None) as store:
        write_step(store, 1)
        store.commit({"step": 1})
        progress: list[tuple[int, int]] = []
        store.verify(lambda done, total: progress.append((done, total)))
        total_bytes = sum(layout.num_elements for layout in LAYOUTS) * 12
        assert [row[0] for row in progress] == sorted({row[0] for row in progress})
        assert progress[-1] == (total_bytes, total_bytes)
    unit, kind, chunk = target
    places = place_units(UNITS).committed
    place = next(place for place in places if (place.unit_name, place.family) == (unit, kind))
    path = next((tmp_path / "ssd0").rglob("data"))
    flip_byte(path, place.offset(0, chunk) + 1234)
    with open_store(tmp_path) as store, pytest.raises(CorruptData) as caught:
        store.verify()
    where = f"unit {unit}, {kind}, chunk {chunk}: {path} at offset {place.offset(0, chunk)},"
    assert where in str(caught.value)
    assert re.search(r"stored checksum 0x[0-9a-f]{16}, computed 0x[0-9a-f]{16}", str(caught.value))


def test_a_bit_flipped_on_its_way_to_the_drive_is_found(tmp_path: Path) -> None:
    fault = Fault(verb="write", call=1, kind=FaultKind.FLIP, amount=9)
    with make_store(tmp_path, open_file=faulty("data", fault)) as store:
        write_step(store, 1)
        store.commit({"step": 1})
        with pytest.raises(CorruptData, match="stored checksum"):
            store.verify()


@pytest.mark.parametrize("damaged", [False, True])
def test_a_checksum_that_is_known_is_kept_as_it_is(tmp_path: Path, damaged: bool) -> None:
    """Who made the data took it before the store saw them: what happened to them on the way is found."""
    with make_store(tmp_path) as store:
        write_step(store, 1)
        data = np.array(filled(4096, 5))
        known = checksum(data)
        page = huge_page_buffer(4096)
        page[:] = data
        page[77] ^= damaged
        store.write(0, WEIGHTS, 0, page, known).wait()
        store.commit({"step": 1})
        if damaged:
            with pytest.raises(CorruptData, match=f"stored checksum {known:#018x}"):
                store.verify()
        else:
            store.verify()


def damage_record(path: Path) -> None:
    file = DirectFile.open(path)
    page = huge_page_buffer(4096)
    file.read_into(0, page)
    page[60] ^= 1
    file.write_from(0, page)
    file.close()


def store_after_two_steps(tmp_path: Path) -> StateStore:
    store = make_store(tmp_path)
    for step in (1, 2):
        write_step(store, step)
        store.commit({"step": step})
    return store


def test_a_damaged_newest_record_falls_back_if_the_older_data_are_whole(tmp_path: Path) -> None:
    store_after_two_steps(tmp_path).close()
    damage_record(tmp_path / "run" / "commit.0")
    events: list[Event] = []
    with open_store(tmp_path, sink=events.append) as store:
        assert store.record == {"step": 1}
        assert holds_step(store, 1)
    assert [event for event in events if isinstance(event, Notice) and "damaged" in event.text]


def test_a_damaged_newest_record_is_an_error_if_the_older_data_were_overwritten(tmp_path: Path) -> None:
    with store_after_two_steps(tmp_path) as store:
        write_step(store, 3)
    damage_record(tmp_path / "run" / "commit.0")
    with pytest.raises(CorruptData, match="stored checksum"):
        open_store(tmp_path)
    with pytest.raises(CorruptData):  # and the lock is free again
        open_store(tmp_path)


@pytest.mark.parametrize(
    ("size", "words"), [(None, "commit.0 is missing"), (0, "cut off after 0 bytes"), (100, "cut off after 100 bytes")]
)
def test_a_record_that_is_lost_or_cut_is_named(tmp_path: Path, size: int | None, words: str) -> None:
    """The newest one: nothing else says that a step is gone. Where both are, nothing of the run is taken for a new one's."""
    store_after_two_steps(tmp_path).close()
    paths = [tmp_path / "run" / name for name in ("commit.0", "commit.1")]

    def damage(path: Path) -> None:
        path.unlink() if size is None else os.truncate(path, size)

    damage(paths[0])
    events: list[Event] = []
    with open_store(tmp_path, sink=events.append) as store:
        assert store.record == {"step": 1}
    assert any(isinstance(event, Notice) and words in event.text and "verifying" in event.text for event in events)
    for path in paths:
        path.unlink(missing_ok=True)
        if size is not None:
            path.write_bytes(bytes(size))
    with pytest.raises(RunDirectoryError, match=f"{words} and commit.1 is .* no whole commit record is left"):
        open_store(tmp_path)


def test_without_any_whole_record_the_message_says_so(tmp_path: Path) -> None:
    store_after_two_steps(tmp_path).close()
    for name in ("commit.0", "commit.1"):
        damage_record(tmp_path / "run" / name)
    with pytest.raises(RunDirectoryError, match=r"only damaged commit records.*`headrace clean .*/run --unfinished`"):
        open_store(tmp_path)
    make_store(tmp_path / "ssd0", directories=[tmp_path / "ssd1"], weights=None).close()
    with pytest.raises(RunDirectoryError, match="no step was ever finished"):
        open_store(tmp_path / "ssd0")


def test_a_file_that_vanishes_under_the_store_is_a_named_error(tmp_path: Path) -> None:
    class Gone(FaultyFile):
        def write_from(self, offset: int, data: Bytes) -> None:
            raise StorageError(f"{self.path}: write at offset {offset} failed: No such device")

    def open_file(path: Path, create_bytes: int | None) -> BlockFile:
        file = open_direct(path, create_bytes)
        return Gone(file, []) if path.name == "data" and "ssd1" in str(path) else file

    committed_store(tmp_path, 2)
    with open_store(tmp_path, open_file=open_file) as store:
        with pytest.raises(StorageError, match=r"ssd1.*No such device"):
            write_step(store, 2)
        with pytest.raises(StorageError, match="No such device"):
            store.commit({"step": 2})
    with open_store(tmp_path) as store:
        assert holds_step(store, 1)
