"""The worked example of docs/extending.md: a system of several machines."""

from pathlib import Path

from extending import apply, run

RUN = """
import threading
import torch
from torch.distributed import HashStore
from headrace.peers.meet.ranks import Ranks
from headrace.peers.rows.shared_rows import SharedRows

table = torch.arange(33.0).view(11, 3)
asked = {0: [1, 0, 10, 1], 1: [5, 8, 3], 2: [2, 2, 5]}  # the last asks for rows of its own alone
store, found = HashStore(), {}

def ask(rank):
    with Ranks(store, rank, 3, host="127.0.0.1") as ranks:
        found[rank] = SharedRows(ranks, table[rank::3]).get(asked[rank])

threads = [threading.Thread(target=ask, args=(rank,), daemon=True) for rank in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(120)
print(all(torch.equal(found[rank], table[ids]) for rank, ids in asked.items()))
"""


def test_rows_come_from_whoever_holds_them(tmp_path: Path) -> None:
    assert len(apply("A system of several machines", tmp_path)) == 1
    assert run(tmp_path, "-c", RUN).splitlines() == ["True"]
