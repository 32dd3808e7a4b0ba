"""Work of a processor, counted in loops: what a limit may be in, where a machine may be slow or busy."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def a_loop() -> int:
    """Do what counts as one: a tenth of a second of an ordinary core."""
    total = 0
    for number in range(1_600_000):
        total += number & 7
    return total


def seconds_of(action: Callable[[], object]) -> float:
    """Return the seconds of processors that `action` takes in this process."""
    begun = time.process_time()
    action()
    return time.process_time() - begun


def loops_in(action: Callable[[], T]) -> tuple[float, T]:
    """Return how many loops would take as long as `action`, and what it returns. The loops before and after it are the measure,
    so that a machine which becomes slow or quick meanwhile makes no difference.
    """
    found: list[T] = []
    before, taken, after = seconds_of(a_loop), seconds_of(lambda: found.append(action())), seconds_of(a_loop)
    return taken / max(before, after), found[0]
