"""Ranks of one run that share out every unit: lanes between all of them, and what they exchange.

Each rank sends what it holds of a unit to all others. It gets from all others what it holds of a gradient. So (W - 1)/W of a
unit go each way: the pattern of a node's workers, without the node. Sums are taken in fp32, in a given order, and rounded once.
Where the ranks of a machine have one copy together, nothing is sent within it, and each part comes to it once.
"""

from collections.abc import Sequence
from datetime import timedelta

import torch
from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from headrace.machine.host_memory import Bytes
from headrace.peers.meet.address import Address
from headrace.peers.meet.exchange import PIECE_ELEMENTS, add_in_order
from headrace.peers.meet.generation import Lanes
from headrace.peers.meet.lane import PIECE_BYTES, Channel, PieceTransfer, finish_all, sort_of
from headrace.peers.meet.talk import agree
from headrace.terms.errors import ConfigError, PeerLost
from headrace.terms.launch import Launch
from headrace.terms.options.summing import Order

# One lane for each thread that may use it: weights, gradients, norms, commits, and what is said between steps. "clear" is
# that of `SharedCopy`.
_LANES = ("gather", "scatter", "norm", "commit", "control", "clear")
_JOIN_SECONDS = 600.0


class Ranks(Lanes):
    """Rank `rank` of `size`, which all meet at `store`. `host` is the IPv4 number of this machine that others reach.

    `names` are those of the peers, `lanes` those of the lanes between them. `machine` are the ranks of this machine.

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
        machine: Sequence[int] = (),
    ) -> None:
        names = tuple(names) or tuple(f"rank {each}" for each in range(size))
        super().__init__(store, "ranks", lanes, host=host, rank=rank, names=names, piece_seconds=piece_seconds)
        self.size = size
        self._store = store  # lives as long as its connections are wanted
        self.machine = tuple(machine) or (rank,)
        self.sharing: list[tuple[int, ...]] = [(each,) for each in range(size)]

    @classmethod
    def meet(
        cls,
        address: str,
        port: int,
        rank: int,
        size: int,
        *,
        prefix: str = "",
        hosts: bool = False,
        machine: Sequence[int] = (),
    ) -> "Ranks":
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
        host = Address(address, port).own_number(key="ranks")
        return cls(PrefixStore(f"headrace/{prefix}", store), rank, size, host=host, machine=machine)

    @classmethod
    def of(cls, launch: Launch, version: str) -> "Ranks":
        """Meet the other ranks of a launch, which must have the same `version`. Raises as `meet` and `compare`."""
        where = launch.address, launch.port, launch.rank, launch.size
        ranks = cls.meet(*where, prefix=launch.meeting, hosts=launch.hosts, machine=launch.machine)
        try:
            ranks.compare(version)
        except BaseException:
            ranks.close()
            raise
        return ranks

    def compare(self, version: str) -> None:
        """Check that all ranks have the version that rank 0 has.

        Raises:
            ConfigError: some have not; all are told.
            PeerLost: a rank is gone.
        """
        found = agree(self.control, {"version": version}, {"version": str})
        others = [f"{self.names[rank]} is headrace {each['version'][:40]}" for rank, each in enumerate(found)]
        if len({each["version"] for each in found}) > 1:
            raise ConfigError(f"ranks: {', '.join(others)}; install the same version on all machines")

    @property
    def others(self) -> list[int]:
        """The other ranks."""
        return [rank for rank in range(self.size) if rank != self.rank]

    @property
    def neighbours(self) -> list[int]:
        """The other ranks of this machine."""
        return [rank for rank in self.machine if rank != self.rank]

    @property
    def control(self) -> Channel:
        """The lane for what is said between steps."""
        return self.lanes["control"]

    def share(self, *, can: bool) -> None:
        """Tell all ranks whether this one has memory with its neighbours, and hear of all: `sharing` has the ranks that have a
        copy together.
        """
        found = agree(self.control, {"machine": self.machine if can else (self.rank,)}, {"machine": list | tuple})
        self.sharing = sorted({tuple(each["machine"]) for each in found})

    def gather(self, whole: Bytes, parts: Sequence[slice], lane: str = "gather", *, shared: bool = False) -> None:
        """Fill `whole` with the `parts` of the other ranks, and send them this rank's. If those who are `sharing` have it
        together (`shared`), one of them receives the part of a rank elsewhere, and all return once all parts are there.

        Raises:
            PeerLost: a rank is gone.
        """
        flat, over = torch.from_numpy(whole), self.lanes[lane]
        longest = max(part.stop - part.start for part in parts)
        sources, targets = self._across() if shared else (self.others, self.others)
        sorts = [sort_of(flat, (part.stop - part.start,)) for part in parts]
        over.meet(dict.fromkeys(targets, sorts[self.rank]), {rank: sorts[rank] for rank in sources})
        for start in range(0, longest, PIECE_BYTES):
            own = _piece(parts[self.rank], start, PIECE_BYTES)
            works = list[PieceTransfer]()
            for rank in self.others:
                if rank in sources and (piece := _piece(parts[rank], start, PIECE_BYTES)) is not None:
                    works.append(over.start_receive(flat[piece], rank))
                if rank in targets and own is not None:
                    works.append(over.start_send(flat[own], rank))
            finish_all(works)
        if shared:
            met = dict.fromkeys(self.neighbours, "met")  # all ranks of this machine have come here
            over.meet(met, met)

    def _across(self) -> tuple[list[int], list[int]]:
        """Return from which ranks of other machines this one receives for its own machine, and to which it sends."""
        ours = next(each for each in self.sharing if self.rank in each)
        sources = [rank for rank in self.others if rank not in ours and ours[rank % len(ours)] == self.rank]
        targets = [each[self.rank % len(each)] for each in self.sharing if self.rank not in each]
        return sources, targets

    def scatter(self, gradient: torch.Tensor, parts: Sequence[slice], order: Order, dtype: torch.dtype) -> None:
        """Add this rank's part of `gradient`, flat and fp32, to those of the others in `order`, in which ranks count from 1.
        The sum is rounded to `dtype`; the rest of `gradient` keeps this rank's own numbers.

        Raises:
            PeerLost: a rank is gone.
        """
        over, longest = self.lanes["scatter"], max(part.stop - part.start for part in parts)
        size = min(PIECE_ELEMENTS, longest)
        places = {rank: torch.empty(size, dtype=torch.float32) for rank in self.others}
        sorts = [sort_of(gradient, (part.stop - part.start,)) for part in parts]
        over.meet({rank: sorts[rank] for rank in self.others}, dict.fromkeys(self.others, sorts[self.rank]))
        for start in range(0, longest, PIECE_ELEMENTS):
            own = _piece(parts[self.rank], start, PIECE_ELEMENTS)
            works, came = list[PieceTransfer](), dict[int, torch.Tensor]()
            for rank in self.others:
                if own is not None:
                    came[rank + 1] = places[rank][: own.stop - own.start]
                    works.append(over.start_receive(came[rank + 1], rank))
                if (piece := _piece(parts[rank], start, PIECE_ELEMENTS)) is not None:
                    works.append(over.start_send(gradient[piece], rank))
            finish_all(works)
            if own is not None:
                total = add_in_order(order, came | {self.rank + 1: gradient[own]})
                gradient[own] = total.to(dtype).to(torch.float32)


def _piece(part: slice, start: int, size: int) -> slice | None:
    begin, end = part.start + start, min(part.start + start + size, part.stop)
    return slice(begin, end) if begin < end else None
