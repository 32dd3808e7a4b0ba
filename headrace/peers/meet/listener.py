"""The node's side of membership: it listens, checks who comes, watches who lives, and forms generations.

All of it goes through one TCPStore, whose server is this process. Workers take a ticket and prove that they know the secret;
each writes a heartbeat, and reads the node's. An invited peer has to accept at once, so that no one waits for dead peers.

Invariant: whatever else anybody writes into the store, nobody is ended, held up or misled by it (`peers.meet.board`). A ticket
whose owner died before it said hello is passed over.
"""

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

from headrace.peers.meet.address import Address
from headrace.peers.meet.board import Board, take_news
from headrace.peers.meet.generation import Generation
from headrace.peers.meet.link import NODE, answer_link, visitors_lane
from headrace.peers.meet.proof import nonce, why_refused
from headrace.peers.meet.stores import hosted_store, joined_store, refuse_without_secret
from headrace.peers.meet.tickets import OpenTicket, Tickets
from headrace.peers.meet.watchman import Watchman
from headrace.terms.errors import PeerLost
from headrace.terms.options.muster import Muster

# The number of heartbeats after which a silent peer counts as lost; the seconds between two looks at membership; the seconds in
# which a living peer accepts an invitation.
BEATS, LOOK_SECONDS, ACCEPT_SECONDS = 6, 0.05, 5.0
# The last heartbeat of a peer that leaves begins with one of these, the reason follows: for good, or to come again.
GONE, AWAY = "gone: ", "away: "
# What workers are wanted for: to compute each step together, or to train by themselves and meet now and then.
TOGETHER, APART = "together", "apart"
# The key that is there when all is done.
OVER = "over"
# The reason for which the node ended a generation, by its number: a connection that does not break tells nobody.
ENDED = "ended/"
# Why a worker that waits is not invited, by its ticket.
SPARE = "spare/"


@dataclass
class _Ticket:
    """Somebody who came: what they said about themselves, and when their heartbeat last changed (monotonic seconds)."""

    number: int
    info: Mapping[str, Any]
    beat: int = -1
    last_words: str = ""  # of a peer that has left
    beat_seconds: float = field(default_factory=time.monotonic)
    told: str = ""  # why it is not invited

    @property
    def peer(self) -> str:
        """Who it is: a peer that comes again has another ticket."""
        return str(self.info["peer"])

    @property
    def name(self) -> str:
        return f"worker {self.info['name']}"


class Listener:
    """Listens at `address` until closed. Workers must have the same `version`; a peer that is silent for `silence_seconds` is
    lost. Workers are told the `shape` of the run: what they are wanted for.

    Raises:
        ConfigError: the address cannot be used; or other machines can reach it, and there is no secret.
    """

    def __init__(
        self,
        address: Address,
        *,
        version: str,
        secret: bytes | None = None,
        silence_seconds: float = 30.0,
        shape: str = TOGETHER,
    ) -> None:
        refuse_without_secret([address], secret, "listen")
        self._host, self._version = address.number(), version
        self.silence_seconds, self._shape = silence_seconds, shape
        self._store = hosted_store(address, key="listen")
        self.address = Address(address.host, self._store.port)
        self._secret = secret or b""
        self._board = Board(self._store, self._secret)
        self._challenge = nonce()
        self._board.put("challenge", self._challenge)
        self._challenge_text = (self._board.raw("challenge") or b"").decode()
        self._board.session = self._challenge
        self._waiting: dict[int, _Ticket] = {}
        self._members: dict[Generation, tuple[_Ticket, ...]] = {}  # of each generation that works
        self._before: frozenset[str] = frozenset()  # the peers of the newest generation
        self._peers: dict[str, _Ticket] = {}  # the newest ticket of each that has not left for good
        self._spares: dict[str, str] = {}  # the peers that cannot take part, and why
        self._crowded = ""  # why nobody else can, if the run has as many as it has work for
        self._tickets = Tickets(self._board)
        self._number, self._closing = 0, threading.Event()
        self._refused: dict[str, None] = {}
        self._is_over = False
        self._lock = threading.Lock()
        self._thread = Watchman(self._watch, "membership", self._wake)

    def gather(
        self,
        muster: Muster,
        tell: Callable[[str], None],
        check: Callable[[], None] = lambda: None,
        *,
        expected: int = 0,
        hint: str = "",
    ) -> Generation:
        """Wait for live workers, and return a generation with them. The previous one has then ended.

        Where `expected` workers were there before, those that are missing are waited for, as `muster` says. Who belonged to the
        previous generation comes before others. `tell` gets messages while it waits, with the `hint`; `check` may raise an
        error, which ends the waiting.
        """
        self.part("a new generation begins")
        told, begun_seconds, wanted = -1, time.monotonic(), max(muster.least, min(expected, muster.most))
        while True:
            check()
            self.tell_news(tell)
            with self._lock:
                able = [each for each in self._waiting.values() if each.peer not in self._spares]
                able.sort(key=lambda each: (each.peer not in self._before, each.number))
            ready, crowded = able[: muster.most], able[muster.most :]
            self._crowded = muster.limit if len(ready) == muster.most else ""
            for ticket in crowded:
                self._tell_spare(ticket, self._crowded)
            if len(ready) != told and len(ready) < wanted:
                told = len(ready)
                tell(f"waiting at {self.address} for workers: {told} of {wanted} are there{hint}")
            enough = muster.enough(len(ready), expected, time.monotonic() - begun_seconds)
            if enough and (made := self._form([ticket.number for ticket in ready])) is not None:
                return made
            time.sleep(LOOK_SECONDS)

    def take_in(self) -> Generation | None:
        """Return a generation with the one who has waited longest, beside those that work; None where nobody waits."""
        self._thread.check()
        with self._lock:
            waiting = min(self._waiting, default=None)
        return None if waiting is None else self._form([waiting])

    def tell_news(self, tell: Callable[[str], None]) -> None:
        """Tell who was refused, and what of strangers was passed over, each once.

        Raises:
            MembershipFailed: the thread that watches has died.
        """
        self._thread.check()
        with self._lock:
            refused, self._refused = self._refused, {}
        for words in refused:
            tell(words)
        take_news(self._board, tell)

    def keep_as_spare(self, rank: int, reason: str) -> None:
        """Do not invite the worker of this rank of the present generation again; it is told the reason."""
        with self._lock:
            (members,) = self._members.values()
            self._spares[members[rank - 1].peer] = reason

    def num_waiting(self) -> int:
        """Return how many workers wait that could be invited."""
        with self._lock:
            return sum(each.peer not in self._spares for each in self._waiting.values())

    def _tell_spare(self, ticket: _Ticket, reason: str) -> None:
        if reason and ticket.told != reason:
            ticket.told = reason
            self._put(f"{SPARE}{ticket.number}", reason)

    def part(self, reason: str, only: Generation | None = None) -> None:
        """End all generations that work, or `only` this one."""
        with self._lock:
            ended = list(self._members) if only is None else [only]
            for generation in ended:
                self._members.pop(generation, None)
        for generation in ended:
            with contextlib.suppress(RuntimeError, AttributeError):  # the store is closed: who asks it is told so
                self._put(f"{ENDED}{generation.number}", reason)
            generation.end(reason)
            generation.close()

    def tell_over(self) -> None:
        """Tell those who wait, and those who will come again, that all is done."""
        self._is_over = True  # who leaves now is no loss
        self._put(OVER, True)

    def dismiss(self) -> None:
        """Tell the peers that the run is done, and wait until all live peers have left. Some are about to join again, because
        they lost their generation, or were stopped and have just woken up. They would wait in vain for a node that is gone.
        """
        self.tell_over()
        end = time.monotonic() + self.silence_seconds
        self._look()
        while self._is_anybody_left() and time.monotonic() < end:
            time.sleep(LOOK_SECONDS)
            self._look()

    def _is_anybody_left(self) -> bool:
        # Who lives shows it within this: two heartbeats.
        most = min(self.silence_seconds, max(ACCEPT_SECONDS, 2 * self.silence_seconds / BEATS))
        with self._lock:
            return any(time.monotonic() - each.beat_seconds <= most for each in self._peers.values())

    def close(self) -> None:
        """End the generation, and stop listening."""
        self.part("the node has ended")
        self.stop_watching()
        with contextlib.suppress(AttributeError):
            del self._store  # the store listens until it is deleted
        self._board.close()
        gc.collect()

    def stop_watching(self) -> None:
        """Stop looking at peers, and stop the node's own heartbeat."""
        self._closing.set()
        self._thread.join()

    def _form(self, numbers: list[int]) -> Generation | None:
        """Invite tickets, and return a generation with them; None if not all accepted: those who did not are forgotten."""
        self._number += 1
        with self._lock:
            tickets = tuple(self._waiting.pop(number) for number in numbers)
        names = ("the node", *(ticket.name for ticket in tickets))
        for rank, number in enumerate(numbers, start=1):
            self._put(f"invite/{number}", {"generation": self._number, "rank": rank, "names": names})
        missing, deadline = list(numbers), time.monotonic() + ACCEPT_SECONDS
        while missing and time.monotonic() < deadline:
            missing = [number for number in missing if not self._board.get(f"accept/{number}", bool)]
            time.sleep(LOOK_SECONDS / 5)
        self._put(f"go/{self._number}", {"go": not missing})
        if missing:
            return None
        try:
            generation = Generation(
                self._board_of(self._another_store()).lanes(),
                self._number,
                host=self._host,
                rank=0,
                names=names,
                piece_seconds=self.silence_seconds,
            )
        except PeerLost:
            return None
        for ticket in tickets:
            ticket.beat_seconds = time.monotonic()
        with self._lock:
            self._members[generation] = tickets
            self._before = frozenset(ticket.peer for ticket in tickets)
        return generation

    # -- the watchman ---------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        beat, due = 0, 0.0
        while not self._closing.wait(LOOK_SECONDS):
            try:
                if time.monotonic() >= due:
                    beat, due = beat + 1, time.monotonic() + self.silence_seconds / BEATS
                    self._put("beat/node", beat)
                self._mend()
                self._admit()
                self._look()
            except (DistError, AttributeError):  # the store is being closed, or did not answer in time
                if self._closing.is_set():
                    return

    def _wake(self, words: str) -> None:
        """Let those who wait on lanes go, because the watchman is dead."""
        with self._lock:
            generations = list(self._members)
        for generation in generations:
            generation.end(words)

    def _mend(self) -> None:
        """Write the challenge and the number of tickets again where a stranger has."""
        if self._board.raw("challenge") != self._challenge_text.encode():
            self._board.drop("challenge")
            self._store.set("challenge", self._challenge_text)

    def _admit(self) -> None:
        """Answer those who say hello, in the order of tickets; nobody waits for who has taken one and says nothing."""
        for number, found, hello, is_proven in self._tickets.said():
            self._greet(number, found, hello, is_proven)

    def _greet(self, number: int, found: OpenTicket, hello: Mapping[str, Any], is_proven: bool) -> None:
        """Answer a hello; the same one again, whose answer did not come, with the same."""
        words = why_refused(is_proven, hello["version"], self._version)
        if words is not None:
            with self._lock:
                self._refused[f"refused a worker: {words}"] = None
            self._put(f"answer/{number}", {"nonce": hello["nonce"], "refused": words})
            return
        if found.answer is None:
            found.nonce = hello["nonce"]
            found.answer = {"nonce": found.nonce, "silence_seconds": float(self.silence_seconds), "shape": self._shape}
            if not hello["visits"]:
                ticket = _Ticket(number, hello)
                with self._lock:
                    self._waiting[number] = self._peers[ticket.peer] = ticket
                self._tell_spare(ticket, self._spares.get(ticket.peer) or self._crowded)
            else:
                threading.Thread(target=self._receive_visitor, args=(number,), name="headrace visitor", daemon=True).start()
        if hello["nonce"] == found.nonce:
            self._put(f"answer/{number}", found.answer)

    def _receive_visitor(self, number: int) -> None:
        """Let a visitor measure the link; if it breaks off, that is no loss."""
        with contextlib.suppress(PeerLost, RuntimeError):
            lane = visitors_lane(
                self._board_of(self._another_store()).lanes(),
                number,
                host=self._host,
                rank=NODE,
                piece_seconds=self.silence_seconds,
            )
            try:
                answer_link(lane)
            finally:
                lane.close()

    def _another_store(self) -> TCPStore:
        """Return a separate connection for a wait for a peer. On a shared one it would hold up everything, the heartbeat
        too."""
        return joined_store(self.address, "this node", key="listen")

    def _board_of(self, store: TCPStore) -> Board:
        return Board(store, self._secret, self._challenge)

    def _look(self) -> None:
        """Note whose heartbeats go on. End the generation if a member is silent, and forget a waiting peer that is silent."""
        now = time.monotonic()
        with self._lock:
            others = self._peers.values() if self._is_over else ()
            members = {each.number: generation for generation, tickets in self._members.items() for each in tickets}
            working = chain.from_iterable(self._members.values())
            tickets = {each.number: each for each in (*working, *self._waiting.values(), *others)}
        for ticket in tickets.values():
            key = f"beat/{ticket.number}"
            found = self._board.get(key, {"beat": int, "words": str})
            if found is not None and found["beat"] > ticket.beat:  # an older one says nothing
                ticket.beat, ticket.last_words, ticket.beat_seconds = found["beat"], found["words"], now
            silent = now - ticket.beat_seconds > self.silence_seconds
            gone, away = (ticket.last_words.startswith(each) for each in (GONE, AWAY))
            if not gone and not away and not silent:
                continue
            with self._lock:
                self._waiting.pop(ticket.number, None)
                generation = members.get(ticket.number)
                newest = self._peers.get(ticket.peer)
                if gone and newest is not None and newest.number == ticket.number:
                    del self._peers[ticket.peer]
            words = f"shows no sign of life for {self.silence_seconds:g} s"
            if gone or away:
                words = ticket.last_words.partition(": ")[2]
            else:  # it may be back one day, and ask
                self._put(f"dropped/{ticket.number}", f"it went on without this worker, which {words}")
            if generation is not None and not (gone and self._is_over):
                generation.end(f"{ticket.name} {words}")

    def _put(self, key: str, value: Any) -> None:
        self._board.put(key, value)
