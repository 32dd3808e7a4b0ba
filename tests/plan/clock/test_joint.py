"""Programs of several machines on one clock, against a simulation that is as plain as can be, and by hand."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import machine

from headrace.peers.node.joint import RankedOp, simulate_joint
from headrace.peers.node.links import Link, Network
from headrace.plan.clock.rates import Rates
from headrace.terms.errors import StepFailed
from headrace.terms.lanes import Lane
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.program import Op, Program, Verb

GB = 10**9
WORKER_LANES = (Lane.COMPUTE, Lane.HOST_TO_DEVICE, Lane.DEVICE_TO_HOST)
NODE_LANES = (Lane.SSD_READ, Lane.SSD_WRITE, Lane.UPDATE)
ENDS = {Lane.NIC_DOWN: (Verb.PULL, Verb.SEND), Lane.NIC_UP: (Verb.PUSH, Verb.RECEIVE)}


def rates_of(ceilings: Ceilings) -> Rates:
    return Rates(ceilings, "bfloat16", None, None)


def op(index: int, verb: Verb, lane: Lane, work: int, after: tuple[int, ...] = (), previous: tuple[int, ...] = ()) -> Op:
    flops, num_bytes = (float(work), 0) if lane is Lane.COMPUTE else (0.0, work)
    return Op(index=index, verb=verb, lane=lane, unit=0, bytes=num_bytes, flops=flops, after=after, after_previous=previous)


@st.composite
def steps(draw: st.DrawFn) -> tuple[Program, ...]:
    """Draw the programs of some workers and a node: transfers in one order, and anything else between them."""
    transfers = draw(st.lists(st.tuples(st.sampled_from(list(ENDS)), st.integers(0, 20)), min_size=1, max_size=6))
    programs = []
    for end in (*[0] * draw(st.integers(1, 3)), 1):
        ops: list[Op] = []
        size = len(transfers) + draw(st.integers(0, 6))
        places = sorted(draw(st.permutations(range(size)))[: len(transfers)])
        left = iter(transfers)
        for index in range(size):
            after = tuple(sorted(draw(st.sets(st.integers(0, index - 1), max_size=2)))) if index else ()
            previous = tuple(sorted(draw(st.sets(st.integers(0, size - 1), max_size=1))))
            if index in places:
                lane, work = next(left)
                ops.append(op(index, ENDS[lane][end], lane, work * GB, after, previous))
            else:
                lane = draw(st.sampled_from(NODE_LANES if end else WORKER_LANES))
                ops.append(op(index, Verb.UPDATE, lane, draw(st.integers(0, 20)) * GB, after, previous))
        programs.append(Program(tuple(ops)))
    return tuple(programs)


class Plain:
    """One step after another of several machines, event by event, with everything looked at again each time."""

    def __init__(self, programs: tuple[Program, ...], count: int, seconds: Any, link: float, workers: int) -> None:
        self.programs, self.count, self.seconds, self.link, self.workers = programs, count, seconds, link, workers
        self.left: dict[tuple[int, int, int], float] = {}  # of those under way: the work
        self.start: dict[tuple[int, int, int], float] = {}
        self.stop: dict[tuple[int, int, int], float] = {}

    def run(self) -> None:
        now, total = 0.0, self.count * sum(len(program.ops) for program in self.programs)
        while len(self.stop) < total:
            while self.begin_some(now):
                pass
            lanes = {self.lane(key) for key in self.left}
            both = {Lane.NIC_DOWN, Lane.NIC_UP} <= lanes
            speed = {key: 1 / (2 - 1 / self.workers) if both and self.lane(key) in ENDS else 1.0 for key in self.left}
            pause = min(self.left[key] / speed[key] for key in self.left)
            now += pause
            for key in list(self.left):
                self.left[key] -= pause * speed[key]
                if self.left[key] <= 1e-9:
                    self.stop[key] = now
                    del self.left[key]

    def lane(self, key: tuple[int, int, int]) -> Lane:
        return self.programs[key[1]].ops[key[2]].lane

    def may_start(self, key: tuple[int, int, int]) -> bool:
        number, rank, index = key
        ops = self.programs[rank].ops
        if key in self.start or (number > 1 and not self.is_done(number - 2)):
            return False
        before = [(number, rank, each.index) for each in ops[:index] if each.lane is ops[index].lane]
        before += [(earlier, rank, each.index) for earlier in range(number) for each in ops if each.lane is ops[index].lane]
        before += [(number, rank, ref) for ref in ops[index].after]
        if number:
            before += [(number - 1, rank, ref) for ref in ops[index].after_previous]
        return all(each in self.stop for each in before)

    def is_done(self, number: int) -> bool:
        return all(
            (number, rank, each.index) in self.stop for rank, program in enumerate(self.programs) for each in program.ops
        )

    def begin_some(self, now: float) -> bool:
        begun = False
        for number in range(self.count):
            for rank, program in enumerate(self.programs):
                for each in program.ops:
                    keys = self.meeting(number, rank, each.index)
                    if all(self.may_start(key) for key in keys):
                        for key in keys:
                            self.start[key], self.left[key] = now, self.seconds(key[1], self.programs[key[1]].ops[key[2]])
                        begun = True
        return begun

    def meeting(self, number: int, rank: int, index: int) -> list[tuple[int, int, int]]:
        if self.programs[rank].ops[index].lane not in ENDS:
            return [(number, rank, index)]
        nth = sum(each.lane in ENDS for each in self.programs[rank].ops[:index])
        return [
            (number, other, [each.index for each in program.ops if each.lane in ENDS][nth])
            for other, program in enumerate(self.programs)
        ]


@pytest.mark.wide
@given(steps())
@settings(max_examples=25)
def test_as_a_plain_simulation_has_it(programs: tuple[Program, ...]):
    worker, node, link = machine(), machine(has_device=False, device_memory_bytes=0), 3 * GB
    workers = len(programs) - 1
    rates = [rates_of(worker)] * workers + [rates_of(node)]
    network = Network(workers=workers, worker_link=Link.duplex(link), node_link=Link.duplex(link))
    found = simulate_joint([programs] * 3, rates, network)

    def seconds(rank: int, each: Op) -> float:
        return each.bytes / link if each.lane in ENDS else rates[rank].alone_seconds(each)

    measured = found.ops[0].program
    plain = Plain(programs, measured + 2, seconds, link, workers)
    plain.run()
    for rank, program in enumerate(programs):
        for timed, each in zip(found.of_rank(rank), program.ops, strict=True):
            key = measured, rank, each.index
            assert timed.start_seconds == pytest.approx(plain.start[key], abs=1e-6)
            assert timed.stop_seconds == pytest.approx(plain.stop[key], abs=1e-6)


@given(steps(), st.integers(1, 4))
@settings(max_examples=20)
def test_one_of_workers_that_are_alike_stands_for_all(programs: tuple[Program, ...], workers: int):
    one, node = programs[0], programs[-1]
    network = Network(workers=workers, worker_link=Link.duplex(2 * GB), node_link=Link.duplex(3 * GB))
    rates = rates_of(machine(mixed=12e9, both_ways=30e9))
    each = simulate_joint([(one,) * workers + (node,)] * 3, [rates] * (workers + 1), network)
    alone = simulate_joint([(one, node)] * 3, [rates] * 2, network)
    assert alone.step_seconds == each.step_seconds
    for rank in range(workers):
        assert [timed.start_seconds for timed in each.of_rank(rank)] == [timed.start_seconds for timed in alone.of_rank(0)]


@given(steps())
@settings(max_examples=20)
def test_who_meets_begins_and_ends_at_once(programs: tuple[Program, ...]):
    network = Network(workers=len(programs) - 1, worker_link=Link.duplex(GB), node_link=Link.duplex(2 * GB))
    found = simulate_joint([programs] * 3, [rates_of(machine())] * len(programs), network)
    spans: dict[int, set[tuple[float, float]]] = {}
    for timed in found.ops:
        if isinstance(timed.op, RankedOp) and timed.op.meeting >= 0:
            spans.setdefault(timed.op.meeting, set()).add((timed.start_seconds, timed.stop_seconds))
    assert all(len(times) == 1 for times in spans.values())


def test_a_slow_worker_holds_up_all_at_each_transfer():
    def worker(work: int) -> Program:
        return Program((op(0, Verb.PULL, Lane.NIC_DOWN, GB), op(1, Verb.FORWARD, Lane.COMPUTE, work, (0,), (1,))))

    node = Program((op(0, Verb.SEND, Lane.NIC_DOWN, GB),))
    network = Network(workers=2, worker_link=Link.duplex(GB), node_link=Link.duplex(GB))
    rates = [rates_of(machine(compute=1e12))] * 3
    found = simulate_joint([(worker(10**12), worker(5 * 10**12), node)] * 3, rates, network)
    assert found.step_seconds == pytest.approx(5.0)  # the next step but one starts when this one is complete


def test_machines_that_do_not_meet_are_refused():
    pull, push = op(0, Verb.PULL, Lane.NIC_DOWN, GB), op(0, Verb.PUSH, Lane.NIC_UP, GB)
    send = op(0, Verb.SEND, Lane.NIC_DOWN, GB)
    network = Network(workers=1, worker_link=Link.duplex(GB), node_link=Link.duplex(GB))
    for worker in (Program((push,)), Program(()), Program((op(0, Verb.PULL, Lane.NIC_DOWN, 2 * GB),))):
        with pytest.raises(StepFailed, match="machines 0 and 1 do not meet"):
            simulate_joint([(worker, Program((send,)))] * 3, [rates_of(machine())] * 2, network)
    simulate_joint([(Program((pull,)), Program((send,)))] * 3, [rates_of(machine())] * 2, network)
