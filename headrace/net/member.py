"""A worker's side of membership: it finds the node, proves that it knows the secret, and waits to be invited."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

from headrace.net.address import Address
from headrace.net.generation import Generation
from headrace.net.link import VISITOR, Link, measure_link, visitors_lane
from headrace.net.listener import AWAY, BEATS, ENDED, GONE, LOOK_SECONDS, OVER, SPARE, TOGETHER
from headrace.net.proof import is_proof, nonce, proof
from headrace.terms.errors import ConfigError, PeerLost

_CONNECT_SECONDS = 5.0
_ANSWER_SECONDS = 30.0


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
            challenge, own = self._store.get("challenge").decode(), nonce()
            said = proof(self._secret, "worker", challenge, str(self._ticket), own)
            hello = {"name": name, "version": version, "nonce": own, "proof": said, "visits": visits, "peer": self.peer}
            self._beats = self._connect()
            self._beats.set(f"beat/{self._ticket}", "0")
            self._store.set(f"hello/{self._ticket}", json.dumps(hello))
            answer = json.loads(self._store.get(f"answer/{self._ticket}"))
        if "refused" in answer:
            raise ConfigError(f"node {address}: refuses this worker: {answer['refused']}")
        if not is_proof(str(answer.get("proof")), self._secret, "node", own):
            raise ConfigError(f"node {address}: does not have this worker's secret; give both the same --secret FILE")
        self._silence_seconds, self.shape = float(answer["silence_seconds"]), str(answer.get("shape", TOGETHER))
        self._thread = threading.Thread(target=self._beat, name="headrace heartbeat", daemon=True)
        self._thread.start()

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
                if self._store.check([key := f"{SPARE}{self._ticket}"]) and (words := json.loads(self._store.get(key))) != told:
                    told = words
                    tell(words)

        invitation = self._wait_for(f"invite/{self._ticket}", look)
        if invitation is None:
            return None
        with self._plainly():
            self._store.set(f"accept/{self._ticket}", "1")
        number, names = int(invitation["generation"]), tuple(map(str, invitation["names"]))
        answer = self._wait_for(f"go/{number}", check)
        if answer is None or not answer["go"]:
            raise PeerLost(f"node {self._address}: not every worker accepted; it will invite again")
        rank = int(invitation["rank"])
        generation = Generation(
            self._store, number, host=self._own_host(), rank=rank, names=names, piece_seconds=self._silence_seconds
        )
        self._generation = generation
        if self._lost is not None:  # meanwhile: it would not be said again
            generation.end(self._lost)
        return generation

    @property
    def is_over(self) -> bool:
        """Whether the node has said that all is done. Raises PeerLost as `enter`."""
        with self._plainly():
            return bool(self._store.check([OVER]))

    def why_dropped(self) -> str | None:
        """Return why the node continues without this worker. None if it does not, or cannot be asked.

        Who was stopped, or cut off, and is back, belongs to an older generation: nothing of it is taken any more.
        """
        key = f"dropped/{self._ticket}"
        with contextlib.suppress(PeerLost), self._plainly():
            if self._store.check([key]):
                return f"node {self._address}: {json.loads(self._store.get(key))}"
        return None

    def measure(self) -> Link:
        """Measure the link as a visitor, for a second or two; meanwhile the node's run uses the rest of the link.

        Raises:
            PeerLost: the node is gone.
        """
        with self._plainly():
            lane = visitors_lane(
                self._store, self._ticket, host=self._own_host(), rank=VISITOR, piece_seconds=self._silence_seconds
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
                self._beats.set(f"beat/{self._ticket}", f"{AWAY if again else GONE}{reason}")
        if self._generation is not None:
            self._generation.end("this worker has left")
            self._generation.close()

    def _wait_for(self, key: str, check: Callable[[], None]) -> Any:
        """Return what is under `key` once it is there, None where the node has said that all is done."""
        while True:
            check()
            if self._lost is not None:
                raise PeerLost(self._lost)
            if (words := self.why_dropped()) is not None:
                raise PeerLost(words)
            with self._plainly():
                if self._store.check([key]):
                    return json.loads(self._store.get(key))
                if self._store.check([OVER]):
                    return None
            time.sleep(LOOK_SECONDS)

    def _beat(self) -> None:
        """Show that this worker lives; check whether the node does, and whether the generation goes on."""
        beat, seen, seen_seconds = 0, b"", time.monotonic()
        while not self._closing.wait(self._silence_seconds / BEATS):
            beat += 1
            try:
                self._beats.set(f"beat/{self._ticket}", str(beat))
                found = self._beats.get("beat/node")
                self._heed_end()
            except (DistError, RuntimeError):
                self._tell_lost(f"node {self._address}: is gone")
                return
            if found != seen:
                seen, seen_seconds = found, time.monotonic()
            elif time.monotonic() - seen_seconds > self._silence_seconds:
                self._tell_lost(f"node {self._address}: shows no sign of life for {self._silence_seconds:g} s")
                return

    def _heed_end(self) -> None:
        """End the generation if the node has. Broken connections say so at once, if they break."""
        generation = self._generation
        if generation is not None and self._beats.check([key := f"{ENDED}{generation.number}"]):
            generation.end(json.loads(self._beats.get(key)))

    def _tell_lost(self, words: str) -> None:
        self._lost = words
        if self._generation is not None:
            self._generation.end(words)

    def _own_host(self) -> str:
        """Return the IPv4 number of this machine's interface that leads to the node."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((self._address.number(key="node"), self._address.port or 1))
            return str(probe.getsockname()[0])

    def _connect(self) -> TCPStore:
        host = self._address.number(key="node")
        # The library would try again and again, with warnings, so a plain connection is tried first.
        try:
            socket.create_connection((host, self._address.port), timeout=_CONNECT_SECONDS).close()
            return TCPStore(host, self._address.port, is_master=False, timeout=timedelta(seconds=_ANSWER_SECONDS))
        except (OSError, DistError, RuntimeError) as error:
            raise PeerLost(f"node {self._address}: nothing listens there") from error

    @contextlib.contextmanager
    def _plainly(self) -> Any:
        try:
            yield
        except (DistError, RuntimeError) as error:
            raise PeerLost(self._lost or f"node {self._address}: is gone") from error
