"""Waits between steps: for space, and so that no day has more writes than are allowed.

Run: pytest tests/runs/test_pausing.py
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.ask.between_steps import Pacing
from headrace.runs import pausing
from headrace.runs.pausing import LEAST_FREE_BYTES, Pauses
from headrace.terms.errors import DiskFull
from headrace.terms.events import Event, Notice, StepResult

DAY_SECONDS = 86_400.0


@dataclass
class World:
    """A clock that sleeping moves, and what was said."""

    seconds: float = 0.0
    stops_at_seconds: float = float("inf")
    told: list[Event] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds

    def pauses(self, directory: Path, most_bytes: int | None = None) -> Pauses:
        return Pauses(
            directory,
            Pacing.asked(most_bytes),
            lambda: self.seconds >= self.stops_at_seconds,
            self.told.append,
            lambda: self.seconds,
            self.sleep,
        )

    def words(self) -> list[str]:
        return [event.text for event in self.told if isinstance(event, Notice)]


def wrote(num_bytes: int) -> StepResult:
    return StepResult(
        step=0,
        loss=1.0,
        grad_norm=1.0,
        learning_rate=1.0,
        tokens=1,
        trained_tokens=1,
        seconds=1.0,
        bytes_written={"ssd": num_bytes},
    )


@pytest.fixture
def frees(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function after which the file system has so many free bytes at one look after the other; the last stays."""

    def frees(*num_bytes: int) -> None:
        left = iter(num_bytes)

        def looks() -> Iterator[int]:
            last = 0
            for last in left:
                yield last
            while True:
                yield last

        found = looks()
        monkeypatch.setattr(pausing, "_free_bytes", lambda directory: next(found))

    return frees


@pytest.fixture(scope="module", autouse=True)
def _hardly_any_looks() -> Iterator[None]:
    """Look seldom: days pass here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pausing, "_EVERY_SECONDS", 3600.0)
        yield


@given(size=st.integers(1, 90), seconds=st.lists(st.floats(0, DAY_SECONDS / 3), min_size=2, max_size=20))
def test_no_day_has_more_writes_than_are_allowed(size: int, seconds: list[float]) -> None:
    """The worst day has all of each step that it touches: it has more by no larger a share than a step is of a day."""
    world = World()
    pauses = world.pauses(Path("/"), 100)
    spans = []
    for taken in seconds:
        begin = world.seconds
        world.seconds += taken
        spans.append((begin, world.seconds))
        pauses.after_step(wrote(size))
    for _, begin in spans:  # a day that begins just before a step ends has that step, and what begins within it
        touched = [span for span in spans if span[1] >= begin and span[0] < begin + DAY_SECONDS * (1 - 1e-9)]
        assert size * len(touched) <= 100 + (100 - size) * max(seconds) / DAY_SECONDS


def test_steps_that_take_longer_than_the_limit_asks_wait_for_nothing(tmp_path: Path) -> None:
    world = World()
    pauses = world.pauses(tmp_path, 1 << 40)
    world.seconds = 3600.0
    pauses.after_step(wrote(1 << 20))
    assert world.seconds == 3600.0
    assert world.told == []


def test_it_is_said_once_how_far_apart_steps_begin(tmp_path: Path) -> None:
    world = World()
    pauses = world.pauses(tmp_path, 10 << 30)
    for _ in range(3):
        pauses.after_step(wrote(100 << 20))
    assert world.words() == ["a step wrote 100 MiB: max_write_per_day 10 GiB lets one begin each 14 min 12 s"]
    assert world.seconds == pytest.approx(3 * DAY_SECONDS * 100 / (10240 - 100))


def test_a_step_above_the_limit_waits_for_days(tmp_path: Path) -> None:
    world = World()
    world.pauses(tmp_path, 100).after_step(wrote(250))
    assert world.seconds == pytest.approx(2.5 * DAY_SECONDS)


def test_a_stop_ends_each_wait(tmp_path: Path, frees: Callable[..., None]) -> None:
    world = World(stops_at_seconds=5000.0)
    frees(0)
    pauses = world.pauses(tmp_path, 100)
    pauses.stopped()
    pauses.after_step(wrote(99))
    assert world.seconds == 7200.0
    with pytest.raises(DiskFull, match="asked to stop"):
        pauses.stopped()


def test_it_waits_until_there_is_space_and_says_so(tmp_path: Path, frees: Callable[..., None]) -> None:
    world = World()
    frees(1000, 1000, 2000, LEAST_FREE_BYTES)
    world.pauses(tmp_path).after_step(wrote(10))
    assert world.seconds == 2 * 3600.0
    assert len(world.told) == 2
    assert f"{tmp_path}: 1000 B are free" in world.words()[0]
    assert "goes on by itself" in world.words()[0]


def test_where_nobody_knows_the_space_nothing_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(path: object) -> os.statvfs_result:
        raise FileNotFoundError

    monkeypatch.setattr(os, "statvfs", gone)
    world = World()
    world.pauses(tmp_path / "gone").after_step(wrote(10))
    assert world.told == []
