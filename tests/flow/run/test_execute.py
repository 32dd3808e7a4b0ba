"""Both interpreters respect every dependency; a failure anywhere wakes everyone and is told, and nothing hangs."""

import random
import threading
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.flow.run.execute import Interpreter, OverlappedInterpreter, PlainInterpreter
from headrace.machine.cpu import CpuMachine
from headrace.terms.errors import StepFailed
from headrace.terms.events import OpDone
from headrace.terms.lanes import Lane
from headrace.terms.program import Op, Program, Verb

LANES = list(Lane)


def random_program(seed: int, count: int) -> Program:
    dice = random.Random(seed)
    ops = []
    for index in range(count):
        after = tuple(sorted(dice.sample(range(index), min(index, dice.randrange(4)))))
        before = tuple(sorted(dice.sample(range(count), min(count, dice.randrange(3)))))
        ops.append(Op(index=index, verb=Verb.FETCH, lane=dice.choice(LANES), unit=index, after=after, after_previous=before))
    return Program(tuple(ops))


def interpreters() -> list[Interpreter]:
    machine = CpuMachine()
    return [PlainInterpreter(machine), OverlappedInterpreter(machine)]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 40))
def test_every_dependency_is_finished_before_an_operation_starts(seed: int, count: int) -> None:
    program = random_program(seed, count)
    for interpreter in interpreters():
        finished: set[tuple[int, int]] = set()
        wrong: list[str] = []
        for step in range(3):

            def perform(op: Op, step: int = step, finished: set[tuple[int, int]] = finished, wrong: list[str] = wrong) -> None:
                needs = {(step, index) for index in op.after}
                needs |= {(step - 1, index) for index in op.after_previous} if step else set()
                needs |= {(old, index) for old in range(step - 1) for index in range(count)}
                if not needs <= finished:
                    wrong.append(f"step {step} op {op.index} ran before {needs - finished}")
                finished.add((step, op.index))

            interpreter.run(program, perform, step)
        interpreter.wait()
        interpreter.close()
        assert not wrong
        assert len(finished) == 3 * count


@pytest.mark.parametrize("lane", [Lane.COMPUTE, Lane.SSD_READ, Lane.UPDATE, Lane.COMMIT])
@pytest.mark.parametrize("which", [0, 1], ids=["plain", "overlapped"])
def test_a_failure_in_any_lane_is_raised_with_its_cause(lane: Lane, which: int) -> None:
    ops = [
        Op(index=index, verb=Verb.FETCH, lane=LANES[index % len(LANES)], after=(index - 1,) if index else ())
        for index in range(14)
    ]
    bad = next(op.index for op in ops if op.lane is lane)
    interpreter = interpreters()[which]

    def perform(op: Op) -> None:
        if op.index == bad:
            raise OSError(5, "the drive is gone")

    def run_and_wait() -> None:
        interpreter.run(Program(tuple(ops)), perform, 0)
        interpreter.wait()

    with pytest.raises((StepFailed, OSError)) as caught:
        run_and_wait()
    chain = [caught.value, caught.value.__cause__]
    assert any(isinstance(error, OSError) and "the drive is gone" in str(error) for error in chain)
    with pytest.raises(StepFailed):  # and it stays failed: the state on the SSD is what to go on from
        interpreter.run(Program(tuple(ops)), perform, 1)
    interpreter.close()


@pytest.mark.parametrize("nth", [0, 1, 5])
def test_an_interrupt_while_operations_are_queued_ends_in_time(nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations wait for others that were never queued; nobody may wait for these for ever."""
    ops = [
        Op(index=index, verb=Verb.FETCH, lane=LANES[index % len(LANES)], after=tuple(range(max(0, index - 3), index)))
        for index in range(20)
    ]
    interpreter = interpreters()[1]
    assert isinstance(interpreter, OverlappedInterpreter)
    put = 0

    class Interrupted:
        def __init__(self, queue: Any) -> None:
            self.queue = queue
            self.get, self.empty = queue.get, queue.empty

        def put(self, item: Any) -> None:
            nonlocal put
            put += 1
            if item is not None and put == nth + 1:
                raise KeyboardInterrupt
            self.queue.put(item)

    monkeypatch.setattr(interpreter, "_queues", {lane: Interrupted(queue) for lane, queue in interpreter._queues.items()})
    with pytest.raises(KeyboardInterrupt):
        interpreter.run(Program(tuple(ops)), lambda op: None, 0)
    ended = threading.Thread(target=interpreter.close, daemon=True)
    ended.start()
    ended.join(200)
    assert not ended.is_alive()
    with pytest.raises(StepFailed):
        interpreter.wait()


def test_lanes_work_at_the_same_time() -> None:
    interpreter = interpreters()[1]
    meeting = threading.Barrier(3, timeout=200)
    ops = [Op(index=index, verb=Verb.FETCH, lane=lane) for index, lane in enumerate((Lane.COMPUTE, Lane.SSD_READ, Lane.UPDATE))]
    interpreter.run(Program(tuple(ops)), lambda op: meeting.wait() and None, 0)
    interpreter.wait()
    interpreter.close()


def test_events_name_the_operation_and_its_times() -> None:
    seen: list[OpDone] = []
    interpreter = PlainInterpreter(CpuMachine(), sink=lambda event: seen.append(event))  # type: ignore[arg-type]
    interpreter.run(
        Program((Op(index=0, verb=Verb.DRAIN, lane=Lane.DEVICE_TO_HOST, unit=2, bytes=7),)), lambda op: time.sleep(0.01), 5
    )
    (event,) = seen
    assert (event.step, event.verb, event.lane, event.unit, event.bytes) == (5, "drain", "device-to-host", 2, 7)
    assert event.stop_seconds - event.start_seconds >= 0.01
