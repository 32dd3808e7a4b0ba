"""Ranks that commit together: cut off between any two writes, all open again at one step, the one before or the one after."""

import queue
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiers import sampled

from headrace.machine.host_memory import huge_page_buffer
from headrace.peers.ranks.fleet import VERSIONS, Fleet
from headrace.store import StoreRequest
from headrace.store.shard_store import ShardStore
from headrace.terms.errors import StorageError
from headrace.terms.families import WEIGHTS, trained_unit
from headrace.terms.layout import lay_out, planes_with
from headrace.terms.shards import Share
from headrace.testing.power_supply import PowerSupply

SIZE, CHUNK = 3, 2048
STRIDE = 8  # each seed cuts at every so many writes; all seeds together at each
UNITS = [
    trained_unit(lay_out(f"unit {unit}", [("w", (chunks * CHUNK,), (1.0, 0.0))]), planes_with("bfloat16", ()), CHUNK)
    for unit, chunks in enumerate((1, 4, 5))
]


class Wires:
    """The lanes for commits of ranks in threads. Once it is cut, who waits is told."""

    def __init__(self) -> None:
        self.queues = {(source, to): queue.SimpleQueue[Any]() for source in range(SIZE) for to in range(SIZE)}
        self.is_cut = False

    def of(self, rank: int) -> Any:
        def receive(source: int) -> Any:
            while True:
                try:
                    return self.queues[source, rank].get(timeout=0.01)
                except queue.Empty:
                    if self.is_cut:
                        raise StorageError("cut off") from None

        lane = SimpleNamespace(send_message=lambda value, to: self.queues[rank, to].put(value), receive_message=receive)
        others = [each for each in range(SIZE) if each != rank]
        apart = {"machine": (rank,), "sharing": [(each,) for each in range(SIZE)]}
        return SimpleNamespace(rank=rank, size=SIZE, others=others, lanes={"commit": lane}, **apart)


def on_all(act: Any) -> list[Any]:
    """Return by rank what `act` returns there, None where it is cut off."""
    found: list[Any] = [None] * SIZE

    def run(rank: int) -> None:
        found[rank] = act(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def write(store: ShardStore, step: int) -> None:
    for unit, described in enumerate(UNITS):
        for chunk in range(described.weights.num_chunks):
            content = huge_page_buffer(described.weights.chunk_bytes(chunk))
            content[:] = step
            store.write(unit, WEIGHTS, chunk, content).wait()
    store.commit({"step": step})


def steps_in(store: ShardStore) -> set[int]:
    """Return the steps whose bytes the chunks have that this rank holds."""
    found = set()
    for unit, described in enumerate(store.manifest.units):
        for chunk in described.weights.held_chunks:
            content = huge_page_buffer(described.weights.chunk_bytes(chunk))
            store.read(unit, WEIGHTS, content, chunk).wait()
            found |= set(content.tolist())
    return found


@pytest.mark.wide
@pytest.mark.parametrize("seed", sampled(range(STRIDE), (3,)))
def test_cut_off_between_any_two_writes_all_ranks_open_at_one_step(seed: int, tmp_path: Path) -> None:
    cut_at, reached = seed, 0
    while reached < 4:
        reached = cut_off(tmp_path / str(cut_at), cut_at, seed)
        cut_at += STRIDE
    assert cut_at > 30, "there were writes to be cut"


def cut_off(folder: Path, cut_at: int, seed: int) -> int:
    """Cut the power of all ranks after so many writes and syncs since step 1; return the step at which they open again."""
    supply, wires, heard = PowerSupply(1 << 30, seed), Wires(), [1] * SIZE

    def run(rank: int) -> ShardStore:
        directory = folder / f"rank {rank}"
        directory.mkdir(parents=True)
        request = StoreRequest([directory], Share(rank, SIZE).of(UNITS), 0, allow_tmpfs=True, stripe_bytes=1 << 20)
        store = ShardStore.create(directory, request, sink=lambda event: None, open_file=supply.open_file)
        store.others = Fleet(wires.of(rank))
        write(store, 1)
        return store

    stores = on_all(run)
    for file in supply.files:
        file.sync()
    supply.calls, supply.cut_at = 0, cut_at

    def go_on(rank: int) -> None:
        try:
            for step in (2, 3, 4):
                write(stores[rank], step)
                heard[rank] = step
        except StorageError:
            wires.is_cut = True

    on_all(go_on)
    for store in stores:
        store.close()
    supply.cut()
    leader = ShardStore.open(folder / "rank 0", sink=lambda event: None)
    step = int(leader.record["step"])
    assert step >= max(heard), "what a rank has heard is durable"
    assert step <= min(heard) + 1, "no rank goes on before all have committed"
    assert steps_in(leader) == {step}
    for rank in range(1, SIZE):
        with ShardStore.open(folder / f"rank {rank}", sink=lambda event: None, at=leader.record[VERSIONS][rank - 1]) as other:
            other.verify()
            assert steps_in(other) == {step}
            assert other.record["step"] == step
    leader.close()
    return step
