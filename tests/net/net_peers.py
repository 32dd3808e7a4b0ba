"""Several peers of one generation in threads of this process, over loopback."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from headrace.peers.meet.address import Address
from headrace.peers.meet.generation import Generation
from headrace.peers.meet.listener import Listener
from headrace.peers.meet.member import Member
from headrace.terms.options.muster import Muster

VERSION = "test"


class Clock:
    """The time of those who watch over one another. It stands still but in `passing`, so that a busy machine loses nobody."""

    def __init__(self) -> None:
        self.seconds, self.sleep = 0.0, time.sleep

    def monotonic(self) -> float:
        return self.seconds

    def pass_on(self, seconds: float) -> None:
        """Let `seconds` pass once."""
        self.seconds += seconds

    @contextmanager
    def passing(self, seconds: float) -> Iterator[None]:
        """Let `seconds` pass again and again, until this is left."""
        over = threading.Event()

        def go_on() -> None:
            while not over.wait(0.02):
                self.pass_on(seconds)

        thread = threading.Thread(target=go_on, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of `headrace.peers.meet.listener` and `headrace.peers.meet.member`."""
    made = Clock()
    for module in ("listener", "member"):
        monkeypatch.setattr(f"headrace.peers.meet.{module}.time", made)
    return made


@contextmanager
def listening(silence_seconds: float = 60.0, **more: Any) -> Iterator[Listener]:
    """Give a listener on loopback."""
    listener = Listener(Address("127.0.0.1", 0), version=VERSION, silence_seconds=silence_seconds, **more)
    try:
        yield listener
    finally:
        listener.close()


def joined(
    listener: Listener, num_workers: int, secret: bytes | None = None, **more: Any
) -> tuple[Generation, list[Member], list[Generation]]:
    """Return the node's generation, and the members with theirs, in the order of ranks."""
    members = [
        Member(listener.address, name=str(number), version=VERSION, secret=secret, **more) for number in range(num_workers)
    ]
    with ThreadPoolExecutor(num_workers) as pool:
        entered = [pool.submit(member.enter) for member in members]
        node = listener.gather(Muster(num_workers, num_workers), lambda text: None)
        generations = [generation for each in entered if (generation := each.result()) is not None]
    ordered = sorted(zip(generations, members, strict=True), key=lambda pair: pair[0].rank)
    return node, [member for _, member in ordered], [generation for generation, _ in ordered]


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Return what the calls return, each made in a thread of its own."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [each.result(200) for each in [pool.submit(call) for call in calls]]
