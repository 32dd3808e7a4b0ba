"""Who is let in, who is lost and how soon that is known, and what of an older generation reaches a younger one: nothing."""

import os
import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from net_peers import VERSION, Clock, at_once, joined, listening

from headrace.peers.meet.address import Address
from headrace.peers.meet.lane import Channel
from headrace.peers.meet.listener import Listener
from headrace.peers.meet.member import Member
from headrace.peers.meet.proof import is_proof, proof
from headrace.terms.errors import ConfigError, PeerLost
from headrace.terms.options.muster import Muster


def stop_heart(member: Member) -> None:
    """Let a member live on without showing it."""
    member._closing.set()
    member._thread.join()


def own_listening_addresses() -> set[str]:
    """Return the addresses (hexadecimal, as the kernel writes them) at which this process listens, as `ss -ltnp` shows them."""
    mine = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            mine.add(os.readlink(entry))
        except OSError:
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                found.add(fields[1].partition(":")[0])
    return found


def test_all_listeners_are_bound_to_the_interface_that_was_named() -> None:
    before = own_listening_addresses()
    with listening() as listener:
        node, members, _ = joined(listener, 2)
        assert own_listening_addresses() - before <= {"0100007F"}, "127.0.0.1, and nothing else"
        assert own_listening_addresses(), "the store and the lanes listen"
        for member in members:
            member.close()
        del node


def test_nobody_listens_beyond_loopback_without_a_secret() -> None:
    with pytest.raises(ConfigError, match="can be reached from other machines; give --secret FILE"):
        Listener(Address("0.0.0.0", 0), version=VERSION)


@pytest.mark.parametrize("text", ["here", "here:", ":1", "here:x", "here:70000"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        Address.of(text)


def test_a_port_that_is_taken_is_said() -> None:
    with listening() as listener, pytest.raises(ConfigError, match="name a free port"):
        Listener(listener.address, version=VERSION)


def test_workers_without_the_secret_or_of_another_version_are_refused() -> None:
    with listening(secret=b"one") as listener:
        for secret, version, words in (
            (b"two", VERSION, "does not have the secret"),
            (None, VERSION, "does not have the secret"),
            (b"one", "older", "it is headrace older, this is test"),
        ):
            with pytest.raises(ConfigError, match=words):
                Member(listener.address, name="x", version=version, secret=secret)
        member = Member(listener.address, name="x", version=VERSION, secret=b"one")
        member.close()


def test_who_cannot_take_part_is_told_why_and_not_invited_again() -> None:
    """A spare by name, who comes again; and one too many, where the run itself has a limit."""
    with listening() as listener:
        said = list[str]()
        node, members, _ = joined(listener, 2)
        listener.keep_as_spare(2, "it has no room")
        del node
        for member in members:
            member.close(again=True)
        unable = members[1].peer
        again = [
            Member(listener.address, name=name, version=VERSION, peer=peer)
            for name, peer in (("b", unable), ("c", None), ("d", None))
        ]
        at_once(
            lambda: listener.gather(Muster(1, 1, limit="one is enough"), lambda text: None),
            again[1].enter,
            lambda: waits(again[0], said),
            lambda: waits(again[2], said),
        )
        assert sorted(said) == ["it has no room", "one is enough"]
        for member in again:
            member.close()


def waits(member: Member, said: list[str]) -> None:
    """Wait to be invited until a reason comes why not."""

    def stop(words: str) -> None:
        said.append(words)
        raise KeyError

    with pytest.raises(KeyError):
        member.enter(tell=stop)


@pytest.mark.parametrize(
    ("present", "expected", "waited_seconds", "enough"),
    [(0, 0, 99.0, False), (1, 0, 0.0, True), (1, 3, 9.0, False), (1, 3, 10.0, True), (3, 3, 0.0, True), (4, 9, 0.0, True)],
)
def test_who_is_missing_is_waited_for_as_long_as_asked(
    present: int, expected: int, waited_seconds: float, enough: bool
) -> None:
    assert Muster.of("1:4", 10.0).enough(present, expected, waited_seconds) == enough
    assert Muster.of(4).enough(present, expected, waited_seconds) == (present >= 4)


def test_a_proof_is_of_all_its_words() -> None:
    assert is_proof(proof(b"s", "a", "b"), b"s", "a", "b")
    for secret, words in ((b"t", ("a", "b")), (b"s", ("a", "c")), (b"s", ("a",))):
        assert not is_proof(proof(b"s", "a", "b"), secret, *words)


def test_nobody_there_is_said_at_once() -> None:
    with listening() as listener:
        address = listener.address
    with pytest.raises(PeerLost, match="nothing listens there"):
        Member(address, name="x", version=VERSION)


@pytest.mark.parametrize("silent", ["worker", "node"])
def test_a_silent_peer_is_named_and_wakes_who_waits_for_it(silent: str, clock: Clock) -> None:
    """As after SIGSTOP, or with a cable unplugged: connections stand, and nothing comes."""
    with listening(silence_seconds=2.0) as listener:
        node, members, workers = joined(listener, 1)
        into = np.empty(10, np.uint8)
        if silent == "worker":
            stop_heart(members[0])
            with clock.passing(3.0), pytest.raises(PeerLost, match=r"worker 0 shows no sign of life for 2 s"):
                node.up.receive(into, 1)
        else:
            listener.stop_watching()
            with clock.passing(3.0), pytest.raises(PeerLost, match=r"node .* shows no sign of life for 2 s"):
                workers[0].down.receive(into, 0)
        members[0].close()


def test_who_was_stopped_is_told_that_the_others_went_on_and_may_come_again(clock: Clock) -> None:
    """A worker, and a spare that waits to be invited."""
    with listening() as listener:
        node, members, workers = joined(listener, 1)
        spare = Member(listener.address, name="spare", version=VERSION)
        assert spare.why_dropped() is None
        for each in (members[0], spare):
            stop_heart(each)
        words = "node .*: it went on without this worker, which shows no sign of life for 60 s"
        with clock.passing(61.0):
            with pytest.raises(PeerLost, match="worker 0 shows no sign of life for 60 s"):
                node.up.receive(np.empty(10, np.uint8), 1)
            with pytest.raises(PeerLost, match=words):
                spare.enter()
        listener.part("another one comes")
        with pytest.raises(PeerLost):  # what it has to say belongs to an older generation
            workers[0].up.send(np.empty(10, np.uint8), 0)
        assert re.match(words, members[0].why_dropped() or "")
        for each in (members[0], spare):
            each.close()
        again, members, _ = joined(listener, 1)
        assert again.number == node.number + 1
        members[0].close()


def test_spares_are_told_when_all_is_done() -> None:
    with listening() as listener:
        _, members, _ = joined(listener, 1)
        spare = Member(listener.address, name="spare", version=VERSION)

        def wait() -> None:
            assert spare.enter() is None
            spare.close()
            members[0].close()

        at_once(wait, listener.dismiss)


@pytest.mark.parametrize("way", ["parted", "stopped"])
def test_who_may_come_again_is_waited_for_when_all_is_done(way: str, clock: Clock) -> None:
    """Whether it has just left its generation, or was stopped and wakes up now."""
    with listening() as listener:
        node, members, _ = joined(listener, 1, peer="one")
        if way == "stopped":
            stop_heart(members[0])
            with clock.passing(61.0), pytest.raises(PeerLost, match="shows no sign of life"):
                node.up.receive(np.empty(10, np.uint8), 1)
            listener.part("it went on")
            members[0]._show("")
        else:
            members[0].close(again=True)

        def come_again() -> None:
            time.sleep(0.3)  # the longer, the surer that a node which does not wait is seen
            if way == "stopped":
                members[0].close(again=True)
            assert not dismissed.is_set(), "the node waits for it"
            again = Member(listener.address, name="0", version=VERSION, peer="one")
            assert again.enter() is None
            again.close()

        dismissed = threading.Event()
        at_once(come_again, lambda: (listener.dismiss(), dismissed.set()))


def test_who_is_dead_is_not_waited_for_long_when_all_is_done(clock: Clock) -> None:
    with listening() as listener:
        _, members, _ = joined(listener, 1)
        stop_heart(members[0])
        clock.sleep = lambda look: clock.pass_on(1.0)  # dismissing alone sleeps here
        listener.dismiss()
        assert clock.seconds <= listener.silence_seconds / 2, "not as long as for one who lives"
        members[0].close()


def test_who_leaves_is_missed_and_another_takes_the_place() -> None:
    with listening() as listener:
        node, members, workers = joined(listener, 1)
        members[0].close()
        with pytest.raises(PeerLost):
            node.up.receive(np.empty(10, np.uint8), 1)
        again, members, workers = joined(listener, 1)
        at_once(lambda: again.down.send_message({"step": 1}, 1), lambda: workers[0].down.receive_message(0))
        assert again.number == node.number + 1
        members[0].close()


def test_an_end_wakes_all_also_when_one_peer_has_gone_before() -> None:
    """The node waits for the second worker, which waits for the node, while the first one breaks off."""
    with listening() as listener:
        node, members, workers = joined(listener, 2)

        def waits(lane: Channel, peer: int) -> None:
            with pytest.raises(PeerLost):
                lane.receive(np.empty(10, np.uint8), peer)

        def ends() -> None:
            workers[0].close()
            waits(node.up, 1)
            node.end("the step failed")

        at_once(lambda: waits(node.up, 2), lambda: waits(workers[1].up, 0), ends)
        for member in members:
            member.close()


def test_an_end_is_told_also_where_no_connection_breaks(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    with listening(silence_seconds=2.0) as listener:
        node, [member], [generation] = joined(listener, 1)
        for lane in (node.down, node.up):
            monkeypatch.setattr(lane, "end", lambda: None)
            monkeypatch.setattr(lane, "close", lambda: None)
        listener.part("the power is gone")
        with pytest.raises(PeerLost, match="the power is gone"):
            generation.down.receive(np.empty(1, np.uint8), 0)
        member.close()


def test_nothing_of_an_older_generation_reaches_the_next() -> None:
    with listening() as listener:
        old, members, old_workers = joined(listener, 1)
        late = threading.Thread(target=lambda: suppressed(lambda: old_workers[0].up.send(np.full(10, 1, np.uint8), 0)))
        late.start()
        time.sleep(0.1)
        new, more, workers = joined(listener, 1)
        into = np.empty(10, np.uint8)
        at_once(lambda: workers[0].up.send(np.full(10, 2, np.uint8), 0), lambda: new.up.receive(into, 1))
        assert set(into) == {2}
        late.join(200)
        assert not late.is_alive(), "who waits for an older generation is told"
        with pytest.raises(PeerLost):
            old.up.receive(into, 1)
        for member in (*members, *more):
            member.close()


def suppressed(call: object) -> None:
    try:
        call()  # type: ignore[operator]
    except PeerLost:
        return
