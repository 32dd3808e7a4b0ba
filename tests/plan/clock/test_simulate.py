"""The virtual clock: bounds, order, sharing and steady state, on random programs and on ones small enough to do by hand."""

from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import machine

from headrace.plan.clock.simulate import Timed, Timeline, simulate
from headrace.terms.errors import ConfigError, StepFailed
from headrace.terms.lanes import Lane
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.program import Op, Program, Verb

VERBS = {
    Lane.COMPUTE: Verb.FORWARD,
    Lane.SSD_READ: Verb.FETCH,
    Lane.SSD_WRITE: Verb.WRITE_STATES,
    Lane.HOST_TO_DEVICE: Verb.UPLOAD,
    Lane.MAKE: Verb.MAKE,
    Lane.NIC_DOWN: Verb.PULL,
    Lane.NIC_UP: Verb.PUSH,
    Lane.DEVICE_TO_HOST: Verb.DRAIN,
    Lane.UPDATE: Verb.UPDATE,
    Lane.DEVICE_UPDATE: Verb.UPDATE,
    Lane.ATTENTION: Verb.ATTEND,
    Lane.ROUTER: Verb.ROUTE,
    Lane.COMMIT: Verb.COMMIT,
}
LANES = [str(lane) for lane in Lane]
RATES = ("compute", "read", "write", "inward", "outward", "update", "device")


def op(index: int, lane: Lane, work: float = 0, after: tuple[int, ...] = (), previous: tuple[int, ...] = ()) -> Op:
    flops, num_bytes = (float(work), 0) if lane is Lane.COMPUTE else (0.0, int(work))
    return Op(index=index, verb=VERBS[lane], lane=lane, bytes=num_bytes, flops=flops, after=after, after_previous=previous)


def program(*ops: tuple[Any, ...]) -> Program:
    return Program(tuple(op(index, *each) for index, each in enumerate(ops)))


@st.composite
def random_programs(draw: st.DrawFn) -> list[Program]:
    """Some consecutive programs: often the same one, as in the steady state."""
    same = draw(st.booleans())
    programs: list[Program] = []
    for _ in range(1 if same else draw(st.integers(3, 5))):
        size = draw(st.integers(1, 12))
        before = size if same else len(programs[-1].ops) if programs else 0
        ops = []
        for index in range(size):
            lane = draw(st.sampled_from(list(Lane)))
            after = draw(st.sets(st.integers(0, index - 1), max_size=3)) if index else set()
            previous = draw(st.sets(st.integers(0, before - 1), max_size=2)) if before else set()
            ops.append(op(index, lane, draw(st.integers(0, 20)) * 1e9, tuple(sorted(after)), tuple(sorted(previous))))
        programs.append(Program(tuple(ops)))
    return programs * 4 if same else programs


@st.composite
def machines(draw: st.DrawFn, sharing: bool) -> Ceilings:
    rates = {name: draw(st.floats(1e8, 1e10)) for name in RATES}
    if not sharing:
        return machine(**rates)
    # At half its rate each, two directions together still do as much as one after the other.
    share = st.floats(0.5, 1)
    return machine(
        **rates,
        mixed=draw(share) * (rates["read"] + rates["write"]),
        both_ways=draw(share) * (rates["inward"] + rates["outward"]),
        slowdowns={},
    )


any_machine = st.booleans().flatmap(machines)


def of(timeline: Timeline, number: int) -> list[Timed]:
    return [timed for timed in timeline.ops if timed.program == number]


@given(random_programs(), any_machine)
def test_every_operation_keeps_its_place(programs: list[Program], ceilings: Ceilings):
    timeline = simulate(programs, ceilings)
    number_of_programs = len(timeline.finish_seconds)
    free = dict.fromkeys(Lane, 0.0)
    for number in range(number_of_programs):
        timed = of(timeline, number)
        before = of(timeline, number - 1)
        for each in timed:
            assert each.start_seconds >= free[each.op.lane], "a lane does one thing at a time, in order"
            assert each.stop_seconds >= each.start_seconds
            free[each.op.lane] = each.stop_seconds
            assert all(each.start_seconds >= timed[ref].stop_seconds for ref in each.op.after)
            if number:
                assert all(each.start_seconds >= before[ref].stop_seconds for ref in each.op.after_previous)
            if number > 1:
                assert each.start_seconds >= timeline.finish_seconds[number - 2]
        assert timeline.finish_seconds[number] >= max(each.stop_seconds for each in timed)


@given(random_programs(), any_machine)
def test_nothing_waits_without_a_reason(programs: list[Program], ceilings: Ceilings):
    timeline = simulate(programs, ceilings)
    free = dict.fromkeys(Lane, 0.0)
    for number in range(len(timeline.finish_seconds)):
        timed, before = of(timeline, number), of(timeline, number - 1)
        for each in timed:
            reasons = [free[each.op.lane], *(timed[ref].stop_seconds for ref in each.op.after)]
            reasons += [before[ref].stop_seconds for ref in each.op.after_previous] if number else []
            reasons += [timeline.finish_seconds[number - 2]] if number > 1 else []
            assert each.start_seconds == max(reasons)
            free[each.op.lane] = each.stop_seconds


@given(random_programs(), any_machine)
def test_a_step_lies_between_its_busiest_lane_and_the_sum_of_all(programs: list[Program], ceilings: Ceilings):
    timeline = simulate(programs, ceilings)
    alone = [use.alone_seconds for use in timeline.lanes.values()]
    assert timeline.step_seconds >= max(alone)
    if timeline.settled and programs[-1] == programs[-2]:
        assert timeline.step_seconds <= sum(alone) * (1 + 1e-6)  # steps count as settled when they are alike
    for use in timeline.lanes.values():
        assert use.busy_seconds >= use.alone_seconds * (1 - 1e-9)
        assert 0 <= use.utilisation <= 1 + 1e-9


@given(random_programs(), machines(sharing=False))
def test_without_sharing_an_operation_takes_its_own_seconds(programs: list[Program], ceilings: Ceilings):
    timeline = simulate(programs, ceilings)
    assert sum(use.busy_seconds for use in timeline.lanes.values()) == pytest.approx(
        sum(use.alone_seconds for use in timeline.lanes.values())
    )


@st.composite
def crowded_machines(draw: st.DrawFn) -> Ceilings:
    """Machines on which everything may slow everything."""
    rates = {name: draw(st.floats(1e8, 1e10)) for name in RATES}
    share = st.floats(0.5, 1)
    slowdowns = draw(st.dictionaries(st.sampled_from(LANES), st.dictionaries(st.sampled_from(LANES), st.floats(0.2, 1))))
    return machine(
        **rates,
        mixed=draw(share) * (rates["read"] + rates["write"]),
        both_ways=draw(share) * (rates["inward"] + rates["outward"]),
        memory=draw(st.floats(1, 5)) * rates["update"],
        slowdowns={one: {other: kept for other, kept in others.items() if other != one} for one, others in slowdowns.items()},
    )


def speed_of(lane: Lane, busy: set[Lane], ceilings: Ceilings) -> float:
    """The share of its rate that `lane` keeps while all of `busy` are, from the words of the profile, one lane at a time."""
    rates = {
        Lane.SSD_READ: ceilings.ssd_read_bytes_per_second,
        Lane.SSD_WRITE: ceilings.ssd_write_bytes_per_second,
        Lane.HOST_TO_DEVICE: ceilings.host_to_device_bytes_per_second,
        Lane.DEVICE_TO_HOST: ceilings.device_to_host_bytes_per_second,
        Lane.UPDATE: ceilings.update_bytes_per_second,
        Lane.ATTENTION: ceilings.attention_bytes_per_second,
        Lane.NIC_DOWN: ceilings.network_bytes_per_second,
        Lane.NIC_UP: ceilings.network_bytes_per_second,
    }
    pairs = {
        (Lane.SSD_READ, Lane.SSD_WRITE): ceilings.ssd_mixed_bytes_per_second,
        (Lane.HOST_TO_DEVICE, Lane.DEVICE_TO_HOST): ceilings.both_ways_bytes_per_second,
    }

    def shared(one: Lane) -> float:
        pair = next((pair for pair in pairs if one in pair), ())
        return min(1.0, pairs[pair] / sum(rates[each] for each in pair)) if pair and busy.issuperset(pair) else 1.0

    def own(one: Lane) -> float:
        on_device = (Lane.COMPUTE, Lane.DEVICE_UPDATE, Lane.MAKE)
        unmeasured = {lane: {other: 0.5 for other in on_device if other is not lane} for lane in on_device}
        known = {**unmeasured.get(one, {}), **ceilings.slowdowns.get(one, {})}
        return shared(one) * prod(1 - (1 - known.get(other, 1.0)) * shared(other) for other in busy)

    moving = busy & rates.keys()
    traffic = sum(own(one) * rates[one] for one in moving)
    crowded = lane in moving and len(moving) > 1 and traffic > ceilings.host_memory_bytes_per_second
    return own(lane) * (ceilings.host_memory_bytes_per_second / traffic if crowded else 1.0)


@given(random_programs(), crowded_machines())
def test_each_operation_gets_its_work_done_at_the_speeds_of_the_profile(programs: list[Program], ceilings: Ceilings):
    timeline = simulate(programs, ceilings)
    timed = timeline.ops
    alone = [simulate([Program((replace(each.op, index=0, after=(), after_previous=()),))] * 3, ceilings) for each in timed]
    moments = sorted({moment for each in timed for moment in (each.start_seconds, each.stop_seconds)})
    done = [0.0] * len(timed)
    for start, stop in pairwise(moments):
        running = [index for index, each in enumerate(timed) if each.start_seconds <= start < each.stop_seconds]
        busy = {timed[index].op.lane for index in running}
        for index in running:
            done[index] += (stop - start) * speed_of(timed[index].op.lane, busy, ceilings)
    for index, one in enumerate(alone):
        assert done[index] == pytest.approx(one.ops[0].stop_seconds, rel=1e-6, abs=1e-9)


@given(random_programs(), any_machine)
def test_the_same_input_gives_the_same_timeline(programs: list[Program], ceilings: Ceilings):
    assert simulate(programs, ceilings) == simulate(list(programs), Ceilings.from_json(ceilings.to_json()))


@given(random_programs(), st.fixed_dictionaries({name: st.floats(1e8, 1e10) for name in RATES}), st.data())
def test_a_faster_lane_makes_nothing_later(programs: list[Program], rates: dict[str, float], data: st.DataObject):
    faster = {name: rate * data.draw(st.sampled_from([1, 1, 1.5, 10])) for name, rate in rates.items()}
    slow, fast = simulate(programs, machine(**rates)), simulate(programs, machine(**faster))
    for late, early in zip(slow.ops, fast.ops, strict=False):
        assert early.stop_seconds <= late.stop_seconds


@given(random_programs(), any_machine, st.sampled_from([0.5, 2.0, 8.0]))
def test_time_scales_with_the_machine(programs: list[Program], ceilings: Ceilings, factor: float):
    def scaled_rate(rate: Any) -> Any:
        if isinstance(rate, dict):
            return {name: scaled_rate(each) for name, each in rate.items()}
        return None if rate is None else rate * factor  # None: nobody measured it

    attended = ceilings.attention_bytes_per_second  # what is assumed where nobody measured it does not scale
    ceilings = replace(ceilings, host_memory_bytes_per_second=1e12, attended_bytes_per_second=attended)
    values = ceilings.to_json()
    for name in values:
        if "_per_second" in name:
            values[name] = scaled_rate(values[name])
    for drive in values["drives"]:
        for name in drive:
            if name.endswith("_per_second"):
                drive[name] *= factor
    scaled = simulate(programs, Ceilings.from_json(values))
    expected = simulate(programs, ceilings).step_seconds
    assert scaled.step_seconds * factor == pytest.approx(expected, rel=1e-6)


@given(random_programs(), any_machine)
def test_the_last_program_goes_on_only_if_it_repeats(programs: list[Program], ceilings: Ceilings):
    timeline = simulate(programs, ceilings)
    rounds = len(timeline.finish_seconds)
    if programs[-1] == programs[-2]:
        assert len(programs) < rounds <= len(programs) + 12
        assert timeline.measured == rounds - 2, "the measured step has a successor beside it"
    else:
        assert rounds == len(programs)
        assert timeline.measured == rounds - 1


# -- by hand ------------------------------------------------------------------------------------------------------------


def test_a_drive_is_shared_while_both_directions_run():
    # Alone: read 1 s, write 2 s. Together each keeps 9/15. The read is done after 1/0.6 s; by then the write has done one of
    # its two seconds, and needs one more at full speed.
    both = program((Lane.SSD_READ, 10e9, (), (1,)), (Lane.SSD_WRITE, 10e9))
    timeline = simulate([both] * 3, machine(read=10e9, write=5e9, mixed=9e9))
    read, write = of(timeline, 0)
    assert read.stop_seconds == pytest.approx(1 / 0.6)
    assert write.stop_seconds == pytest.approx(1 / 0.6 + 1)


def test_a_full_duplex_drive_is_not_slowed():
    both = program((Lane.SSD_READ, 10e9), (Lane.SSD_WRITE, 10e9))
    assert simulate([both] * 3, machine(read=10e9, write=5e9)).step_seconds == pytest.approx(2)


def test_drives_are_pooled():
    drive = {"read_bytes_per_second": 4e9, "write_bytes_per_second": 2e9, "mixed_bytes_per_second": 6e9, "capacity_bytes": 1}
    timeline = simulate([program((Lane.SSD_READ, 12e9))] * 3, machine(drives=[drive] * 3))
    assert timeline.step_seconds == pytest.approx(1)


def test_lanes_that_share_cores_slow_one_another_as_stated():
    both = program((Lane.COMPUTE, 1e12, (), (1,)), (Lane.UPDATE, 40e9))
    slowdowns = {"compute": {"update": 0.5}, "update": {"compute": 0.25}}
    first = of(simulate([both] * 3, machine(slowdowns=slowdowns)), 0)
    # Compute needs 2 s at half speed; by then the update has done half of its second and goes on at full speed.
    assert [timed.stop_seconds for timed in first] == [pytest.approx(2), pytest.approx(2.5)]


def test_what_moves_half_as_much_disturbs_half_as_much():
    drive = {"read_bytes_per_second": 4e9, "write_bytes_per_second": 4e9, "mixed_bytes_per_second": 4e9, "capacity_bytes": 1}
    ceilings = machine(drives=[drive], slowdowns={"compute": {"ssd-read": 0.6}})
    alone = program((Lane.COMPUTE, 6e11), (Lane.SSD_READ, 40e9))
    shared = program((Lane.COMPUTE, 8e11), (Lane.SSD_READ, 40e9), (Lane.SSD_WRITE, 40e9))
    assert of(simulate([alone] * 3, ceilings), 0)[0].stop_seconds == pytest.approx(1)
    assert of(simulate([shared] * 3, ceilings), 0)[0].stop_seconds == pytest.approx(1)


def test_an_update_on_the_device_uses_its_memory_and_neither_cores_nor_the_hosts_bus():
    slowdowns = {"update": {"host-to-device": 0.5}, "host-to-device": {"update": 0.5}}
    ceilings = machine(update=10e9, memory=10e9, inward=10e9, device=20e9, launch_seconds=0.25, slowdowns=slowdowns)
    both = program((Lane.DEVICE_UPDATE, 20e9), (Lane.UPDATE, 10e9))
    timeline = simulate([both, both, Program(())], ceilings)
    assert timeline.ops[0].stop_seconds == pytest.approx(1.25)  # a launch, and its bytes
    assert timeline.ops[1].stop_seconds == pytest.approx(1.0)


def test_an_unmeasured_device_updates_at_the_rate_of_the_slowest():
    one = program((Lane.DEVICE_UPDATE, 150e9))
    assert simulate([one] * 3, machine(device_memory_bytes_per_second=None)).step_seconds == pytest.approx(1.0)


def test_compute_and_updates_on_the_device_take_turns_unless_the_profile_knows_better():
    both = program((Lane.COMPUTE, 1e12), (Lane.DEVICE_UPDATE, 1e12))
    assert simulate([both] * 4, machine(slowdowns={})).step_seconds == pytest.approx(2.0)
    assert simulate([both] * 4, machine()).step_seconds == pytest.approx(1.0)


def test_the_memory_bus_bounds_what_all_lanes_move_together():
    lanes = program((Lane.SSD_READ, 10e9), (Lane.HOST_TO_DEVICE, 20e9), (Lane.UPDATE, 40e9), (Lane.COMPUTE, 1e12))
    first = of(simulate([lanes] * 3, machine(memory=42e9)), 0)
    # Each would take 1 s alone; 70 GB/s are asked for, 42 are there. Compute reads device memory.
    assert [timed.stop_seconds for timed in first[:3]] == [pytest.approx(70 / 42)] * 3
    assert first[3].stop_seconds == pytest.approx(1)


def test_steps_overlap_by_one_but_not_by_two():
    # Compute is 1 s, the write behind it 4 s, and nothing ties the next step's compute to it.
    step = program((Lane.COMPUTE, 1e12), (Lane.SSD_WRITE, 20e9, (0,)))
    timeline = simulate([step] * 3, machine())
    assert timeline.step_seconds == pytest.approx(4)
    starts = [of(timeline, number)[0].start_seconds for number in range(3)]
    assert starts == [0, pytest.approx(1), pytest.approx(5)], "step 2 starts when step 0 is complete"
    assert timeline.bottleneck is Lane.SSD_WRITE
    assert timeline.explanation == "limited by SSD writes: busy 100% of the step"


def test_a_barrier_between_steps_is_kept():
    step = program((Lane.COMPUTE, 1e12, (), (1,)), (Lane.SSD_WRITE, 20e9, (0,)))
    timeline = simulate([step] * 3, machine())
    assert timeline.step_seconds == pytest.approx(5)
    assert timeline.explanation.startswith("no part is busy all the time: the most is SSD writes with 80%")


def test_directions_in_turn_are_named_together():
    # Each direction is busy half of the time; the drive always.
    step = program((Lane.SSD_READ, 10e9, (), (1,)), (Lane.SSD_WRITE, 5e9, (0,)))
    timeline = simulate([step] * 3, machine(mixed=10e9))
    assert timeline.explanation == "limited by SSD reads and writes, which share the drives: busy 100% of the step"


def test_a_backlog_of_the_cold_start_does_not_flatter_the_step():
    # The first program's write is long and delays the end of the second; the third's compute is hidden behind it.
    first = program((Lane.SSD_WRITE, 50e9), (Lane.COMPUTE, 1e12))
    later = program((Lane.SSD_WRITE, 5e9), (Lane.COMPUTE, 5e12))
    timeline = simulate([first, later, later], machine())
    assert timeline.step_seconds == pytest.approx(5)


def test_overheads_are_added_per_operation():
    ops = program(*[(Lane.COMPUTE, 0)] * 10, *[(Lane.SSD_READ, 0)] * 20, (Lane.COMMIT,))
    timeline = simulate([ops] * 3, machine(launch_seconds=0.1, transfer_seconds=0.2, commit_seconds=0.5))
    assert timeline.lanes[Lane.COMPUTE].busy_seconds == pytest.approx(1)
    assert timeline.lanes[Lane.SSD_READ].busy_seconds == pytest.approx(4)
    assert timeline.lanes[Lane.COMMIT].busy_seconds == pytest.approx(0.5)


def test_threads_limit_the_cpu():
    step = program((Lane.COMPUTE, 1e12), (Lane.UPDATE, 40e9))
    cpu = machine(has_device=False, device_memory_bytes=0)
    assert simulate([step] * 3, cpu, update_threads=1).lanes[Lane.UPDATE].busy_seconds == pytest.approx(4)
    assert simulate([step] * 3, cpu, update_threads=64).lanes[Lane.UPDATE].busy_seconds == pytest.approx(1)
    assert simulate([step] * 3, cpu, compute_threads=2).lanes[Lane.COMPUTE].busy_seconds == pytest.approx(4)
    assert simulate([step] * 3, machine(), compute_threads=2).lanes[Lane.COMPUTE].busy_seconds == pytest.approx(1)


def test_work_of_a_step_is_counted():
    step = program((Lane.COMPUTE, 3e12), (Lane.SSD_READ, 7e9), (Lane.SSD_READ, 2e9))
    lanes = simulate([step] * 3, machine()).lanes
    assert lanes[Lane.COMPUTE].flops == 3e12
    assert lanes[Lane.SSD_READ].bytes == 9e9


def test_empty_programs_take_no_time():
    timeline = simulate([Program(())] * 3, machine())
    assert timeline.step_seconds == 0
    assert timeline.ops == ()


@pytest.mark.parametrize(
    "broken",
    [
        Program((op(0, Lane.COMPUTE, 1, (0,)),)),
        Program((op(0, Lane.COMPUTE, 1, (1,)), op(1, Lane.UPDATE))),
        Program((op(0, Lane.COMPUTE, 1, (-1,)),)),
        Program((op(0, Lane.COMPUTE, 1, (), (7,)),)),
        Program((op(5, Lane.COMPUTE),)),
    ],
    ids=["itself", "forward", "negative", "previous", "number"],
)
def test_a_program_that_could_not_run_is_refused(broken: Program):
    with pytest.raises(StepFailed, match="forward"):
        simulate([broken] * 3, machine())


def test_too_few_programs_are_refused():
    with pytest.raises(ValueError, match="at least 3"):
        simulate([Program(())] * 2, machine())


def test_an_unmeasured_dtype_is_refused():
    with pytest.raises(ConfigError, match="float16"):
        simulate([Program(())] * 3, machine(), compute_dtype="float16")


@settings(deadline=None)
@given(st.integers(1, 7))
def test_work_grows_with_the_operations_not_with_their_square(lanes: int):
    """A last operation that waits for all others is looked at once per dependency, not once per event."""
    chosen = list(Lane)[:lanes]
    looks = 0

    class Counting(tuple):  # type: ignore[type-arg]
        def __getitem__(self, place):  # type: ignore[no-untyped-def]
            nonlocal looks
            looks += 1
            return super().__getitem__(place)

    ops = [op(index, chosen[index % lanes], 1e9) for index in range(400)]
    last = op(400, Lane.COMMIT, 0, Counting(range(400)))
    simulate([Program((*ops, last))] * 3, machine())
    assert looks <= 3 * 3 * 401 * 8


def test_a_hundred_thousand_operations_are_quick():
    lanes = list(Lane)[:6]
    ops = tuple(op(index, lanes[index % 6], 1e6, (index - 1,) if index % 7 == 1 else ()) for index in range(25_000))
    timeline = simulate([Program(ops)] * 4, machine(mixed=10e9))
    assert len(timeline.ops) >= 100_000
