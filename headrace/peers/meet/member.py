"""A worker's side of membership: it finds the node, proves that it knows the secret, and waits to be invited."""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

from headrace.peers.meet.address import Address
from headrace.peers.meet.board import Board, Kind
from headrace.peers.meet.generation import Generation
from headrace.peers.meet.lane import has_keys
from headrace.peers.meet.link import VISITOR, MeasuredLink, measure_link, visitors_lane
from headrace.peers.meet.listener import AWAY, BEATS, ENDED, GONE, LOOK_SECONDS, OVER, SPARE
from headrace.peers.meet.proof import nonce
from headrace.peers.meet.stores import joined_store
from headrace.peers.meet.watchman import Watchman
from headrace.terms.errors import ConfigError, PeerLost

_ANSWER_SECONDS = 30.0
# A hello without an answer is said again so often. A challenge without a proof is looked at again for so long: a node that has
# the secret writes its own again at once.
_AGAIN_SECONDS, _CHALLENGE_SECONDS = 1.0, 1.0
_ANSWER = {"nonce": str}


class Member:
    """Somebody who has come to the node at `address` and been let in. Use it for one generation only, and close it. Who comes
    again is the same `peer`. `shape` is what the node wants it for. A member that only `visits` measures the link, and is never
    invited to work.

    Raises:
        PeerLost: nothing listens there, or the node has ended.
        ConfigError: the node refuses this worker, or does not know the secret itself.
    """

    def __init__(
        self,
        address: Address,
        *,
        name: str,
        version: str,
        secret: bytes | None = None,
        visits: bool = False,
        peer: str | None = None,
    ) -> None:
        self._address, self._secret, self.peer = address, secret or b"", peer or nonce()
        self._store = self._connect()
        self._generation: Generation | None = None
        self._lost: str | None = None
        self._closing = threading.Event()
        with self._plainly():
            self._ticket = self._store.add("tickets", 1)
            hello = {"name": name, "version": version, "nonce": nonce(), "visits": visits, "peer": self.peer}
            self._board = Board(self._store, self._secret, self._challenge())
            self._beats = Board(self._connect(), self._secret, self._board.session)
            self._beat_number = 0
            self._show("")
            answer = self._answer(hello)
        if "refused" in answer:
            raise ConfigError(f"node {address}: refuses this worker: {answer['refused']}")
        self._silence_seconds, self.shape = float(answer["silence_seconds"]), str(answer["shape"])
        self._thread = Watchman(self._beat, "the heartbeat", self._tell_lost)

    def _challenge(self) -> str:
        """Return the node's challenge; one without a proof if there is no other, for the node may have another secret."""
        board, end = Board(self._store, self._secret), time.monotonic() + _CHALLENGE_SECONDS
        for _ in range(int(_CHALLENGE_SECONDS / LOOK_SECONDS)):
            found, is_proven = board.claimed("challenge", str)
            if is_proven or time.monotonic() > end:
                break
            time.sleep(LOOK_SECONDS)
        self._is_proven = is_proven
        return str(found)

    def _answer(self, hello: Mapping[str, Any]) -> Mapping[str, Any]:
        """Say hello until the node has answered. A refusal may have no proof: who has another secret is told so."""
        begun = said = time.monotonic() - _AGAIN_SECONDS
        while time.monotonic() - begun < _ANSWER_SECONDS + _AGAIN_SECONDS:
            if time.monotonic() - said >= _AGAIN_SECONDS:
                said = time.monotonic()
                self._board.put(f"hello/{self._ticket}", hello)
            answer, is_proven = self._board.claimed(f"answer/{self._ticket}", _ANSWER)
            if answer is not None and answer["nonce"] == hello["nonce"]:
                if is_proven and has_keys(answer, {"silence_seconds": float, "shape": str}):
                    return dict(answer)
                if has_keys(answer, {"refused": str}) and (is_proven or not self._is_proven):
                    return {"refused": str(answer["refused"])}
            time.sleep(LOOK_SECONDS / 5)
        raise PeerLost(f"node {self._address}: does not answer")

    def enter(
        self, check: Callable[[], None] = lambda: None, tell: Callable[[str], None] = lambda text: None
    ) -> Generation | None:
        """Wait to be invited, and return the generation; None where the node's work is done without this worker. `check` may
        raise what ends the waiting; `tell` gets the reason why this worker is not invited, if the node gives one.

        Raises:
            PeerLost: the node is gone; or not all who were invited came, and this worker should come again.
        """
        told = ""

        def look() -> None:
            nonlocal told
            check()
            with self._plainly():
                if (words := self._board.get(f"{SPARE}{self._ticket}", str)) not in (None, told):
                    told = words
                    tell(words)

        invitation = self._wait_for(f"invite/{self._ticket}", {"generation": int, "rank": int, "names": list}, look)
        if invitation is None:
            return None
        with self._plainly():
            self._board.put(f"accept/{self._ticket}", True)
        number, names = int(invitation["generation"]), tuple(map(str, invitation["names"]))
        answer = self._wait_for(f"go/{number}", {"go": bool}, check)
        if answer is None or not answer["go"]:
            raise PeerLost(f"node {self._address}: not every worker accepted; it will invite again")
        rank = int(invitation["rank"])
        generation = Generation(
            self._board.lanes(),
            number,
            host=self._address.own_number(key="node"),
            rank=rank,
            names=names,
            piece_seconds=self._silence_seconds,
        )
        self._generation = generation
        if self._lost is not None:  # meanwhile: it would not be said again
            generation.end(self._lost)
        return generation

    @property
    def is_over(self) -> bool:
        """Whether the node has said that all is done. Raises PeerLost as `enter`."""
        with self._plainly():
            return self._board.get(OVER, bool) is True

    def why_dropped(self) -> str | None:
        """Return why the node continues without this worker. None if it does not, or cannot be asked.

        Who was stopped, or cut off, and is back, belongs to an older generation: nothing of it is taken any more.
        """
        with contextlib.suppress(PeerLost), self._plainly():
            if (words := self._board.get(f"dropped/{self._ticket}", str)) is not None:
                return f"node {self._address}: {words}"
        return None

    def measure(self) -> MeasuredLink:
        """Measure the link as a visitor, for a second or two; meanwhile the node's run uses the rest of the link.

        Raises:
            PeerLost: the node is gone.
        """
        with self._plainly():
            lane = visitors_lane(
                self._board.lanes(),
                self._ticket,
                host=self._address.own_number(key="node"),
                rank=VISITOR,
                piece_seconds=self._silence_seconds,
            )
        try:
            return measure_link(lane)
        finally:
            lane.close()

    def close(self, reason: str = "has left", *, again: bool = False) -> None:
        """Leave, and tell the node why if it can be reached, and whether this peer will come `again`.

        The node is told by another way than the lanes: on these it may be about to send something that is not received any
        more.
        """
        self._closing.set()
        self._thread.join()
        with contextlib.suppress(DistError, RuntimeError):
            if self._lost is None:
                self._show(f"{AWAY if again else GONE}{reason}")
        if self._generation is not None:
            self._generation.end("this worker has left")
            self._generation.close()

    def check(self) -> None:
        """Raise MembershipFailed if this member's heartbeat died of what nobody expected."""
        self._thread.check()

    def _show(self, words: str) -> None:
        """Show that this peer lives; with `words` it says that it leaves."""
        self._beat_number += 1
        self._beats.put(f"beat/{self._ticket}", {"beat": self._beat_number, "words": words})

    def _wait_for(self, key: str, kind: Kind, check: Callable[[], None]) -> Any:
        """Return what is under `key` once it is there, None where the node has said that all is done."""
        while True:
            check()
            self.check()
            if self._lost is not None:
                raise PeerLost(self._lost)
            if (words := self.why_dropped()) is not None:
                raise PeerLost(words)
            with self._plainly():
                if (found := self._board.get(key, kind)) is not None:
                    return found
                if self._board.get(OVER, bool):
                    return None
            time.sleep(LOOK_SECONDS)

    def _beat(self) -> None:
        """Show that this worker lives; check whether the node does, and whether the generation goes on."""
        seen, seen_seconds = -1, time.monotonic()
        while not self._closing.wait(self._silence_seconds / BEATS):
            try:
                self._show("")
                found = self._beats.get("beat/node", int) or 0
                self._heed_end()
            except DistError:
                self._tell_lost(f"node {self._address}: is gone")
                return
            if found > seen:  # an older one says nothing
                seen, seen_seconds = found, time.monotonic()
            elif time.monotonic() - seen_seconds > self._silence_seconds:
                self._tell_lost(f"node {self._address}: shows no sign of life for {self._silence_seconds:g} s")
                return

    def _heed_end(self) -> None:
        """End the generation if the node has. Broken connections say so at once, if they break."""
        generation = self._generation
        if generation is not None and (words := self._beats.get(f"{ENDED}{generation.number}", str)) is not None:
            generation.end(words)

    def _tell_lost(self, words: str) -> None:
        self._lost = words
        if self._generation is not None:
            self._generation.end(words)

    def _connect(self) -> TCPStore:
        return joined_store(self._address, f"node {self._address}", key="node", timeout=timedelta(seconds=_ANSWER_SECONDS))

    @contextlib.contextmanager
    def _plainly(self) -> Any:
        try:
            yield
        except (DistError, RuntimeError) as error:
            raise PeerLost(self._lost or f"node {self._address}: is gone") from error
