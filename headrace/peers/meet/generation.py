"""Peers that work together until one of them is lost, over lanes that end together.

Those who meet again have lanes of their own, so that no late message can reach them.
"""

import gc
import threading
from collections.abc import Sequence

from torch.distributed import Store  # type: ignore[attr-defined]

from headrace.peers.meet.lane import Channel
from headrace.terms.closing import Closing


class Lanes(Closing):
    """The `lanes` between peers that meet in `store` under `prefix`, by name. `names` are the peers' names by rank.

    A watchman calls `end` with what it knows; threads that wait on a lane are then told.

    Raises:
        PeerLost: not every peer came.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        lanes: Sequence[str],
        *,
        host: str,
        rank: int,
        names: tuple[str, ...],
        piece_seconds: float,
    ) -> None:
        self.rank, self.names = rank, names
        self._reason: str | None = None
        self._lock = threading.Lock()
        self.lanes = {
            name: Channel(
                store,
                f"{prefix}/{name}",
                host=host,
                rank=rank,
                names=names,
                why=lambda: self._reason,
                piece_seconds=piece_seconds,
            )
            for name in lanes
        }

    @property
    def has_ended(self) -> bool:
        """Whether somebody ended it."""
        return self._reason is not None

    def end(self, reason: str) -> None:
        """Break all lanes, because of `reason`; the first reason counts."""
        with self._lock:
            self._reason = self._reason or reason
        for lane in self.lanes.values():
            lane.end()

    def close(self) -> None:
        """Let all connections go, so that peers see it."""
        for lane in self.lanes.values():
            lane.close()
        gc.collect()  # a caught exception may hold a transfer, and that holds its connection


class Generation(Lanes):
    """The lanes of generation `number`: `down` for what the node sends, `up` for what it receives. Rank 0 is the node."""

    def __init__(
        self, store: Store, number: int, *, host: str, rank: int, names: tuple[str, ...], piece_seconds: float
    ) -> None:
        prefix, lanes = f"generation/{number}", ("down", "up")
        super().__init__(store, prefix, lanes, host=host, rank=rank, names=names, piece_seconds=piece_seconds)
        self.number = number
        self.down, self.up = self.lanes["down"], self.lanes["up"]

    @property
    def num_workers(self) -> int:
        """Number of workers in the generation."""
        return len(self.names) - 1
