"""What passes between neighbours in a row of ranks, in the background: messages come and go while this rank computes.

Two messages of a direction may have come and not been taken; then the neighbour that sends the next one waits. Any loss of a
peer is told to whoever takes, gives or waits.
"""

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from statistics import median

import numpy as np

from headrace.machine.host_memory import Bytes
from headrace.peers.meet.lane import END_SECONDS, Channel
from headrace.terms.errors import PeerLost

_PLACES = 2
_RATES = 64


class Relay:
    """Receives over `lane` from rank `source`, and sends over it to rank `to`, None: from or to nobody."""

    def __init__(self, lane: Channel, changed: threading.Condition, *, source: int | None, to: int | None) -> None:
        self._lane, self._changed = lane, changed
        self._wanted: SimpleQueue[int | None] = SimpleQueue()
        self._going: SimpleQueue[Bytes | None] = SimpleQueue()
        self._came: deque[Bytes] = deque()
        self._places = threading.Semaphore(_PLACES)
        self._failure: Exception | None = None
        self._rates: deque[float] = deque(maxlen=_RATES)
        works = ((source, self._receive), (to, self._send))
        self._threads = [
            threading.Thread(
                target=self._until_lost, args=(work, peer), name=f"headrace {lane.name} {work.__name__}", daemon=True
            )
            for peer, work in works
            if peer is not None
        ]
        for thread in self._threads:
            thread.start()

    def expect(self, num_bytes: int) -> None:
        """Receive a message of this size after those that are expected already."""
        self._wanted.put(num_bytes)

    @property
    def has_come(self) -> bool:
        """Whether a message can be taken.

        Raises:
            PeerLost: a neighbour is gone.
        """
        if self._failure is not None:
            raise self._failure
        return bool(self._came)

    @property
    def bytes_per_second(self) -> float:
        """The rate of messages that came lately, each from when its sender began: the median, for a thread wakes late at times.
        0 if none has come.
        """
        return median(self._rates) if self._rates else 0.0

    def take(self) -> Bytes:
        """Return the next message; wait for it.

        Raises:
            PeerLost: a neighbour is gone.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.has_come)
            found = self._came.popleft()
        self._places.release()
        return found

    def give(self, data: Bytes) -> None:
        """Send a message, after those that are on their way.

        Raises:
            PeerLost: a neighbour is gone.
        """
        if self._failure is not None:
            raise self._failure
        self._going.put(data)

    def close(self) -> None:
        """End the threads: what is to be sent is sent before."""
        self._wanted.put(None)
        self._going.put(None)
        self._places.release()
        for thread in self._threads:  # one that leaves a transfer while Python ends would end the process with an abort
            thread.join(END_SECONDS)

    def _receive(self, source: int) -> None:
        while (num_bytes := self._wanted.get()) is not None:
            self._places.acquire()
            into: Bytes = np.empty(num_bytes, np.uint8)
            self._rates.append(num_bytes / max(self._lane.receive(into, source), 1e-9))
            with self._changed:
                self._came.append(into)
                self._changed.notify_all()

    def _send(self, to: int) -> None:
        while (data := self._going.get()) is not None:
            self._lane.send(data, to)

    def _until_lost(self, work: Callable[[int], None], peer: int) -> None:
        try:
            work(peer)
        except Exception as error:  # also what nobody expects: who waits for this thread would wait for ever
            with self._changed:
                self._failure = self._failure or (PeerLost(str(error)) if isinstance(error, PeerLost) else error)
                self._changed.notify_all()
