"""A generation: peers that work together until one of them is lost. The next generation has groups of its own, so that no late
message can reach it.
"""

import gc
import threading

from torch.distributed import Store  # type: ignore[attr-defined]

from headrace.peers.meet.lane import Channel


class Generation:
    """The lanes of generation `number`: `down` for what the node sends, `up` for what it receives. Rank 0 is the node.

    `names` are the peers' names by rank. A watchman calls `end` with what it knows; threads that wait on a lane are then told.
    """

    def __init__(
        self, store: Store, number: int, *, host: str, rank: int, names: tuple[str, ...], piece_seconds: float
    ) -> None:
        self.number, self.rank, self.names = number, rank, names
        self._reason: str | None = None
        self._lock = threading.Lock()
        self._lanes: list[Channel] = []
        for direction in ("down", "up"):
            name = f"generation/{number}/{direction}"
            lane = Channel(
                store, name, host=host, rank=rank, names=names, why=lambda: self._reason, piece_seconds=piece_seconds
            )
            self._lanes.append(lane)

    @property
    def down(self) -> Channel:
        """The lane from the node to workers."""
        return self._lanes[0]

    @property
    def up(self) -> Channel:
        """The lane from workers to the node."""
        return self._lanes[1]

    @property
    def num_workers(self) -> int:
        """Number of workers in the generation."""
        return len(self.names) - 1

    @property
    def has_ended(self) -> bool:
        """Whether somebody ended it."""
        return self._reason is not None

    def end(self, reason: str) -> None:
        """Break all lanes, because of `reason`; the first reason counts."""
        with self._lock:
            self._reason = self._reason or reason
        for lane in self._lanes:
            lane.end()

    def close(self) -> None:
        """Let all connections go, so that peers see it."""
        for lane in self._lanes:
            lane.close()
        gc.collect()  # a caught exception may hold a transfer, and that holds its connection
