"""Whatever somebody without the secret writes into the store ends, holds up or misleads nobody; nor does a member's "
"nonsense."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from net_peers import VERSION, Clock, at_once, joined, listening
from torch.distributed import TCPStore

from headrace.peers.meet.board import Board
from headrace.peers.meet.listener import Listener
from headrace.peers.meet.member import Member
from headrace.peers.meet.watchman import Watchman
from headrace.terms.errors import ConfigError, MembershipFailed, PeerLost
from headrace.terms.options.muster import Muster

SECRET = b"some words"
FEW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
values: Any = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | some.text(alphabet=some.characters()),
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(some.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
LIKE_OURS = some.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(
            ("name", "version", "nonce", "peer", "proof", "refused", "words", "shape", "token"), some.text(max_size=8) | values
        ),
        **dict.fromkeys(("visits", "go", "value"), some.booleans() | values),
        **dict.fromkeys(("generation", "rank", "beat", "stages", "silence_seconds", "names"), some.integers() | values),
    },
)
texts = some.binary(max_size=40) | some.builds(lambda value: json.dumps(value).encode(), values | LIKE_OURS)
KEYS = [
    *("challenge", "tickets", "over", "beat/node", "beat/1", "beat/2", "hello/1", "hello/2", "answer/1", "answer/2", "spare/2"),
    *("invite/2", "accept/2", "go/1", "go/2", "dropped/1", "dropped/2", "ended/1", "ended/2"),
]


def stranger(listener: Listener) -> TCPStore:
    return TCPStore("127.0.0.1", listener.address.port, is_master=False, timeout=timedelta(seconds=10))


@contextmanager
def at_work() -> Iterator[tuple[Listener, Any, Member, Any, TCPStore]]:
    """Give a node and a worker in a generation, and a stranger's store."""
    with listening(secret=SECRET) as listener:
        node, [member], [worker] = joined(listener, 1, SECRET)
        yield listener, node, member, worker, stranger(listener)
        member.close()


def still_works(node: Any, worker: Any) -> None:
    into = np.empty(3, np.uint8)
    at_once(lambda: node.down.send(np.arange(3, dtype=np.uint8), 1), lambda: worker.down.receive(into, 0))
    assert list(into) == [0, 1, 2]


@FEW
@given(written=some.lists(some.tuples(some.sampled_from(KEYS), texts), min_size=1, max_size=12))
def test_no_word_of_a_stranger_ends_or_misleads_who_is_at_work(shared: Any, written: list[tuple[str, bytes]]) -> None:
    """The node's and the worker's membership read each key again and again; then another worker joins."""
    listener, node, member, worker, store = shared
    for key, text in written:
        store.set(key, text)
    listener._mend()
    listener._admit()
    listener._look()
    member._heed_end()
    assert not member.is_over
    assert member.why_dropped() is None
    listener._thread.check()
    member.check()
    assert not node.has_ended
    assert not worker.has_ended
    still_works(node, worker)
    another = Member(listener.address, name="another", version=VERSION, secret=SECRET)
    assert listener.num_waiting() == 1
    another.close()
    listener._look()
    assert listener.num_waiting() == 0


@pytest.fixture(scope="module")
def shared() -> Iterator[Any]:
    with at_work() as found:
        yield found


@FEW
@given(key=some.sampled_from(KEYS), value=values | LIKE_OURS)
def test_nonsense_with_the_right_proof_is_passed_over(shared: Any, key: str, value: Any) -> None:
    """As a member of another version would write it."""
    board = Board(HashStoreWithCompare(), SECRET, "session")
    board.put(key, value)
    for kind in (str, int, bool, {"beat": int, "words": str}, {"names": list}):
        found = board.get(key, kind)
        assert found is None or (isinstance(found, dict) if isinstance(kind, dict) else type(found) is kind)


class HashStoreWithCompare:
    """The little of a store that a board needs, in memory."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self.values.get(key, expected.encode())


def test_a_proof_counts_for_its_key_and_its_session_alone() -> None:
    store = HashStoreWithCompare()
    board = Board(store, SECRET, "session")
    board.put("over", True)
    assert board.get("over", bool) is True
    store.values["ended/1"] = store.values["over"]
    assert board.get("ended/1", bool) is None
    assert Board(store, SECRET, "another").get("over", bool) is None
    assert Board(store, b"another", "session").get("over", bool) is None
    store.values["over"] = store.values["over"].replace(b"true", b"false")
    assert board.get("over", bool) is None
    assert board.num_dropped == 2
    assert len(board.news) == 1, "a line for the first"


@pytest.mark.parametrize(
    "text", ["not json", "[]", '{"proof": "\\ud800"}', "{}", "null", "9" * 5000, '{"nonce": 1}', "[" * 50000]
)
def test_a_strangers_hello_is_counted_and_keeps_nobody_out(text: str) -> None:
    with listening(secret=SECRET) as listener:
        store = stranger(listener)
        store.set(f"hello/{store.add('tickets', 1)}", text)
        node, [member], _ = joined(listener, 1, SECRET)
        assert listener._board.num_dropped == 1
        member.close()
        del node


@pytest.mark.parametrize("tickets", [1, 3, 1000, 100_000])
def test_tickets_of_the_dead_are_passed_over(tickets: int) -> None:
    with listening(secret=SECRET) as listener:
        stranger(listener).add("tickets", tickets)
        _, [member], _ = joined(listener, 1, SECRET)
        assert member._ticket == tickets + 1
        member.close()


@pytest.mark.parametrize("junk", ["junk", "-5", "9" * 30, str((1 << 63) - 1), "0", ""])
def test_tickets_that_are_no_number_are_mended(junk: str) -> None:
    with listening(secret=SECRET) as listener:
        _, [first], _ = joined(listener, 1, SECRET)
        stranger(listener).set("tickets", junk)
        listener._admit()
        second = Member(listener.address, name="second", version=VERSION, secret=SECRET)
        assert second._ticket != first._ticket
        for member in (first, second):
            member.close()


def test_a_challenge_that_a_stranger_writes_is_mended() -> None:
    with listening(secret=SECRET) as listener:
        stranger(listener).set("challenge", json.dumps({"value": "mine", "proof": "x"}))
        member = Member(listener.address, name="x", version=VERSION, secret=SECRET)
        member.close()


def test_an_older_heartbeat_that_a_stranger_repeats_shows_no_life(clock: Clock) -> None:
    with listening(silence_seconds=2.0, secret=SECRET) as listener:
        node, [member], _ = joined(listener, 1, SECRET)
        store = stranger(listener)
        beats = []
        for _ in range(2):
            member._show("")
            beats.append(store.get(f"beat/{member._ticket}"))
        listener._look()
        member._closing.set()
        member._thread.join()
        for number in range(4):
            store.set(f"beat/{member._ticket}", beats[number % 2])
            clock.seconds += 1.0
            listener._look()
        assert node.has_ended
        member.close()


def test_a_thread_of_membership_that_dies_wakes_who_waits_and_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as listener:
        node, [member], [worker] = joined(listener, 1)

        def fails() -> None:
            raise ZeroDivisionError("nobody expected it")

        monkeypatch.setattr(listener, "_look", fails)
        with pytest.raises(PeerLost, match=r"the thread of membership failed .ZeroDivisionError"):
            node.up.receive(np.empty(3, np.uint8), 1)
        for look in (lambda: listener.gather(Muster(1, 1), print), listener.take_in, lambda: listener.tell_news(print)):
            with pytest.raises(MembershipFailed, match="start it again, and report it"):
                look()
        with suppress(PeerLost):
            member.close()
        del worker


def test_a_heartbeat_that_dies_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[str]()
    watchman = Watchman(lambda: [][1], "the heartbeat", told.append)
    watchman.join()
    with pytest.raises(MembershipFailed, match=r"the thread of the heartbeat failed .IndexError"):
        watchman.check()
    assert len(told) == 1


def test_who_has_another_secret_is_told_and_the_node_says_it_once() -> None:
    with listening(secret=SECRET) as listener:
        before = threading.active_count()
        for _ in range(3):
            with pytest.raises(ConfigError, match="does not have the secret"):
                Member(listener.address, name="x", version=VERSION, secret=b"another")
        said = list[str]()
        listener.tell_news(said.append)
        assert said == ["refused a worker: it does not have the secret; give all the same --secret FILE"]
        assert threading.active_count() < before + 3, "a refused worker leaves no thread of its own"
