"""Rates are what they claim, together and alone; a quick look at this machine gives a profile that plans can use."""

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.codec.table import CODES
from headrace.machine.cpu import CpuMachine
from headrace.measure.compute_loads import AttentionLoad, BlockLoad, HeadLoad, fitted_rates
from headrace.measure.decoding import decoded_per_second
from headrace.measure.drives import DriveFile, DriveLoad, best_setting, try_settings
from headrace.measure.loads import in_order, interleaved, rate_of, rates_together, seconds_taken
from headrace.measure.machine import measure_machine
from headrace.measure.memory_loads import DrainLoad, StreamLoad, UpdateBuffers, UpdateLoad
from headrace.model import profile
from headrace.terms.errors import ConfigError, StorageError
from headrace.terms.events import Event, Notice
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.machine.drives import InFlight


class Clock(threading.local):
    """A clock that stands still but for the work of its thread."""

    seconds = 0.0


class Paced:
    """Does `amount` in `seconds` of its thread's clock, after `until` returned."""

    def __init__(self, clock: Clock, seconds: float, amount: float = 1.0, until: Callable[[], object] = lambda: None) -> None:
        self.clock, self.seconds, self.amount, self.until, self.units = clock, seconds, amount, until, 0
        self.done = threading.Semaphore(0)

    def unit(self) -> float:
        self.until()
        self.units += 1
        self.clock.seconds += self.seconds
        self.done.release()
        return self.amount


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: made.seconds)
    return made


class Broken:
    def unit(self) -> float:
        raise OSError("no such drive")


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_time_that_is_none_or_never_ends_is_refused(seconds: float, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="bench machine"):
        measure_machine([tmp_path], seconds_budget=seconds)


@pytest.mark.parametrize("seconds", [1 / 64, 1 / 4, 3.0])
def test_a_rate_is_amount_over_time(seconds: float, clock: Clock) -> None:
    assert rate_of(Paced(clock, seconds, 5.0), 0.1) == 5.0 / seconds


def test_the_quicker_load_goes_on_until_the_slower_is_done(clock: Clock) -> None:
    quick = Paced(clock, 1 / 256)
    slow = Paced(clock, 1 / 4, until=lambda: [quick.done.acquire() for _ in range(64)])
    assert rates_together([quick, slow], 1 / 64) == [256, 4]
    assert quick.units >= 64, "it ran beside the slow one's whole unit"


def test_an_error_ends_all_loads_and_is_raised(clock: Clock) -> None:
    with pytest.raises(OSError, match="no such drive"):
        rates_together([Paced(clock, 0.0), Broken()], 60.0)


def test_a_pair_follows_what_it_is_held_against() -> None:
    order = in_order(["stream", "read", "write", "compute"], [("compute", "read"), ("read", "write")])
    assert order == [("stream",), ("read",), ("write",), ("read", "write"), ("compute",), ("compute", "read")]


def test_rounds_are_interleaved_and_medians_taken() -> None:
    calls: list[Sequence[str]] = []
    values = {"a": iter([1.0, 100.0, 3.0]), "b": iter([7.0, 8.0, 9.0])}

    def measure(names: Sequence[str]) -> list[float]:
        calls.append(names)
        return [next(values[name]) for name in names]

    found = interleaved(measure, [("a",), ("b",)], 3)
    assert found.rates == {"a": 3.0, "b": 8.0}
    assert calls == [("a",), ("b",)] * 3


@given(st.lists(st.floats(0.1, 10), min_size=3, max_size=3))
def test_what_a_pair_keeps_does_not_depend_on_how_fast_the_machine_is_in_each_round(speeds: list[float]) -> None:
    alone, kept = {"read": 4.0, "write": 6.0}, {"read": 0.4, "write": 0.7}
    rounds = iter([speed for speed in speeds for _ in range(3)])  # two alone and the pair

    def measure(names: Sequence[str]) -> list[float]:
        speed = next(rounds)
        return [speed * alone[name] * (kept[name] if len(names) == 2 else 1.0) for name in names]

    found = interleaved(measure, in_order(["read", "write"], [("read", "write")]), 3)
    assert found.shares == {("read", "write"): pytest.approx((0.4, 0.7))}
    assert found.rates["write"] == pytest.approx(6.0 * statistics.median(speeds))


@pytest.mark.parametrize(("deadline", "taken"), [(0.0, (1, 1)), (2.5, (2, 1)), (4.0, (2, 2)), (60.0, (3, 3))])
def test_what_would_begin_too_late_is_left_out_after_the_first_round(
    deadline: float, taken: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, values = {"a": 0, "b": 0}, [1.0, 3.0, 2.0]

    def measure(names: Sequence[str]) -> list[float]:
        counts[names[0]] += 1
        return [values[counts[names[0]] - 1]]

    monkeypatch.setattr(time, "perf_counter", lambda: float(sum(counts.values())))  # each measure takes a second
    found = interleaved(measure, [("a",), ("b",)], 3, deadline=deadline)
    assert tuple(counts.values()) == taken
    assert tuple(found.rates.values()) == tuple(statistics.median(values[:count]) for count in taken)


def test_the_first_time_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, now = iter([30.0, 3.0, 1.0, 2.0]), 0.0

    def work() -> None:
        nonlocal now
        now += next(waits)

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    assert seconds_taken(work, 3) == 2.0


def test_a_block_counts_forward_recompute_and_backward() -> None:
    load = BlockLoad(CpuMachine(), "float32", hidden_size=64, tokens=32)
    # Products of the projections and the MLP alone, four times over; attention comes on top.
    products = 2 * 32 * (4 * 64 * 64 + 3 * 64 * 172)
    assert load.unit() == load.flops
    assert 4 * products < load.flops < 4 * products * 1.3
    assert profile(load._chain, 1, 32).blocks[0].forward_flops * 4 == load.flops


def test_attention_is_counted_as_the_planner_counts_it() -> None:
    block = BlockLoad(CpuMachine(), "bfloat16", hidden_size=128, tokens=32)
    attention = AttentionLoad(CpuMachine(), (1, 2, 32, 64))
    assert attention.unit() == attention.flops == block.flops - block.product_flops > 0


def test_a_head_counts_logits_and_three_products() -> None:
    load = HeadLoad(CpuMachine(), hidden_size=64, tokens=8)
    assert load.unit() == load.flops == 3 * 2 * 8 * load.logits / 8 * 64
    # Some versions of transformers multiply matrices for rotary tables, too.
    assert profile(load._chain, 1, 8).epilogue_flops_per_token * 3 * 8 == pytest.approx(load.flops, rel=1e-4)


@given(st.lists(st.tuples(st.floats(1, 1e6), st.floats(1, 1e6)), min_size=3, max_size=6), st.floats(0, 1), st.floats(0, 1))
@example([(1.0, 1.0), (1.0, 1.0), (4.0, 1.0)], 0.0, 2.2250738585072014e-308)
def test_seconds_of_two_kinds_of_work_are_told_apart(amounts: list[tuple[float, float]], one: float, other: float) -> None:
    seconds = [one * first + other * second for first, second in amounts]
    found = fitted_rates(amounts, seconds)
    assert min(found) >= 0
    for (first, second), taken in zip(amounts, seconds, strict=True):
        assert found[0] * first + found[1] * second == pytest.approx(taken, rel=1e-5, abs=1e-12)


def test_no_kind_of_work_takes_less_than_no_time() -> None:
    # Twice the first kind took less than once: a straight fit would pay back with the second.
    assert fitted_rates([(1.0, 1.0), (2.0, 1.0)], [2.0, 1.0]) == pytest.approx((0.0, 1.2))
    assert fitted_rates([(1.0, 2.0)], [0.0]) == (0.0, 0.0)
    assert fitted_rates([(4.0, 0.0)], [2.0]) == (0.5, 0.0)


@given(st.floats(1, 1e12), st.floats(1, 1e12), st.floats(1e-6, 1e6))
def test_one_sample_is_explained_by_the_first_kind_alone(first: float, second: float, taken: float) -> None:
    assert fitted_rates([(first, second)], [taken]) == (pytest.approx(taken / first), 0.0)


def test_memory_loads_count_what_crosses_the_bus() -> None:
    buffers = UpdateBuffers(4096)
    before = buffers.states[0].copy()  # what bfloat16 leaves of the weights
    update = UpdateLoad(buffers, 2)
    stream = StreamLoad(1 << 16, 2)
    assert update.unit() == 26 * 4096
    assert (buffers.states[0] != before).any()
    assert stream.unit() == 2 << 16
    assert DrainLoad(40000).unit() == 80000
    update.close()
    stream.close()


def test_the_update_is_measured_on_numbers_as_training_has_them() -> None:
    # With subnormal numbers some processors take ten times as long: 1.3 GB/s were measured instead of 12.
    buffers = UpdateBuffers(4096)
    update = UpdateLoad(buffers, 1)
    for _ in range(3):
        lo, m, v = buffers.states
        gradient = buffers.gradient.astype(np.uint32) << 16
        weight = (buffers.weight.astype(np.int64) << 16) + lo
        for values in (gradient.view(np.float32), weight.astype(np.uint32).view(np.float32), m, v):
            assert (np.abs(values) > 1e-4).all()
            assert (np.abs(values) < 1e4).all()
        update.unit()
    update.close()


def test_a_drive_is_read_and_written_and_left_clean(tmp_path: Path) -> None:
    with DriveFile(tmp_path, 64 << 20) as drive:
        drive.fill()
        assert list(tmp_path.iterdir()) == []  # so that a killed process leaves nothing
        assert drive.capacity_bytes > 64 << 20
        assert DriveLoad([drive], write=False).unit() == DriveLoad([drive, drive], write=True).unit() / 2 == 64 << 20
        assert 0 < drive.transfer_seconds() < 10
        assert 0 < drive.commit_seconds() < 10
    assert list(tmp_path.iterdir()) == []


def setting(threads: int, mebibytes: int) -> InFlight:
    return InFlight(threads=threads, piece_bytes=mebibytes << 20)


def test_the_largest_pieces_within_three_percent_of_the_best_are_chosen() -> None:
    rates = {setting(8, 8): 1000.0, setting(4, 16): 969.0, setting(4, 8): 975.0, setting(2, 8): 960.0}
    assert best_setting(rates) == setting(4, 8)  # largest pieces first, then the fewest threads
    assert best_setting(rates | {setting(8, 16): 980.0}) == setting(8, 16)
    assert best_setting(rates | {setting(8, 16): 980.0, setting(1, 16): 971.0}) == setting(1, 16)
    assert best_setting(rates | {setting(1, 4): 999.0}) == setting(4, 8)
    assert best_setting({setting(8, 16): 3.0}) == setting(8, 16)


def test_settings_are_tried_in_turn_and_medians_taken() -> None:
    now, order = 0.0, list[InFlight]()
    small, large = setting(1, 4), setting(8, 16)
    rates = {small: iter([5.0, 100.0, 7.0]), large: iter([50.0, 60.0, 1.0])}

    def rate(tried: InFlight) -> float:
        nonlocal now
        now += 1.0
        order.append(tried)
        return next(rates[tried])

    assert try_settings([small, large], rate, 100.0, lambda: now) == {small: 7.0, large: 50.0}
    assert order == [small, large] * 3


def test_further_rounds_need_time_and_the_first_is_always_done() -> None:
    now = 0.0

    def rate(tried: InFlight) -> float:
        nonlocal now
        now += 1.0
        return now

    small, large = setting(1, 4), setting(8, 16)
    assert try_settings([small, large], rate, 0.0, lambda: now) == {small: 1.0, large: 2.0}
    now = 0.0
    assert try_settings([small, large], rate, 5.9, lambda: now) == {small: 2.0, large: 3.0}  # room for two rounds of 2 s


def test_a_drive_is_tuned_and_measured_with_its_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DriveFile(tmp_path, 64 << 20) as drive:
        drive.fill()
        assert drive.cpu_seconds_per_gigabyte > 0
        told: list[InFlight] = []
        monkeypatch.setattr(drive.engine, "keep_in_flight", told.append)
        monkeypatch.setattr("headrace.measure.drives._CHUNK_BYTES", 1 << 20)
        chosen = drive.tune(0.0)
        assert len(told) == len(set(told[:-1])) + 1
        assert told[-1] == drive.setting == chosen
        assert chosen in told[:-1]
        assert drive.cpu_seconds_per_gigabyte == 0  # nothing was moved since
        DriveLoad([drive], write=False, transfers=1, transfer_bytes=1 << 20).unit()
        assert drive.cpu_seconds_per_gigabyte > 0


def test_a_load_keeps_as_much_under_way_as_the_setting_asks_for(tmp_path: Path) -> None:
    with DriveFile(tmp_path, 256 << 20) as drive:
        drive.setting = setting(8, 16)
        assert DriveLoad([drive], write=True).unit() == 128 << 20
        drive.setting = setting(1, 4)
        assert DriveLoad([drive], write=True).unit() == 64 << 20


def test_each_kind_of_code_has_a_rate() -> None:
    found = decoded_per_second()
    assert found.keys() == {code.kind for code in CODES.values()}
    assert all(1e5 < rate < 1e12 for rate in found.values())


def test_a_quick_look_gives_a_profile(tmp_path: Path) -> None:
    told: list[Event] = []
    ceilings = measure_machine([tmp_path], seconds_budget=1.0, sink=told.append)
    assert Ceilings.from_json(ceilings.to_json()) == ceilings
    assert ceilings.flops_per_second.keys() >= {"bfloat16", "float32"}
    assert "rough" in ceilings.sources["all figures"]
    assert ceilings.sources["drives[0]"] == str(tmp_path)
    assert len(ceilings.drives) == 1
    assert not ceilings.drives[0].is_tuned
    assert (ceilings.drives[0].io_cpu_seconds_per_gigabyte or 0) > 0
    assert ceilings.launch_seconds > 0
    assert ceilings.commit_seconds > 0
    assert len(told) >= 4
    assert all(isinstance(event, Notice) and event.level == "info" for event in told)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="0 SSD directories"):
        measure_machine([])
    with pytest.raises(StorageError, match="no such directory"):
        measure_machine([tmp_path / "nowhere"])
