"""Stages meet, whatever a stranger writes into the store of stage 0; who has another secret or version is told so."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from net_peers import at_once
from test_strangers import texts
from torch.distributed import TCPStore

from headrace.peers.meet.address import Address
from headrace.peers.meet.meeting import Meeting
from headrace.terms.errors import ConfigError, MembershipFailed, PeerLost

LANES = ("control",)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def meetings(
    secrets: tuple[bytes, bytes] = (b"s", b"s"), versions: tuple[str, str] = ("a", "a")
) -> Iterator[tuple[Meeting, Meeting, Any]]:
    """Give both stages' meetings, and a stranger's store."""
    addresses = [Address("127.0.0.1", free_port()), Address("127.0.0.1", 1)]
    made = [
        Meeting(addresses, stage, version=versions[stage], secret=secrets[stage], silence_seconds=60.0, wait_seconds=60.0)
        for stage in range(2)
    ]
    store = TCPStore("127.0.0.1", addresses[0].port, is_master=False, timeout=timedelta(seconds=10))
    try:
        yield made[0], made[1], store
    finally:
        for each in made:
            each.close()


def met(first: Meeting, second: Meeting, tell: Callable[[str], None] = lambda words: None) -> list[Any]:
    return at_once(lambda: first.meet(LANES, tell), lambda: second.meet(LANES, tell))


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=texts, hello=texts, beat=texts)
def test_no_word_of_a_stranger_keeps_stages_apart(before: bytes, hello: bytes, beat: bytes) -> None:
    with meetings() as (first, second, store):
        store.set("meeting", before)
        over = threading.Event()

        def write() -> None:
            while not over.wait(0.02):
                found = store.compare_set("meeting", "-", "-")
                try:
                    token = json.loads(found)["token"]
                    for key, text in (("hello/1", hello), ("beat/0", beat), ("beat/1", beat), ("go", b"1")):
                        if not store.check([f"{token}/{key}"]) or key.startswith("beat"):
                            store.set(f"{token}/{key}", text)
                except (ValueError, KeyError, TypeError):
                    continue

        thread = threading.Thread(target=write)
        thread.start()
        try:
            ranks = met(first, second)
        finally:
            over.set()
            thread.join()
        into = np.empty(3, np.uint8)
        at_once(lambda: ranks[0].control.send(np.arange(3, dtype=np.uint8), 1), lambda: ranks[1].control.receive(into, 0))
        assert list(into) == [0, 1, 2]
        for each in ranks:
            each.close()


@pytest.mark.parametrize(
    ("secrets", "versions", "words"),
    [((b"s", b"t"), ("a", "a"), "does not have the secret"), ((b"s", b"s"), ("a", "b"), "it is headrace b, this is a")],
)
def test_a_stage_of_another_secret_or_version_is_told(
    secrets: tuple[bytes, bytes], versions: tuple[str, str], words: str
) -> None:
    with meetings(secrets, versions) as (first, second, _):
        said = list[str]()

        def stop() -> None:
            if said:
                raise KeyError

        def leads() -> None:
            with pytest.raises(KeyError):
                first.meet(LANES, lambda text: said.append(text) if "refused" in text else None, stop)

        def follows() -> None:
            with pytest.raises(ConfigError, match=words):
                second.meet(LANES, lambda text: None)

        at_once(leads, follows)
        assert words in said[0]


def test_a_thread_of_the_meeting_that_dies_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any) -> None:
        raise ZeroDivisionError("nobody expected it")

    with meetings() as (first, second, _):
        monkeypatch.setattr(first, "_beat", fails)
        ranks = met(first, second)
        with pytest.raises(PeerLost, match="the thread of the heartbeat failed"):
            ranks[0].control.receive(np.empty(1, np.uint8), 1)
        with pytest.raises(MembershipFailed, match="ZeroDivisionError"):
            first.meet(LANES, lambda text: None)
        for each in ranks:
            each.close()
