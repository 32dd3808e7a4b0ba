"""The ranks of a run that share out every unit: what they say to one another, and how they commit together.

Rank 0 leads: it alone has model and data, and tells the others each step. Invariant (two phases): every rank commits its part
in a record of its own, and votes. Then rank 0 writes the record that names every rank's commit. A rank that finds a newer
record of its own than rank 0 names goes back to the one before, which nobody has overwritten.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.ask.planner import RunPlanner
from headrace.machine.host_memory import Bytes, huge_page_buffer
from headrace.model import Chain
from headrace.peers.meet.ranks import Ranks
from headrace.peers.meet.shared_copy import SharedCopy
from headrace.plan.value.plan import Plan
from headrace.store import StateStore
from headrace.store.shard_store import ShardStore
from headrace.terms.lanes import Peer
from headrace.terms.options.options import Options
from headrace.terms.options.summing import Order, order_of, shares_of
from headrace.terms.shards import Share, bytes_by_rank

LEADER = 0
# Where the leader's record names the commits of the other ranks, by rank from 1.
VERSIONS = "ranks"


def folder_of(told: Mapping[str, Any], rank: int) -> Path:
    """Return the folder of a rank that follows: in the first SSD directory, or in the run's own."""
    base = told["ssd"][0] if told["ssd"] else told["output"]
    return Path(base) / f"headrace-rank-{rank}-{told['run_id']}"


class Talk:
    """The ranks that meet over `ranks`. Sums of gradients are rounded to `dtype`, once that is set.

    `folder_of` says where the part of another rank lies.
    """

    by_stages = False
    peer = Peer.RANK

    def __init__(self, ranks: Ranks, folder_of: Callable[[Mapping[str, Any], int], Path] = folder_of) -> None:
        self.ranks, self.rank, self.size = ranks, ranks.rank, ranks.size
        self.folder_of = folder_of
        self.share: Share = Share(ranks.rank, ranks.size)
        self.copy = SharedCopy(ranks)
        self.dtype = torch.float32
        self.figures: dict[int, dict[str, int]] = {}  # by rank, as far as they are known here: what it did since it started
        self.told_seconds: dict[int, float] = {}  # by rank: when this one had last told it what to do
        self._order: Order = 1
        self._importing = False
        self._store: ShardStore | None = None

    @property
    def name(self) -> str:
        """What it is called in a run's state."""
        return str(self.size)

    @property
    def terms(self) -> dict[str, Any]:
        """What else the other ranks must know of how the run is shared out."""
        return {}

    def settle_on(self, options: Options, planner: RunPlanner, chain: Chain) -> None:
        """Decide how the run is shared out, before it is planned."""

    def follow_plan(self, planner: RunPlanner, leaders: Plan, chain: Chain) -> None:
        """Let `planner` plan for this rank as rank 0 has planned, where each has a plan of its own."""

    def agree(self, terms: Mapping[str, Any], options: Options) -> None:
        """Share out as `terms` say, which rank 0 told or an earlier start left."""

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == LEADER

    def adopt(self, store: StateStore) -> None:
        """Let `store`, of this rank, commit with the others."""
        assert isinstance(store, ShardStore), "the store of a rank"
        store.others, self._store = self, store

    # -- between steps --------------------------------------------------------------------------------------------------

    def tell(self, words: Mapping[str, Any], batch: Mapping[str, torch.Tensor] | None = None) -> None:
        """Tell the other ranks what to do, with the rows of a batch if there is one."""
        rows = {name: tensor.contiguous().to(torch.int32) for name, tensor in (batch or {}).items()}
        shapes = {name: list(tensor.shape) for name, tensor in rows.items()}
        for rank in self.ranks.others:
            self.ranks.control.send_message({**words, "batch": shapes}, rank)
            for tensor in rows.values():
                self.ranks.control.send(tensor, rank)
            self.told_seconds[rank] = time.perf_counter()

    def hear(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return what rank 0 tells, and the batch."""
        words = self.ranks.control.receive_message(LEADER)
        batch = {}
        for name, shape in words.pop("batch", {}).items():
            rows = torch.empty(shape, dtype=torch.int32)
            self.ranks.control.receive(rows, LEADER)
            batch[name] = rows.to(torch.int64)
        return words, batch

    def shares(self, num_micro: int, way: str) -> dict[int, range]:
        """Return the micro-batches of each rank, and add their sums in this order from now on."""
        self._order = order_of(num_micro, self.size, way)
        return {rank - 1: share for rank, share in shares_of(num_micro, self._order, way).items()}

    def collect(self, value: Any) -> list[Any]:
        """Return by rank what each rank has to say, JSON values; to all but rank 0 only what they said themselves."""
        if not self.leads:
            self.ranks.control.send_message(value, LEADER)
            return [value]
        return [value, *(self.ranks.control.receive_message(rank) for rank in self.ranks.others)]

    def count(self, *, tokens: int, bytes_read: int, bytes_written: int, peak_bytes: int) -> None:
        """Enter what this rank has done: tokens of one more step, and bytes since it started."""
        before = self.figures.get(self.rank, {"tokens": 0, "peak_bytes": 0})
        self.figures[self.rank] = {
            "rank": self.rank,
            "tokens": before["tokens"] + tokens,
            "bytes_read": bytes_read,
            "bytes_written": bytes_written,
            "peak_bytes": max(before["peak_bytes"], peak_bytes),
        }

    # -- within a step: `flow.step.shards.Peers` -----------------------------------------------------------------------------

    def gather(self, unit: int, family: str, whole: Bytes) -> None:
        """Fill `whole`, the bytes of a family, with what others hold."""
        assert self._store is not None, "ranks step with a store"
        described = self._store.manifest.units[unit].family(family)
        assert described is not None, "what is gathered has a place"
        self.ranks.gather(whole, bytes_by_rank(described, unit, self.size), shared=self.copy.holds(whole))

    def clear(self, into: Bytes) -> None:
        """Return once no rank needs what lies in `into`, if that is memory of all ranks of this machine."""
        self.copy.clear(into)

    def scatter(self, gradient: torch.Tensor, parts: Sequence[slice]) -> None:
        """Replace this rank's part of `gradient`, flat and fp32, by the sum of all ranks'."""
        self.ranks.scatter(gradient, parts, self._order, self.dtype)

    def gather_norms(self, sums: NDArray[np.float64], parts: Sequence[slice]) -> None:
        """Fill `sums` with the parts of the other ranks."""
        self.ranks.gather(sums.view(np.uint8), [slice(8 * part.start, 8 * part.stop) for part in parts], "norm")

    # -- the state: `store.shard_store.Others` --------------------------------------------------------------------------

    def commit_together(self, prepare: Callable[[Mapping[str, Any]], int], record: Mapping[str, Any]) -> None:
        """Have all ranks commit; rank 0's record, the last to be written, decides."""
        lane = self.ranks.lanes["commit"]
        if not self.leads:
            lane.send_message({"prepared": prepare(record)}, LEADER)
            lane.receive_message(LEADER)
            return
        if self._importing:
            self.tell({"do": "imported"})
        votes = [lane.receive_message(rank)["prepared"] for rank in self.ranks.others]
        prepare({**record, VERSIONS: votes})
        for rank in self.ranks.others:
            lane.send_message({"committed": True}, rank)

    def read_chunk(self, unit: int, family: str, chunk: int, num_chunks: int, into: Bytes) -> None:
        """Fill `into` with a chunk that another rank holds."""
        rank = self.share.holder(num_chunks, unit, chunk)
        words = {"do": "read", "unit": unit, "family": family, "chunk": chunk}
        self.ranks.control.send_message(words, rank)
        self.ranks.control.receive(into, rank)

    def write_chunk(self, unit: int, family: str, chunk: int, num_chunks: int, data: Bytes) -> None:
        """Give a chunk to the rank that holds it."""
        rank = self.share.holder(num_chunks, unit, chunk)
        words = {"do": "write", "unit": unit, "family": family, "chunk": chunk}
        self.ranks.control.send_message(words, rank)
        self.ranks.control.send(data, rank)

    def answer(self, store: StateStore, words: Mapping[str, Any]) -> None:
        """Read or write a chunk that is held here, as rank 0 asks."""
        unit, name, chunk = int(words["unit"]), str(words["family"]), int(words["chunk"])
        family = store.manifest.units[unit].family(name)
        assert family is not None, "rank 0 has the same families"
        content = huge_page_buffer(family.chunk_bytes(chunk))
        if words["do"] == "read":
            store.read(unit, name, content, chunk).wait()
            self.ranks.control.send(content, LEADER)
        else:
            self.ranks.control.receive(content, LEADER)
            store.write(unit, name, chunk, content).wait()

    @contextmanager
    def reaching(self, store: StateStore, *, importing: bool = False) -> Iterator[None]:
        """Let rank 0's `store` read and write what the others hold, who do nothing else meanwhile."""
        assert isinstance(store, ShardStore), "the store of a rank"
        store.reaches, self._importing = True, importing
        try:
            yield
        finally:
            store.reaches, self._importing = False, False
