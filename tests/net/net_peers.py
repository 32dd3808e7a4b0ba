"""Several peers of one generation in threads of this process, over loopback."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from headrace.net import Address, Generation, Listener, Member

VERSION = "test"


@contextmanager
def listening(silence_seconds: float = 20.0, **more: Any) -> Iterator[Listener]:
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
        node = listener.gather(num_workers, lambda text: None)
        generations = [generation for each in entered if (generation := each.result()) is not None]
    ordered = sorted(zip(generations, members, strict=True), key=lambda pair: pair[0].rank)
    return node, [member for _, member in ordered], [generation for generation, _ in ordered]


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Return what the calls return, each made in a thread of its own."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [each.result(30) for each in [pool.submit(call) for call in calls]]
