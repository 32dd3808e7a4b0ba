"""Ranks of one run that share out every unit: lanes between all of them, and what they exchange.

Each rank sends what it holds of a unit to all others. It gets from all others what it holds of a gradient. So (W - 1)/W of a
unit go each way: the pattern of a node's workers, without the node. Sums are taken in fp32, in a given order, and rounded once.
"""

import gc
import socket
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from headrace.machine.host_memory import Bytes
from headrace.net.exchange import PIECE_ELEMENTS, add_in_order
from headrace.net.lane import PIECE_BYTES, Lane, Piece, finish_all
from headrace.terms.closing import Closing
from headrace.terms.errors import PeerLost
from headrace.terms.launch import Launch
from headrace.terms.summing import Order

# One lane for each thread that may use it: weights, gradients, norms, commits, and what is said between steps.
_LANES = ("gather", "scatter", "norm", "commit", "control")
_JOIN_SECONDS = 600.0


class Ranks(Closing):
    """Rank `rank` of `size`, which all meet at `store`. `host` is the IPv4 number of this machine that others reach.

    `names` are those of the peers, `lanes` those of the lanes between them.

    Raises:
        PeerLost: not every rank came.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        host: str,
        piece_seconds: float = 300.0,
        names: Sequence[str] = (),
        lanes: Sequence[str] = _LANES,
    ) -> None:
        self.rank, self.size = rank, size
        names = tuple(names) or tuple(f"rank {each}" for each in range(size))
        self._reason: str | None = None
        self._store = store  # lives as long as its connections are wanted
        self.lanes = {
            name: Lane(store, f"ranks/{name}", host=host, rank=rank, names=names, why=self._why, piece_seconds=piece_seconds)
            for name in lanes
        }

    @classmethod
    def meet(cls, address: str, port: int, rank: int, size: int, *, prefix: str = "", hosts: bool = False) -> "Ranks":
        """Meet the other ranks at the store of `address`, which rank 0 makes if it `hosts` it. Who comes again takes another
        `prefix`.

        Raises:
            PeerLost: there is no store, or not every rank came.
        """
        try:
            store = TCPStore(
                address, port, is_master=hosts and rank == 0, wait_for_workers=False, timeout=timedelta(seconds=_JOIN_SECONDS)
            )
        except (DistError, RuntimeError) as error:
            raise PeerLost(f"ranks: no store at {address}:{port}; start all of them by one torchrun command") from error
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, port or 1))
            host = str(probe.getsockname()[0])
        return cls(PrefixStore(f"headrace/{prefix}", store), rank, size, host=host)

    @classmethod
    def of(cls, launch: Launch) -> "Ranks":
        """Meet the other ranks of a launch. Raises as `meet`."""
        return cls.meet(launch.address, launch.port, launch.rank, launch.size, prefix=launch.meeting, hosts=launch.hosts)

    @property
    def others(self) -> list[int]:
        """The other ranks."""
        return [rank for rank in range(self.size) if rank != self.rank]

    @property
    def control(self) -> Lane:
        """The lane for what is said between steps."""
        return self.lanes["control"]

    def gather(self, whole: Bytes, parts: Sequence[slice], lane: str = "gather") -> None:
        """Fill `whole` with the `parts` of the other ranks, and send them this rank's.

        Raises:
            PeerLost: a rank is gone.
        """
        flat, over = torch.from_numpy(whole), self.lanes[lane]
        longest = max(part.stop - part.start for part in parts)
        for start in range(0, longest, PIECE_BYTES):
            own = _piece(parts[self.rank], start, PIECE_BYTES)
            works = list[Piece]()
            for rank in self.others:
                if (piece := _piece(parts[rank], start, PIECE_BYTES)) is not None:
                    works.append(over.start_receive(flat[piece], rank, first=start == 0))
                if own is not None:
                    works.append(over.start_send(flat[own], rank, first=start == 0))
            finish_all(works)

    def scatter(self, gradient: torch.Tensor, parts: Sequence[slice], order: Order, dtype: torch.dtype) -> None:
        """Add this rank's part of `gradient`, flat and fp32, to those of the others in `order`, in which ranks count from 1.
        The sum is rounded to `dtype`; the rest of `gradient` keeps this rank's own numbers.

        Raises:
            PeerLost: a rank is gone.
        """
        over, longest = self.lanes["scatter"], max(part.stop - part.start for part in parts)
        size = min(PIECE_ELEMENTS, longest)
        places = {rank: torch.empty(size, dtype=torch.float32) for rank in self.others}
        for start in range(0, longest, PIECE_ELEMENTS):
            own, first = _piece(parts[self.rank], start, PIECE_ELEMENTS), start == 0
            works, came = list[Piece](), dict[int, torch.Tensor]()
            for rank in self.others:
                if own is not None:
                    came[rank + 1] = places[rank][: own.stop - own.start]
                    works.append(over.start_receive(came[rank + 1], rank, first=first))
                if (piece := _piece(parts[rank], start, PIECE_ELEMENTS)) is not None:
                    works.append(over.start_send(gradient[piece], rank, first=first))
            finish_all(works)
            if own is not None:
                total = add_in_order(order, came | {self.rank + 1: gradient[own]})
                gradient[own] = total.to(dtype).to(torch.float32)

    def end(self, reason: str) -> None:
        """Break all lanes, because of `reason`: who waits on one, here or elsewhere, is told."""
        self._reason = self._reason or reason
        for lane in self.lanes.values():
            lane.end()

    def close(self) -> None:
        """Let all connections go. A second call does nothing."""
        for lane in self.lanes.values():
            lane.close()
        gc.collect()  # a caught exception may hold a transfer, and that holds its connection

    def _why(self) -> str | None:
        return self._reason


def _piece(part: slice, start: int, size: int) -> slice | None:
    begin, end = part.start + start, min(part.start + start + size, part.stop)
    return slice(begin, end) if begin < end else None
