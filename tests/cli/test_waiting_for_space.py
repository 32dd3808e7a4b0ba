"""A disk that is full while a run writes its state: one line says so, the run waits, and goes on by itself to the same weights.

Run: pytest tests/cli/test_waiting_for_space.py
"""

import errno
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bad_worlds import World, check_refusal
from test_full_disk import NO_SPACE, exit_code, unbroken, weights
from tiers import sampled

from headrace.files import patience
from headrace.runs import pausing

__all__ = ["unbroken"]  # a fixture


@pytest.fixture
def full(world: World, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function after which files of a name find no space so many times, once the run has begun its steps."""
    really = os.pwritev
    monkeypatch.setattr(patience, "EVERY_SECONDS", 0.01)

    def full(name: str, times: int, meanwhile: Callable[[int], None] = lambda refused: None) -> None:
        refused = []
        lock = threading.Lock()

        def pwritev(descriptor: int, buffers: Any, offset: int) -> int:
            with lock:
                path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
                refuses = path.name == name and len(refused) < times and (world.run / "metrics.jsonl").exists()
                if not refuses:
                    return really(descriptor, buffers, offset)
                refused.append(path)
            meanwhile(len(refused))
            raise OSError(errno.ENOSPC, NO_SPACE)

        monkeypatch.setattr(os, "pwritev", pwritev)

    return full


@pytest.mark.parametrize("name", sampled(["data", "commit.0"], ["data"]))
def test_a_full_disk_costs_time_alone(world: World, unbroken: dict[str, bytes], full: Callable[..., None], name: str) -> None:
    full(name, 5)
    assert world.capsys is not None
    assert exit_code(*world.train_words()) == 0
    said = "".join(world.capsys.readouterr())
    assert said.count("the run waits until then, and goes on by itself") == said.count("there is space again") > 0
    assert weights(world.run / "final") == unbroken


def test_a_signal_ends_the_wait_and_the_run_can_be_resumed(
    world: World, unbroken: dict[str, bytes], full: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(refused: int) -> None:
        if refused == 3:
            os.kill(os.getpid(), signal.SIGINT)

    full("data", 1_000_000, interrupt)
    assert world.capsys is not None
    code = exit_code(*world.train_words())
    said = world.capsys.readouterr()
    assert "goes on by itself" in said.out + said.err
    check_refusal(code, said.err.splitlines(keepends=True)[-1])
    assert "resume with: headrace resume" in said.err
    monkeypatch.undo()
    assert exit_code("resume", world.run) == 0
    assert weights(world.run / "final") == unbroken


@pytest.mark.deep
def test_hardly_any_space_for_records_is_waited_for_between_steps(
    world: World, unbroken: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter([0, 0, pausing.LEAST_FREE_BYTES])
    monkeypatch.setattr(pausing, "_free_bytes", lambda directory: next(looks))
    monkeypatch.setattr(pausing, "_EVERY_SECONDS", 0.01)
    assert world.capsys is not None
    assert exit_code(*world.train_words()) == 0
    said = world.capsys.readouterr()
    assert "free some space: the run waits until then" in said.out + said.err
    assert weights(world.run / "final") == unbroken
