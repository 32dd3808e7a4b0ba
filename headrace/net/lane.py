"""A lane between the peers of one generation: bytes from one rank to another, in order, in pieces that are timed.

The first piece of a transfer is waited for as long as its sender needs to make it; heartbeats say meanwhile whether the sender
lives. Each further piece must come within `piece_seconds`. Any failure becomes `PeerLost`, also for those that wait in another
thread, and the lane cannot be used any more.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, Work  # type: ignore[attr-defined]

from headrace.machine.host_memory import Bytes
from headrace.terms.errors import PeerLost
from headrace.terms.sizes import MIB

PIECE_BYTES = 16 * MIB
# A piece under way, its peer, and whether it is the first of a transfer (`Lane.finish`).
Waiting = tuple[Work, int, bool]
# A connection breaks before a watchman knows why: he is waited for so long.
_WHY_SECONDS = 0.3
_FOR_EVER = timedelta(days=365)
_LENGTH_BYTES = 8
# The most bytes of a message (configurations and plans); a larger one is somebody's mistake.
_MOST_MESSAGE_BYTES = 256 * MIB
# Nobody sends with this tag: waiting for it briefly breaks all connections, which wakes those who wait on them.
_NOBODY = 1 << 20


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

    def start_send(self, data: torch.Tensor, to: int, tag: int = 0) -> Work:
        """Start sending a piece, a flat tensor, of at most `PIECE_BYTES`."""
        return self._start("send", data, to, tag)

    def start_receive(self, into: torch.Tensor, source: int, tag: int = 0) -> Work:
        """Start receiving a piece."""
        return self._start("recv", into, source, tag)

    def finish(self, work: Work, peer: int, *, first: bool) -> None:
        """Wait until a piece is there: for the `first` piece of a transfer as long as that takes.

        Raises:
            PeerLost: the peer is gone, or has been silent for too long.
        """
        try:
            work.wait(_FOR_EVER if first else self._piece)
        except RuntimeError as error:
            raise self._lost(peer, error) from None  # its traceback would hold the connection

    def send(self, data: Bytes, to: int) -> None:
        """Send bytes to a rank; return when they are gone.

        Raises:
            PeerLost: see `finish`.
        """
        flat = torch.from_numpy(data)
        for start in range(0, flat.numel(), PIECE_BYTES):
            self.finish(self.start_send(flat[start : start + PIECE_BYTES], to), to, first=start == 0)

    def receive(self, into: Bytes, source: int) -> None:
        """Fill `into` with that many bytes from a rank.

        Raises:
            PeerLost: see `finish`.
        """
        flat = torch.from_numpy(into)
        for start in range(0, flat.numel(), PIECE_BYTES):
            self.finish(self.start_receive(flat[start : start + PIECE_BYTES], source), source, first=start == 0)

    def send_message(self, value: Any, to: int) -> None:
        """Send a JSON value."""
        text = np.frombuffer(json.dumps(value).encode(), np.uint8).copy()
        self.send(np.array([text.size], np.int64).view(np.uint8), to)
        self.send(text, to)

    def receive_message(self, source: int) -> Any:
        """Return the JSON value that a rank sent.

        Raises:
            PeerLost: as in `finish`; or what came is no message.
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
