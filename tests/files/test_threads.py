"""Many in flight, errors stay with their ticket, no wait without end. Run: pytest tests/files/test_threads.py"""

import threading
import time

import numpy as np
import pytest
from drawn_bytes import random_bytes

from headrace.files import BLOCK_BYTES, Bytes, ThreadEngine
from headrace.machine.host_memory import huge_page_buffer
from headrace.terms.errors import DeviceStalled, StorageError
from headrace.terms.events import Event, Notice
from headrace.terms.machine.drives import InFlight
from headrace.testing import Fault, FaultKind, FaultyFile, MemoryFile

SIZE = 64 * BLOCK_BYTES


class GatedFile(MemoryFile):
    """Holds every transfer until `gate` opens; counts how many are inside at once."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(size_bytes, "gated")
        self.gate = threading.Event()
        self.inside: list[str] = []
        self.arrived = threading.Semaphore(0)

    def read_into(self, offset: int, into: Bytes) -> None:
        self._pass("read")
        super().read_into(offset, into)

    def write_from(self, offset: int, data: Bytes) -> None:
        self._pass("write")
        super().write_from(offset, data)

    def _pass(self, verb: str) -> None:
        self.inside.append(verb)
        self.arrived.release()
        assert self.gate.wait(200)


def test_requests_in_pieces_arrive_whole_and_are_counted() -> None:
    file, data, into = MemoryFile(SIZE), random_bytes(SIZE), huge_page_buffer(SIZE)
    with ThreadEngine(2, 2, piece_bytes=3 * BLOCK_BYTES) as engine:
        engine.write([(file, 0, data)]).wait()
        ticket = engine.read([(file, 0, into[: SIZE // 2]), (file, SIZE // 2, into[SIZE // 2 :])])
        ticket.wait()
        ticket.wait()
        assert ticket.done
        assert (engine.bytes_written, engine.bytes_read) == (SIZE, SIZE)
    assert np.array_equal(into, data)


def test_an_empty_request_is_done_at_once() -> None:
    with ThreadEngine(1, 1) as engine:
        ticket = engine.read([])
        assert ticket.done
        ticket.wait()


def test_reads_and_writes_run_at_once_and_several_of_each() -> None:
    file = GatedFile(SIZE)
    with ThreadEngine(2, 3, piece_bytes=BLOCK_BYTES) as engine:
        tickets = [engine.read([(file, 0, huge_page_buffer(SIZE))]), engine.write([(file, 0, random_bytes(SIZE))])]
        for _ in range(5):
            assert file.arrived.acquire(timeout=200)
        assert (file.inside.count("read"), file.inside.count("write")) == (2, 3)
        assert not any(ticket.done for ticket in tickets)
        file.gate.set()
        for ticket in tickets:
            ticket.wait()


def test_an_error_fails_its_ticket_and_not_the_engine() -> None:
    file = FaultyFile(MemoryFile(SIZE), [Fault(verb="write", call=2, kind=FaultKind.EIO)])
    data = random_bytes(SIZE)
    with ThreadEngine(1, 1, piece_bytes=8 * BLOCK_BYTES) as engine:
        failed, fine = engine.write([(file, 0, data)]), engine.write([(file, 0, data)])
        for _ in range(2):
            with pytest.raises(StorageError, match=f"offset {16 * BLOCK_BYTES}"):
                failed.wait()
        fine.wait()
        # The pieces after the failed one were skipped.
        assert engine.bytes_written == 16 * BLOCK_BYTES + SIZE


def test_any_exception_of_a_file_reaches_the_one_who_waits() -> None:
    class Broken(MemoryFile):
        def read_into(self, offset: int, into: Bytes) -> None:
            raise KeyError("bug")

    with ThreadEngine(1, 1) as engine, pytest.raises(KeyError, match="bug"):
        engine.read([(Broken(SIZE), 0, huge_page_buffer(SIZE))]).wait()


class Clock:
    """The time by which stalls are known: each look at it takes `step_seconds`, and files may let more pass."""

    def __init__(self, step_seconds: float = 0.0) -> None:
        self.seconds, self.step_seconds, self.thread_time = 0.0, step_seconds, time.thread_time

    def monotonic(self) -> float:
        self.seconds += self.step_seconds
        return self.seconds


def test_a_stall_warns_then_raises_and_names_path_and_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.files.threads.time", Clock(0.01))
    file, events = GatedFile(SIZE), list[Event]()
    engine = ThreadEngine(1, 1, stall_warning_seconds=0.05, deadline_seconds=0.2, sink=events.append)
    ticket = engine.read([(file, BLOCK_BYTES, huge_page_buffer(BLOCK_BYTES))])
    with pytest.raises(DeviceStalled, match=r"ssd-read: gated at offset 4096 did not finish: waited 0\.2\d* s, limit 0\.2 s"):
        ticket.wait()
    assert [type(event) for event in events] == [Notice]
    assert not ticket.done
    file.gate.set()
    ticket.wait(200)  # late is not lost
    engine.close()


def test_a_timeout_of_the_call_is_kept() -> None:
    file = GatedFile(SIZE)
    with ThreadEngine(1, 1) as engine:
        ticket = engine.read([(file, 0, huge_page_buffer(BLOCK_BYTES))])
        with pytest.raises(DeviceStalled, match=r"limit 0\.05 s"):
            ticket.wait(0.05)
        file.gate.set()
        ticket.wait(200)


def test_a_long_queue_on_a_slow_drive_is_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("headrace.files.threads.time", clock)

    class SlowFile(MemoryFile):
        def read_into(self, offset: int, into: Bytes) -> None:
            super().read_into(offset, into)
            clock.seconds += 1.0

    with ThreadEngine(1, 1, piece_bytes=BLOCK_BYTES, deadline_seconds=1.5) as engine:
        engine.read([(SlowFile(SIZE), 0, huge_page_buffer(SIZE))]).wait()
    assert clock.seconds > 1.5


def test_close_finishes_requests_ends_threads_and_refuses_more() -> None:
    before = set(threading.enumerate())
    file, data = MemoryFile(SIZE), random_bytes(SIZE)
    engine = ThreadEngine(3, 3, piece_bytes=BLOCK_BYTES)
    ticket = engine.write([(file, 0, data)])
    engine.close()
    engine.close()
    assert ticket.done
    assert set(threading.enumerate()) <= before
    with pytest.raises(StorageError, match="after close"):
        engine.write([(file, 0, data)])


def test_close_leaves_a_stalled_thread_behind() -> None:
    file = GatedFile(SIZE)
    engine = ThreadEngine(1, 1, deadline_seconds=0.1)
    ticket = engine.read([(file, 0, huge_page_buffer(BLOCK_BYTES))])
    engine.close()
    assert not ticket.done, "the gate is closed still"
    file.gate.set()


def test_a_finished_ticket_lets_go_of_its_buffers() -> None:
    file, into = MemoryFile(SIZE), huge_page_buffer(SIZE)
    with ThreadEngine(1, 1) as engine:
        ticket = engine.read([(file, 0, into)])
        ticket.wait()
        assert ticket.pieces == ()


@pytest.mark.parametrize(("before", "after"), [(1, 3), (4, 2), (2, 2)])
def test_as_many_are_in_flight_as_it_was_told_last(before: int, after: int) -> None:
    alive = set(threading.enumerate())
    engine = ThreadEngine(before, before, piece_bytes=SIZE)
    engine.keep_in_flight(InFlight(threads=after, piece_bytes=BLOCK_BYTES))
    file = GatedFile(SIZE)
    tickets = [engine.read([(file, 0, huge_page_buffer(SIZE))]), engine.write([(file, 0, random_bytes(SIZE))])]
    for _ in range(2 * after):
        assert file.arrived.acquire(timeout=200)
    assert not file.arrived.acquire(timeout=0.05)
    assert (file.inside.count("read"), file.inside.count("write")) == (after, after)
    file.gate.set()
    for ticket in tickets:
        ticket.wait()
    assert file.inside.count("read") == SIZE // BLOCK_BYTES  # in pieces of the new size
    engine.close()
    assert set(threading.enumerate()) <= alive


def test_requests_made_before_threads_end_are_finished() -> None:
    file = GatedFile(SIZE)
    with ThreadEngine(4, 1, piece_bytes=BLOCK_BYTES) as engine:
        ticket = engine.read([(file, 0, huge_page_buffer(SIZE))])
        engine.keep_in_flight(InFlight(threads=1))
        file.gate.set()
        ticket.wait()
        assert engine.bytes_read == SIZE


@pytest.mark.parametrize("setting", [InFlight(threads=0), InFlight(piece_bytes=0), InFlight(piece_bytes=1000)])
def test_a_setting_that_cannot_be_is_refused(setting: InFlight) -> None:
    with ThreadEngine(1, 1) as engine, pytest.raises(StorageError, match=f"{setting.threads} threads .* {setting.piece_bytes}"):
        engine.keep_in_flight(setting)


def test_no_threads_after_close() -> None:
    engine = ThreadEngine(1, 1)
    engine.close()
    with pytest.raises(StorageError, match="after close"):
        engine.keep_in_flight(InFlight())


class BusyFile(MemoryFile):
    """Takes CPU time for each transfer, and adds up how much."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(size_bytes)
        self.spent: list[float] = []

    def read_into(self, offset: int, into: Bytes) -> None:
        start = time.thread_time()
        while time.thread_time() < start + 0.002:
            pass
        self.spent.append(time.thread_time() - start)


def test_cpu_seconds_of_all_threads_add_up() -> None:
    file = BusyFile(SIZE)
    with ThreadEngine(3, 1, piece_bytes=8 * BLOCK_BYTES) as engine:
        start = time.process_time()
        engine.read([(file, 0, huge_page_buffer(SIZE))]).wait()
        read_seconds, process_seconds = engine.cpu_seconds, time.process_time() - start
        # All that the file took is in it, and nothing that the process did not take.
        assert len(file.spent) == 8
        assert sum(file.spent) <= read_seconds <= process_seconds + 0.01
        time.sleep(0.05)
        assert engine.cpu_seconds == read_seconds  # waiting costs nothing
        engine.write([(MemoryFile(SIZE), 0, random_bytes(SIZE))]).wait()
        assert engine.cpu_seconds > read_seconds
