"""Ranks of one machine have one copy: nothing is sent within it, all parts come to it once, and nobody writes too early.

Run: pytest tests/net/test_shared_copy.py
"""

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import HashStore

from headrace.peers.meet import ranks
from headrace.peers.meet.lane import Channel
from headrace.peers.meet.ranks import Ranks
from headrace.peers.meet.shared_copy import SharedCopy
from headrace.peers.meet.shared_memory import SharedMemory
from headrace.terms.errors import PeerLost

Pair = tuple[Ranks, SharedCopy]


def of_all(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Return what all calls return, each in a thread of its own."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [each.result(120) for each in [pool.submit(call) for call in calls]]


@contextmanager
def copies(machines: Sequence[Sequence[int]]) -> Iterator[list[Pair]]:
    """Give all ranks of these machines, with their copies."""
    store, size = HashStore(), sum(map(len, machines))

    def made(rank: int) -> Pair:
        ours = next(each for each in machines if rank in each)
        found = Ranks(store, rank, size, host="127.0.0.1", machine=ours)
        return found, SharedCopy(found)

    pairs = of_all([lambda rank=rank: made(rank) for rank in range(size)])
    try:
        yield pairs
    finally:
        for each, copy in pairs:
            copy.close()
            each.close()


MACHINES = [((0, 1),), ((0, 1), (2, 3)), ((0, 1, 2), (3,))]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, int]]:
    """Count bytes by sender and receiver."""
    moved: Counter[tuple[int, int]] = Counter()
    real = Channel.start_send

    def call(lane: Channel, data: torch.Tensor, to: int) -> Any:
        moved[lane.rank, to] += data.numel() * data.element_size()
        return real(lane, data, to)

    monkeypatch.setattr(Channel, "start_send", call)
    return moved


@pytest.mark.parametrize("machines", [pytest.param(each, marks=pytest.mark.wide if len(each) > 1 else []) for each in MACHINES])
def test_all_see_the_whole_and_each_part_comes_to_a_machine_once(
    machines: Sequence[Sequence[int]], counted: Counter[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "PIECE_BYTES", 1000)
    size, part = sum(map(len, machines)), 3000
    parts, whole = [slice(part * rank, part * (rank + 1)) for rank in range(size)], np.arange(part * size, dtype=np.uint8)
    with copies(machines) as pairs:
        memories = of_all([lambda copy=copy: copy.map(whole.size) for _, copy in pairs])
        assert [copy.sharers for _, copy in pairs] == [len(each) for each in machines for _ in each]
        counted.clear()

        def gathered(rank: int) -> bool:
            memories[rank][parts[rank]] = whole[parts[rank]]
            pairs[rank][0].gather(memories[rank], parts, shared=True)
            return bool((memories[rank] == whole).all())

        assert of_all([lambda rank=rank: gathered(rank) for rank in range(size)]) == [True] * size
    for ours in machines:
        words = sum(count for (source, to), count in counted.items() if source in ours and to in ours)
        assert words == 0, "neighbours greet one another"
        came = Counter({rank: sum(counted[rank, to] for to in ours) for rank in range(size) if rank not in ours})
        assert all(count == part for count in came.values()), "each part comes once"


@pytest.mark.wide
def test_nobody_writes_before_all_have_done_with_a_place() -> None:
    with copies(((0, 1, 2),)) as pairs:
        memories = of_all([lambda copy=copy: copy.map(1 << 16) for _, copy in pairs])
        passed, places = list[tuple[int, int]](), (slice(0, 100), slice(4096, 5000))

        def clear(rank: int, place: int) -> None:
            pairs[rank][1].clear(memories[rank][places[place]])
            passed.append((rank, place))

        # Ranks come to the two places in different orders, each in a thread of its own.
        early = [threading.Thread(target=clear, args=each, daemon=True) for each in ((0, 0), (0, 1), (1, 1), (1, 0), (2, 1))]
        for thread in early:
            thread.start()
        for thread in early:
            if thread in (early[1], early[2], early[4]):
                thread.join(120)
        assert sorted(passed) == [(0, 1), (1, 1), (2, 1)], "rank 2 is not done with the first place"
        clear(2, 0)
        for thread in early:
            thread.join(120)
        assert sorted(passed) == [(rank, place) for rank in range(3) for place in range(2)]
        pairs[0][1].clear(np.zeros(10, np.uint8))  # memory of its own: nobody is asked


def test_who_waits_for_a_lost_rank_is_told() -> None:
    with copies(((0, 1),)) as pairs:
        memories = of_all([lambda copy=copy: copy.map(4096) for _, copy in pairs])
        failures = list[BaseException]()

        def clear() -> None:
            try:
                pairs[0][1].clear(memories[0])
            except PeerLost as lost:
                failures.append(lost)

        thread = threading.Thread(target=clear, daemon=True)
        thread.start()
        pairs[1][0].close()
        thread.join(120)
        assert len(failures) == 1


def test_memory_that_cannot_be_shared_is_each_ranks_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: str, num_bytes: int) -> SharedMemory:
        raise PermissionError(address)

    monkeypatch.setattr(SharedMemory, "at", refuse)
    with copies(((0, 1),)) as pairs:
        assert [(copy.sharers, copy.is_used, copy.resident_bytes) for _, copy in pairs] == [(1, False, 0)] * 2


def test_shared_memory_has_no_name_and_counts_what_is_touched() -> None:
    with SharedMemory.make(8 << 20) as memory:
        other = SharedMemory.at(memory.address, 8 << 20)
        assert os.stat(memory.address).st_nlink == 0, "nothing but processes that have it keep it"
        assert memory.resident_bytes == 0
        memory.content[: 1 << 20] = 7
        assert 1 << 20 <= other.resident_bytes <= 3 << 20, "of both together, in whole pages"
        assert (other.content[: 1 << 20] == 7).all()
        other.close()
        other.close()
        assert other.resident_bytes == 0
        assert other.content[0] == 7, "arrays keep it"
