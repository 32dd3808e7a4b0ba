"""What stands still is named with its lane within a minute, once; what only takes its time is not.

Run: pytest tests/flow/run/test_standstill.py
"""

import threading

import pytest

from headrace.flow.run import watch
from headrace.flow.run.execute import OverlappedInterpreter
from headrace.flow.run.watch import LIMIT_SECONDS, Watch
from headrace.machine.cpu import CpuMachine
from headrace.terms.events import Event, Notice
from headrace.terms.lanes import Lane
from headrace.terms.program import Op, Program, Verb

FETCH = Op(index=0, verb=Verb.FETCH, lane=Lane.SSD_READ, unit=3)
FORWARD = Op(index=1, verb=Verb.FORWARD, lane=Lane.COMPUTE, unit=3, micro=1)


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def words(told: list[Event]) -> list[str]:
    return [event.text for event in told if isinstance(event, Notice)]


def test_what_stands_still_is_named_once_within_a_minute() -> None:
    clock, told = Clock(), list[Event]()
    with Watch(told.append, clock=clock) as seen:
        seen.begin(FETCH)
        for _ in range(30):
            clock.seconds += 2.0
            seen.look()
    assert words(told) == ["ssd-read: fetch unit 3 has been under way for 46.0 s, and no other operation has ended for 46.0 s"]


def test_what_others_end_beside_is_not_named() -> None:
    clock, told = Clock(), list[Event]()
    with Watch(told.append, clock=clock) as seen:
        other = threading.Thread(target=seen.begin, args=(FORWARD,))
        other.start()
        other.join()
        for _ in range(30):
            seen.begin(FETCH)
            clock.seconds += 2.0
            seen.end()
            seen.look()
        assert told == []
        clock.seconds += LIMIT_SECONDS
        seen.look()
    assert words(told)[0].startswith("compute: forward")


def test_where_operations_are_long_it_waits_for_longer() -> None:
    clock, told = Clock(), list[Event]()
    with Watch(told.append, clock=clock) as seen:
        seen.begin(FORWARD)
        clock.seconds += 40.0
        seen.end()
        seen.begin(FORWARD)
        clock.seconds += 110.0
        seen.look()
        assert told == []
        clock.seconds += 11.0
        seen.look()
    assert len(told) == 1


def test_a_lane_that_hangs_is_named_while_it_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "LIMIT_SECONDS", 0.05)
    monkeypatch.setattr(watch, "_EVERY_SECONDS", 0.01)
    named = threading.Event()
    told: list[Event] = []

    def hear(event: Event) -> None:
        told.append(event)
        if isinstance(event, Notice):
            named.set()

    interpreter = OverlappedInterpreter(CpuMachine(), hear)
    interpreter.run(Program((FETCH,)), lambda op: named.wait(300) and None, 0)
    interpreter.wait()
    interpreter.close()
    assert words(told)[0].startswith("ssd-read: ")
