"""The ranks of a run that share out every unit, as the engine sees them (`engine.company.Company`).

Rank 0 leads: it alone has model and data, and tells the others each step. Invariant (two phases): every rank commits its part
in a record of its own, and votes. Then rank 0 writes the record that names every rank's commit. A rank that finds a newer
record of its own than rank 0 names goes back to the one before, which nobody has overwritten.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.ask.planner import RunPlanner
from headrace.engine.subject import Subject
from headrace.files import Beside
from headrace.flow.weights.arena import TORCH_DTYPES
from headrace.machine.host_memory import Bytes, huge_page_buffer
from headrace.model import Chain
from headrace.peers.meet.ranks import Ranks
from headrace.peers.meet.shared_copy import SharedCopy
from headrace.peers.meet.talk import gather, hear, tell
from headrace.plan.search.serving import grouping_of
from headrace.plan.value.plan import Plan
from headrace.store import StateStore
from headrace.store.shard_store import ShardStore
from headrace.terms.cuts import least_chunk_elements
from headrace.terms.errors import ConfigError
from headrace.terms.events import Sink
from headrace.terms.lanes import Peer
from headrace.terms.layout import UNIT_ALIGNMENT
from headrace.terms.options.options import Options
from headrace.terms.options.summing import Order, order_of, shares_of
from headrace.terms.shards import Share, bytes_by_rank
from headrace.terms.sizes import round_up

LEADER = 0
# Where the leader's record names the commits of the other ranks, by rank from 1.
VERSIONS = "ranks"
# So many chunks of the largest block each rank has at least, so that all have equally much to read, update and write.
_CHUNKS_PER_RANK = 2
_CONFIGURATION = ("config.json", "model.safetensors.index.json")


def folder_of(told: Mapping[str, Any], rank: int) -> Path:
    """Return the folder of a rank that follows: in the first SSD directory, or in the run's own."""
    base = told["ssd"][0] if told["ssd"] else told["output"]
    return Path(base) / f"headrace-rank-{rank}-{told['run_id']}"


class Fleet:
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

    def planned_options(self, options: Options) -> Options:
        """Return the options under which a rank plans. Gradients that ranks add are rounded afterwards, not before."""
        return replace(options, gradient_dtype="float32")

    def share_of_step(
        self, planner: RunPlanner, step: tuple[int, int], way: str, *, state: Sequence[Path], beside: Beside | None
    ) -> tuple[int, int]:
        """Return the tokens of the largest rank's share of a step, and their rows' length; fix how sums are grouped.

        Raises:
            ConfigError: a step has fewer micro-batches than there are ranks.
        """
        tokens, length = step
        sequences = tokens // length
        if planner.grouping is None:
            rows = max(1, sequences // self.size)
            found = grouping_of(planner.plan(rows * length, length, state=state, beside=beside))
            assert found is not None, "a plan that computes groups sums"
            planner.group(found)
        assert planner.grouping is not None, "it was just given"
        rows = planner.grouping.rows
        num_micro = -(-sequences // rows)
        if num_micro < self.size:
            raise ConfigError(
                f"tokens_per_step: a step of {sequences} rows has {num_micro} micro-batches of {rows} rows, too few for "
                f"{self.size} ranks; give more tokens_per_step, or start fewer ranks"
            )
        most = max(map(len, shares_of(num_micro, order_of(num_micro, self.size, way), way).values()))
        return most * rows * length, length

    def shared_plan(self, plan: Plan) -> Plan:
        """Return a plan whose chunks are so small that every rank has some of each block."""
        largest = max(
            unit.update_elements if unit.update_elements else unit.num_elements for unit in plan.units[1:-1] or plan.units
        )
        even = round_up(-(-largest // (self.size * _CHUNKS_PER_RANK)), UNIT_ALIGNMENT)
        least = max(least_chunk_elements(unit.cuts) for unit in plan.units)
        return plan.with_updates(chunk_elements=min(plan.updates.chunk_elements, max(even, least)))

    def introduce(
        self,
        subject: Subject,
        store: StateStore,
        options: Options,
        plan: Plan | None,
        *,
        record: Mapping[str, Any] | None = None,
    ) -> None:
        """Tell the other ranks about the run that begins, or goes on, in `store`; from here on they take part. With a `record`
        the run goes on in a new store, whose first commit that is.

        Raises:
            ConfigError: there is no plan, because the size of a step is not given.
        """
        if plan is None:
            raise ConfigError("tokens_per_step: ranks share out steps of a known size; give it")
        self.adopt(store)
        self.dtype = TORCH_DTYPES[options.gradient_dtype or options.compute_dtype]
        versions = store.record.get(VERSIONS)
        files = {tensor.path for tensor in subject.checkpoint.tensors.values()}
        words = {
            "options": options.to_record(),
            "ssd": list(map(str, options.budget.ssd)),
            "output": str(options.output or store.manifest.directories[0]),
            "plan": plan.to_json(),
            "record": record,
            "run_id": store.manifest.run_id,
            "wire": subject.seams.wire.name,
            "terms": self.terms,
            "texts": {
                name: (subject.directory / name).read_text(encoding="utf-8")
                for name in _CONFIGURATION
                if (subject.directory / name).exists()
            },
            "weights": {path.name: path.stat().st_size for path in files},
        }
        heads = {path.name: _head_of(path) for path in sorted(files)}
        for rank in self.ranks.others:
            tell(self.ranks.control, {**words, "at": versions[rank - 1] if versions else None}, rank, heads)

    def take_up(
        self,
        run_directory: Path,
        subject: Subject,
        planner: RunPlanner,
        store: StateStore,
        options: Options,
        plan: Plan | None,
        sink: Sink,
    ) -> tuple[StateStore, Plan | None]:
        """See `resharing.taken_up`."""
        from headrace.peers.ranks.resharing import taken_up

        return taken_up(self, run_directory, subject, planner, store, options, plan, sink)

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
        rows = {name: tensor.to(torch.int32) for name, tensor in (batch or {}).items()}
        for rank in self.ranks.others:
            tell(self.ranks.control, words, rank, rows)
            self.told_seconds[rank] = time.perf_counter()

    def hear(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return what rank 0 tells, and the batch."""
        words, rows = hear(self.ranks.control, LEADER)
        return words, {name: tensor.to(torch.int64) for name, tensor in rows.items()}

    def shares(self, num_micro: int, way: str) -> dict[int, range]:
        """Return the micro-batches of each rank, and add their sums in this order from now on."""
        self._order = order_of(num_micro, self.size, way)
        return {rank - 1: share for rank, share in shares_of(num_micro, self._order, way).items()}

    def collect(self, value: Any) -> list[Any]:
        """Return by rank what each rank has to say, JSON values; to all but rank 0 only what they said themselves."""
        return gather(self.ranks.control, value)

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
        tell(self.ranks.control, words, rank)
        self.ranks.control.receive(into, rank)

    def write_chunk(self, unit: int, family: str, chunk: int, num_chunks: int, data: Bytes) -> None:
        """Give a chunk to the rank that holds it."""
        rank = self.share.holder(num_chunks, unit, chunk)
        words = {"do": "write", "unit": unit, "family": family, "chunk": chunk}
        tell(self.ranks.control, words, rank)
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


def _head_of(path: Path) -> torch.Tensor:
    """Return what of a safetensors file says where its tensors lie."""
    with path.open("rb") as file:
        start = file.read(8)
        return torch.frombuffer(bytearray(start + file.read(int.from_bytes(start, "little"))), dtype=torch.uint8)
