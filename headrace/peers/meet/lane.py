"""A lane between the peers of one generation: bytes from one rank to another, in order, in pieces that are timed.

A transfer begins with a greeting each way: the type and the shape of what comes. Who waits for a peer that is not as far yet
waits for it, as long as it takes; heartbeats say meanwhile whether the peer lives. Where both do not name the same, both are
told (`Unlike`) before a byte of content moves, and the lane can be used further. From then on each piece must pass within
`piece_seconds`. Any other failure becomes `PeerLost`, also for those that wait in another thread, and the lane is of no use
any more.

Invariant: a receive is posted only for what the other side has said that it sends. Gloo ends the process of who gets more than
it waits for, and leaves memory as it was where less comes.

Greetings are also there because gloo, when a connection breaks, tells only those whose receive has not begun. Who waits for a
send, or for the rest of a receive, is never told (`Pair::signalException`, `tx_` and `rx_`), and must not wait for ever.
"""

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, Work  # type: ignore[attr-defined]

from headrace.terms.errors import PeerLost, Unlike
from headrace.terms.sizes import MIB

PIECE_BYTES = 16 * MIB
# Numbers that move: contiguous.
Content = NDArray[Any] | torch.Tensor
# A connection breaks before a watchman knows why: he is waited for so long.
_WHY_SECONDS = 0.3
# How long is waited for a thread to end whose lane is closed: it is told at once.
END_SECONDS = 5.0
_FOR_EVER = timedelta(days=365)
# The most bytes of a message (configurations and plans); a larger one is somebody's mistake.
_MOST_MESSAGE_BYTES = 256 * MIB
# Tags of pieces, and of greetings of who is about to send and to receive.
_DATA, _SENDER, _RECEIVER = range(3)
# A greeting is text of at most so many bytes, filled up with zeros.
_GREETING_BYTES = 96
_MESSAGE = "message"
# Nobody sends with this tag: waiting for it briefly breaks all connections, which wakes those who wait on them.
_NOBODY = 1 << 20


@dataclass(frozen=True)
class PieceTransfer:
    """A piece under way to or from a `peer`."""

    lane: "Channel"
    work: Work
    peer: int

    def finish(self) -> None:
        """Wait until it is there.

        Raises:
            PeerLost: the peer is gone, or has been silent for too long.
        """
        self.lane.wait(self.work, self.peer)


def finish_all(pieces: Iterable[PieceTransfer]) -> None:
    """Wait for pieces in their order.

    Raises:
        PeerLost: see `PieceTransfer.finish`.
    """
    for piece in pieces:
        piece.finish()


def sort_of(data: Content, shape: Sequence[int] | None = None) -> str:
    """Return the type and the shape of `data`, or of numbers of its type in this `shape`, as a greeting names them."""
    name = str(data.dtype).removeprefix("torch.")
    return f"{name} {'x'.join(map(str, data.shape if shape is None else shape))}"


class Channel:
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

    def meet(self, sends: Mapping[int, str], receives: Mapping[int, str]) -> float:
        """Begin transfers: tell each rank what is sent to it and what is expected from it (`sort_of`), and wait until all have
        said the same. Return when, in seconds of `time.perf_counter`.

        Raises:
            Unlike: a rank names another type or shape; nothing has moved.
            PeerLost: see `PieceTransfer.finish`.
        """
        met = [(rank, sort, *self._greet(rank, sort, _SENDER, _RECEIVER)) for rank, sort in sends.items()]
        met += [(rank, sort, *self._greet(rank, sort, _RECEIVER, _SENDER)) for rank, sort in receives.items()]
        unlike = list[str]()
        for number, (rank, sort, came, into, went) in enumerate(met):
            self.wait(came, rank, _FOR_EVER)
            self.wait(went, rank)
            if (said := _said(into)) != _said(_greeting(sort)):
                verb, other = ("waits for", "was sent") if number < len(sends) else ("sends", "is expected")
                unlike.append(f"{self.names[rank]}: {verb} {said}, where {sort} {other}")
        if unlike:
            raise Unlike(f"{'; '.join(unlike)}; nothing of it was taken")
        return time.perf_counter()

    def start_send(self, data: torch.Tensor, to: int) -> PieceTransfer:
        """Start sending a piece, a flat tensor, of at most `PIECE_BYTES`, after `meet`."""
        return PieceTransfer(self, self._start("send", data, to, _DATA), to)

    def start_receive(self, into: torch.Tensor, source: int) -> PieceTransfer:
        """Start receiving a piece, after `meet`."""
        return PieceTransfer(self, self._start("recv", into, source, _DATA), source)

    def wait(self, work: Work, peer: int, longest: timedelta | None = None) -> None:
        """Wait for what has been started, None: `piece_seconds`.

        Raises:
            PeerLost: the peer is gone, or has been silent for too long.
        """
        try:
            work.wait(self._piece if longest is None else longest)
        except RuntimeError as error:
            raise self._lost(peer, error) from None  # its traceback would hold the connection

    def send(self, data: Content, to: int) -> None:
        """Send numbers, contiguous ones, to a rank; return when they are gone.

        Raises:
            PeerLost, Unlike: see `meet`.
        """
        self.meet({to: sort_of(data)}, {})
        for piece in _pieces(data):
            self.start_send(piece, to).finish()

    def receive(self, into: Content, source: int) -> float:
        """Fill `into` with numbers from a rank, and return the seconds since it began to send.

        Raises:
            PeerLost, Unlike: see `meet`.
        """
        began = self.meet({}, {source: sort_of(into)})
        for piece in _pieces(into):
            self.start_receive(piece, source).finish()
        return time.perf_counter() - began

    def send_message(self, value: Any, to: int) -> None:
        """Send a JSON value."""
        text = np.frombuffer(json.dumps(value).encode(), np.uint8).copy()
        self.meet({to: f"{_MESSAGE} {text.size}"}, {})
        for piece in _pieces(text):
            self.start_send(piece, to).finish()

    def receive_message(self, source: int, keys: Mapping[str, Any] | None = None) -> Any:
        """Return the JSON value that a rank sent: an object with these `keys` of these types, if any are named.

        Raises:
            PeerLost: as in `PieceTransfer.finish`; or what came is no such message.
        """
        came, into = self._hear(source, _SENDER)
        self.wait(came, source, _FOR_EVER)
        kind, _, size = (said := _said(into)).partition(" ")
        num_bytes = int(size) if kind == _MESSAGE and size.isdecimal() else 0
        sort = said if 0 < num_bytes <= _MOST_MESSAGE_BYTES else f"{_MESSAGE} of 1 to {_MOST_MESSAGE_BYTES} bytes"
        self.wait(self._start("send", _greeting(sort), source, _RECEIVER), source)
        if sort != said:
            raise Unlike(f"{self.names[source]}: sends {said}, where a {sort} is expected; is it the same version?")
        text = np.empty(num_bytes, np.uint8)
        for piece in _pieces(text):
            self.start_receive(piece, source).finish()
        try:
            found = json.loads(text.tobytes())
        except (ValueError, RecursionError):
            raise Unlike(f"{self.names[source]}: sends what is no JSON; is it the same version?") from None
        if keys is not None and not has_keys(found, keys):
            raise Unlike(
                f"{self.names[source]}: sends a message without {', '.join(sorted(keys))} as they should be; is it "
                f"the same version?"
            )
        return found

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

    def _greet(self, peer: int, sort: str, own: int, others: int) -> tuple[Work, torch.Tensor, Work]:
        """Send a greeting with the tag `own`; return what waits for the one with the tag `others`, its place, and what goes."""
        came, into = self._hear(peer, others)
        return came, into, self._start("send", _greeting(sort), peer, own)

    def _hear(self, peer: int, tag: int) -> tuple[Work, torch.Tensor]:
        into = torch.empty(_GREETING_BYTES, dtype=torch.uint8)
        return self._start("recv", into, peer, tag), into

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


def has_keys(value: Any, keys: Mapping[str, Any]) -> bool:
    """Return whether a JSON value is an object with these keys of these types; a truth value is no number."""
    if not isinstance(value, dict):
        return False
    found = {key: value.get(key) for key in keys}
    return all(
        isinstance(found[key], kind) and (kind is bool or not isinstance(found[key], bool)) for key, kind in keys.items()
    )


def _greeting(sort: str) -> torch.Tensor:
    text = sort.encode()
    if len(text) > _GREETING_BYTES:
        text = f"{sort[:48]}... {hashlib.sha256(text).hexdigest()[:32]}".encode()
    return torch.frombuffer(bytearray(text.ljust(_GREETING_BYTES, b"\0")), dtype=torch.uint8)


def _said(greeting: torch.Tensor) -> str:
    """Return the words of a greeting; characters that may not be shown are left out."""
    return "".join(each for each in greeting.numpy().tobytes().decode("ascii", "replace") if each.isprintable())


def bytes_of(data: Content) -> torch.Tensor:
    """Return numbers as bytes, flat: where they lie, if they are contiguous."""
    return (torch.from_numpy(data) if isinstance(data, np.ndarray) else data).reshape(-1).view(torch.uint8)


def _pieces(data: Content) -> Iterator[torch.Tensor]:
    """Yield contiguous numbers as bytes, in pieces that go in one message."""
    flat = bytes_of(data)
    return (flat[start : start + PIECE_BYTES] for start in range(0, flat.numel(), PIECE_BYTES))


def _first_line(error: BaseException) -> str:
    """Return the library's message without the place in its own sources."""
    text = str(error).strip().partition("\n")[0]
    return text.rpartition("] ")[2][:160] if text.startswith("[") else text[:160]
