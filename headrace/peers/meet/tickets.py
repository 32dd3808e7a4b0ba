"""Tickets that peers take before they say hello, at the node: who has one and says nothing is passed over."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.peers.meet.board import Board

# Tickets whose owners have not said hello, or may say it again: the newest so many are looked at, each for so long.
_MOST_OPEN, _OPEN_SECONDS = 256, 60.0
_MOST_TICKETS = 1 << 31
HELLO = {"name": str, "version": str, "nonce": str, "visits": bool, "peer": str}


@dataclass
class OpenTicket:
    """A ticket that was taken: since when (monotonic seconds), and the answer to its hello, to the hello of this nonce."""

    since_seconds: float
    nonce: str = ""
    answer: Mapping[str, Any] | None = None


class Tickets:
    """The tickets of a `board`."""

    def __init__(self, board: Board) -> None:
        self._board, self._seen = board, 0
        self._open: dict[int, OpenTicket] = {}

    def said(self) -> Iterator[tuple[int, OpenTicket, Mapping[str, Any], bool]]:
        """Yield those whose owners say hello: number, ticket, the hello, and whether it has a proof. Each hello comes once."""
        now, taken = time.monotonic(), self._taken()
        for number in range(max(self._seen, taken - _MOST_OPEN) + 1, taken + 1):
            self._open[number] = OpenTicket(now)
        self._seen = taken
        old = [number for number, each in self._open.items() if now - each.since_seconds > _OPEN_SECONDS]
        for number in (*old, *sorted(self._open.keys() - {*old})[:-_MOST_OPEN]):
            del self._open[number]
        for number, found in sorted(self._open.items()):
            hello, is_proven = self._board.claimed(f"hello/{number}", HELLO)
            if hello is not None:
                self._board.remove(f"hello/{number}")
                yield number, found, hello, is_proven

    def _taken(self) -> int:
        """Return how many tickets were taken. The store itself counts them, in digits."""
        found = (self._board.raw("tickets") or b"0")[:20]
        taken = int(found) if found.isdigit() else -1
        if self._seen <= taken <= _MOST_TICKETS:
            return taken
        self._board.drop("tickets", found)
        self._board.store.set("tickets", str(self._seen))
        return self._seen
