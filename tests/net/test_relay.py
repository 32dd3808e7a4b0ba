"""Whoever waits for a message is told of anything that ends the thread which receives it."""

import threading

import pytest

from headrace.peers.meet.lane import Channel
from headrace.peers.meet.relay import Relay


class Broken(Channel):
    """A lane whose receives fail in a way that nobody expects."""

    def __init__(self) -> None:
        self.name = "broken"

    def receive(self, into: object, source: int) -> float:
        raise ValueError("not as it should be")


def test_who_waits_is_told_of_any_failure() -> None:
    relay = Relay(Broken(), threading.Condition(), source=1, to=None)
    relay.expect(10)
    with pytest.raises(ValueError, match="not as it should be"):
        relay.take()
    relay.close()
