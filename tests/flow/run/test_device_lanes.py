"""Lanes whose work is finished by a device later than it is issued: waits, bounded run-ahead, and times of the device.

A machine that plays a GPU: each device lane is a thread that works through a queue; marks are set as it comes by.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import pytest

from headrace.flow.run.execute import Interpreter, OverlappedInterpreter, PlainInterpreter
from headrace.machine.cpu import CpuMachine
from headrace.terms.events import OpDone
from headrace.terms.lanes import Lane
from headrace.terms.program import Op, Program, Verb

DEVICE_LANES = (Lane.COMPUTE, Lane.HOST_TO_DEVICE, Lane.DEVICE_TO_HOST, Lane.DEVICE_UPDATE)
WORK_SECONDS = 0.01


class Mark:
    def __init__(self) -> None:
        self.reached = threading.Event()
        self.at = 0.0

    def set(self) -> None:
        self.at = time.perf_counter()
        self.reached.set()

    def synchronize(self) -> None:
        assert self.reached.wait(200), "a mark that is never reached"

    def reached_seconds(self) -> float:
        assert self.reached.is_set(), "asked for the time of a mark that is not reached"
        return self.at


class SlowDevice(CpuMachine):
    """Work put into a lane with `later` is done by the lane's own thread, in order."""

    def __init__(self) -> None:
        super().__init__(separate_device=True)
        self.queues: dict[Lane, SimpleQueue[Callable[[], object] | None]] = {lane: SimpleQueue() for lane in DEVICE_LANES}
        self.threads = [threading.Thread(target=self._work, args=(queue,)) for queue in self.queues.values()]
        for thread in self.threads:
            thread.start()

    def _work(self, queue: "SimpleQueue[Callable[[], object] | None]") -> None:
        while (job := queue.get()) is not None:
            job()

    def later(self, lane: Lane, job: Callable[[], object]) -> None:
        self.queues[lane].put(job)

    def record(self, lane: Lane) -> Mark | None:
        if lane not in self.queues:
            return None
        mark = Mark()
        self.later(lane, mark.set)
        return mark

    def wait(self, event: Mark, lane: Lane) -> None:  # type: ignore[override]
        if lane in self.queues:
            self.later(lane, event.synchronize)
        else:
            event.synchronize()

    def close(self) -> None:
        for queue in self.queues.values():
            queue.put(None)
        for thread in self.threads:
            thread.join()


@contextmanager
def running(kind: type[Interpreter], sink: Callable[[object], None] | None = None) -> Iterator[tuple[SlowDevice, Interpreter]]:
    machine = SlowDevice()
    interpreter = kind(machine, sink)
    try:
        yield machine, interpreter
    finally:
        interpreter.close()
        machine.close()


def program_of(lanes: list[Lane]) -> Program:
    """A chain over the lanes: each operation after the one two before it."""
    return Program(
        tuple(
            Op(index=index, verb=Verb.FETCH, lane=lane, unit=index, after=(index - 2,) if index > 1 else ())
            for index, lane in enumerate(lanes)
        )
    )


@pytest.mark.parametrize("kind", [PlainInterpreter, OverlappedInterpreter])
def test_dependencies_hold_on_the_device_and_times_are_the_devices(kind: type[Interpreter]) -> None:
    seen: list[OpDone] = []
    lanes = [*(lane for lane in DEVICE_LANES), Lane.SSD_READ, Lane.UPDATE] * 4
    program, finished, wrong = program_of(lanes), set(), []
    with running(kind, lambda event: seen.append(event)) as (machine, interpreter):  # type: ignore[arg-type, return-value]

        def perform(op: Op) -> None:
            def work() -> None:
                if not set(op.after) <= finished:
                    wrong.append(op.index)
                time.sleep(WORK_SECONDS)
                finished.add(op.index)

            if op.lane in DEVICE_LANES:
                machine.later(op.lane, work)
            else:
                work()

        interpreter.run(program, perform, 0)
        interpreter.wait()
    assert wrong == []
    assert sorted(event.unit for event in seen) == list(range(len(lanes)))
    assert all(event.stop_seconds - event.start_seconds >= 0.9 * WORK_SECONDS for event in seen)
    stops = {event.unit: event.stop_seconds for event in seen}
    for event in seen:
        if event.unit > 1 and event.lane in DEVICE_LANES:
            assert event.start_seconds >= stops[event.unit - 2] - 1e-3, "counted as busy while it waited"


def test_the_host_does_not_run_ahead_of_the_device() -> None:
    count, issued, finished, most = 12, 0, 0, 0
    program = Program(tuple(Op(index=index, verb=Verb.FORWARD, lane=Lane.COMPUTE) for index in range(count)))
    with running(OverlappedInterpreter) as (machine, interpreter):

        def work() -> None:
            nonlocal finished
            time.sleep(WORK_SECONDS)
            finished += 1

        def perform(op: Op) -> None:
            nonlocal issued, most
            issued += 1
            most = max(most, issued - finished)
            machine.later(Lane.COMPUTE, work)

        interpreter.run(program, perform, 0)
        assert finished == count, "compute's last operation is finished when the step returns"
    assert most == 2, f"{most} operations were under way"


def test_a_device_that_fails_after_the_issue_is_a_failed_step() -> None:
    from headrace.terms.errors import StepFailed

    class Broken(Mark):
        def synchronize(self) -> None:
            raise RuntimeError("an illegal memory access was encountered")

    with running(OverlappedInterpreter) as (machine, interpreter):
        machine.record = lambda lane: Broken() if lane is Lane.DEVICE_TO_HOST else None  # type: ignore[method-assign]
        interpreter.run(Program((Op(index=0, verb=Verb.DRAIN, lane=Lane.DEVICE_TO_HOST),)), lambda op: None, 0)
        interpreter.close()
        with pytest.raises(StepFailed, match="illegal memory access"):
            interpreter.check()
