"""Loads, and how fast they run: alone, and two at once.

Invariant: a rate is whole units of work over the time they took. While two loads run together, neither is counted for a moment
in which the other has stopped.
"""

import math
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

# Keeps a rate finite, however coarse the clock.
_LEAST_SECONDS = 1e-9


class Load(Protocol):
    """Work of one kind on one part of the machine, done again and again."""

    def unit(self) -> float:
        """Do one unit and return its amount: operations or bytes. Returns when it is done, not when it is issued."""


def rate_of(load: Load, seconds: float) -> float:
    """Return what `load` does per second, over whole units for at least `seconds`."""
    return rates_together([load], seconds)[0]


def rates_together(loads: Sequence[Load], seconds: float) -> list[float]:
    """Return what each of `loads` does per second while all run at once, each in a thread of its own.

    A load that has done its `seconds` goes on uncounted until the others have done theirs.

    Raises:
        Whatever a load raises; the others are ended first.
    """
    rates = [0.0] * len(loads)
    errors: list[BaseException] = []
    left = len(loads)
    lock, start, over = threading.Lock(), threading.Barrier(len(loads)), threading.Event()

    def run(index: int) -> None:
        nonlocal left
        try:
            start.wait()
            begin, amount, counted = time.perf_counter(), 0.0, False
            while not over.is_set():
                amount += loads[index].unit()
                elapsed = time.perf_counter() - begin
                if not counted and elapsed >= seconds:
                    rates[index], counted = amount / max(elapsed, _LEAST_SECONDS), True
                    with lock:
                        left -= 1
                        if left == 0:
                            over.set()
        except BaseException as error:
            errors.append(error)
            over.set()

    threads = [threading.Thread(target=run, args=(index,), name="headrace measure") for index in range(len(loads))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return rates


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """Rates by name, and for each pair what each of the two kept of its own rate."""

    rates: dict[str, float]
    shares: dict[tuple[str, str], tuple[float, float]]


def in_order(names: Sequence[str], pairs: Sequence[tuple[str, str]]) -> list[tuple[str, ...]]:
    """Return all names alone, and each pair as soon as both of its names were there: what is compared is measured close
    together.
    """
    order: list[tuple[str, ...]] = []
    seen: set[str] = set()
    for name in names:
        order.append((name,))
        seen.add(name)
        order += [pair for pair in pairs if name in pair and seen.issuperset(pair)]
    return order


def interleaved(
    measure: Callable[[Sequence[str]], Sequence[float]],
    order: Sequence[tuple[str, ...]],
    rounds: int,
    *,
    deadline: float = math.inf,
) -> LoadFigures:
    """Measure what `order` has, names alone and pairs at once, `rounds` times over, and return medians.

    Each round measures everything, so that a slow phase of the machine falls on all and not on one. A pair's figure is the
    median of the rounds' own ratios. So a machine that is slower in one round slows both sides of its ratio. After the first
    round, nothing more is begun once `time.perf_counter()` has passed `deadline`.
    """
    found: dict[tuple[str, ...], list[Sequence[float]]] = {names: [] for names in order}
    for number in range(rounds):
        for names in order:
            if number == 0 or time.perf_counter() < deadline:
                found[names].append(measure(names))
    rates = {names[0]: statistics.median(figures[0] for figures in found[names]) for names in order if len(names) == 1}

    def kept(pair: tuple[str, str], side: int) -> float:
        alone = found[pair[side],]
        return statistics.median(both[side] / one[0] for both, one in zip(found[pair], alone, strict=False))

    pairs = [(names[0], names[1]) for names in order if len(names) == 2]
    return LoadFigures(rates, {pair: (kept(pair, 0), kept(pair, 1)) for pair in pairs})


def seconds_taken(
    action: Callable[[], object], repeats: int, pick: Callable[[Sequence[float]], float] = statistics.median
) -> float:
    """Return the median, or what `pick` takes, of the seconds that `action` takes; a first run is not counted."""
    action()
    taken = []
    for _ in range(repeats):
        begin = time.perf_counter()
        action()
        taken.append(time.perf_counter() - begin)
    return max(pick(taken), _LEAST_SECONDS)
