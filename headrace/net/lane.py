"""A lane between the peers of one generation: bytes from one rank to another, in order, in pieces that are timed.

A transfer begins with a greeting each way, a byte. Who waits for a peer that is not as far yet waits for that byte, as long
as it takes; heartbeats say meanwhile whether the peer lives. From then on each piece must pass within `piece_seconds`.
Any failure becomes `PeerLost`, also for those that wait in another thread, and the lane cannot be used any more.

Greetings are there because gloo, when a connection breaks, tells only those whose receive has not begun. Who waits for a send,
or for the rest of a receive, is never told (`Pair::signalException`, `tx_` and `rx_`), and must not wait for ever.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, Work  # type: ignore[attr-defined]

from headrace.machine.host_memory import Bytes
from headrace.terms.errors import PeerLost
from headrace.terms.sizes import MIB

PIECE_BYTES = 16 * MIB
# A connection breaks before a watchman knows why: he is waited for so long.
_WHY_SECONDS = 0.3
# How long is waited for a thread to end whose lane is closed: it is told at once.
END_SECONDS = 5.0
_FOR_EVER = timedelta(days=365)
_LENGTH_BYTES = 8
# The most bytes of a message (configurations and plans); a larger one is somebody's mistake.
_MOST_MESSAGE_BYTES = 256 * MIB
# Tags of pieces, and of greetings of who is about to send and to receive.
_DATA, _SENDER, _RECEIVER = range(3)
# Nobody sends with this tag: waiting for it briefly breaks all connections, which wakes those who wait on them.
_NOBODY = 1 << 20


@dataclass(frozen=True)
class Piece:
    """A piece under way to or from a `peer`. `greetings`, of a transfer's first piece: the one that comes, and the one that
    goes.
    """

    lane: "Lane"
    work: Work
    peer: int
    greetings: tuple[Work, Work] | None

    def finish(self) -> None:
        """Wait until it is there: for the first piece of a transfer as long as the peer needs to begin.

        Raises:
            PeerLost: the peer is gone, or has been silent for too long.
        """
        self.meet()
        self.lane.wait(self.work, self.peer)

    def meet(self) -> float:
        """Wait, once, until the peer has begun; return when, in seconds of `time.perf_counter`. Raises as `finish`."""
        if self.greetings is not None:
            came, went = self.greetings
            self.lane.wait(came, self.peer, _FOR_EVER)
            self.lane.wait(went, self.peer)
        return time.perf_counter()


def finish_all(pieces: Iterable[Piece]) -> None:
    """Wait for pieces in their order.

    Raises:
        PeerLost: see `Piece.finish`.
    """
    for piece in pieces:
        piece.finish()


class Lane:
    """Moves bytes in one direction. `names` are the peers' names by rank; `why` returns what a watchman knows about a loss."""

    def __init__(
        self,
        store: Store,
        name: str,
        *,
        host: str,
        rank: int,
        names: tuple[str, ...],
        why: Callable[[], str | None],
        piece_seconds: float,
    ) -> None:
        self.name, self.rank, self.names, self._why = name, rank, names, why
        self._piece = timedelta(seconds=piece_seconds)
        self._lock = threading.Lock()
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        # The interface that was named, and not the one to which the host's name resolves.
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = self._piece
        options._threads = 1
        try:
            self._group: ProcessGroupGloo | None = ProcessGroupGloo(PrefixStore(name, store), rank, len(names), options)
        except RuntimeError as error:
            raise PeerLost(f"lane {name}: not every peer came ({_first_line(error)})") from error

    @property
    def size(self) -> int:
        """Number of peers."""
        return len(self.names)

    def start_send(self, data: torch.Tensor, to: int, *, first: bool) -> Piece:
        """Start sending a piece, a flat tensor, of at most `PIECE_BYTES`; `first`: it begins a transfer."""
        greetings = (self._greeting("recv", to, _RECEIVER), self._greeting("send", to, _SENDER)) if first else None
        return Piece(self, self._start("send", data, to, _DATA), to, greetings)

    def start_receive(self, into: torch.Tensor, source: int, *, first: bool) -> Piece:
        """Start receiving a piece."""
        greetings = (self._greeting("recv", source, _SENDER), self._greeting("send", source, _RECEIVER)) if first else None
        return Piece(self, self._start("recv", into, source, _DATA), source, greetings)

    def wait(self, work: Work, peer: int, longest: timedelta | None = None) -> None:
        """Wait for what has been started, None: `piece_seconds`.

        Raises:
            PeerLost: the peer is gone, or has been silent for too long.
        """
        try:
            work.wait(self._piece if longest is None else longest)
        except RuntimeError as error:
            raise self._lost(peer, error) from None  # its traceback would hold the connection

    def send(self, data: Bytes, to: int) -> None:
        """Send bytes to a rank; return when they are gone.

        Raises:
            PeerLost: see `Piece.finish`.
        """
        flat = torch.from_numpy(data)
        for start in range(0, flat.numel(), PIECE_BYTES):
            self.start_send(flat[start : start + PIECE_BYTES], to, first=start == 0).finish()

    def receive(self, into: Bytes, source: int) -> float:
        """Fill `into` with that many bytes from a rank, and return the seconds since it began to send.

        Raises:
            PeerLost: see `Piece.finish`.
        """
        flat, began = torch.from_numpy(into), None
        for start in range(0, flat.numel(), PIECE_BYTES):
            piece = self.start_receive(flat[start : start + PIECE_BYTES], source, first=start == 0)
            met = piece.meet()
            began = met if began is None else began
            self.wait(piece.work, source)
        return time.perf_counter() - began if began is not None else 0.0

    def send_message(self, value: Any, to: int) -> None:
        """Send a JSON value."""
        text = np.frombuffer(json.dumps(value).encode(), np.uint8).copy()
        self.send(np.array([text.size], np.int64).view(np.uint8), to)
        self.send(text, to)

    def receive_message(self, source: int) -> Any:
        """Return the JSON value that a rank sent.

        Raises:
            PeerLost: as in `Piece.finish`; or what came is no message.
        """
        length = np.empty(_LENGTH_BYTES, np.uint8)
        self.receive(length, source)
        num_bytes = int(length.view(np.int64)[0])
        if not 0 < num_bytes <= _MOST_MESSAGE_BYTES:
            raise PeerLost(
                f"{self.names[source]}: sent a message of {num_bytes} bytes, which is impossible; is it the same version?"
            )
        text = np.empty(num_bytes, np.uint8)
        self.receive(text, source)
        return json.loads(text.tobytes())

    def end(self) -> None:
        """Break all connections. Threads that wait on one, on either side, are told at once.

        No single peer is named. Breaking the connection to one peer would do nothing if it is broken already, and waits on
        other peers would never end.
        """
        group = self._group
        if group is None:
            return
        with contextlib.suppress(RuntimeError):  # breaking the connections raises this
            work = group.recv_anysource([torch.empty(1, dtype=torch.uint8)], _NOBODY)  # type: ignore[attr-defined]
            work.wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """Break all connections and let the group go."""
        self.end()
        with self._lock:
            self._group = None

    def _greeting(self, verb: str, peer: int, tag: int) -> Work:
        return self._start(verb, torch.zeros(1, dtype=torch.uint8), peer, tag)

    def _start(self, verb: str, data: torch.Tensor, peer: int, tag: int) -> Work:
        with self._lock:
            group = self._group
        if group is None:
            raise self._lost(peer, None)
        try:
            work: Work = getattr(group, verb)([data], peer, tag)
        except RuntimeError as error:
            raise self._lost(peer, error) from None
        return work

    def _lost(self, peer: int, error: RuntimeError | None) -> PeerLost:
        end = time.monotonic() + _WHY_SECONDS
        while (known := self._why()) is None and time.monotonic() < end:
            time.sleep(_WHY_SECONDS / 10)
        if known is not None:
            return PeerLost(known)
        words = _first_line(error) if error is not None else "its generation has ended"
        return PeerLost(f"{self.names[peer]}: the connection is lost ({words})")


def _first_line(error: BaseException) -> str:
    """Return the library's message without the place in its own sources."""
    text = str(error).strip().partition("\n")[0]
    return text.rpartition("] ")[2][:160] if text.startswith("[") else text[:160]
