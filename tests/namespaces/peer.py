"""One peer of an exchange, in a process of its own: `peer.py RANK WORKERS NODE_HOST ELEMENTS`; rank 0 is the node.

It prints `ready` before each phase, and takes a line to begin it; after the last one, `done`.
"""

import sys

import numpy as np
import torch

from headrace.peers.meet.address import Address
from headrace.peers.meet.exchange import add_up, spread_out, take_in, take_sum
from headrace.peers.meet.generation import Generation
from headrace.peers.meet.listener import Listener
from headrace.peers.meet.member import Member
from headrace.terms.options.muster import Muster
from headrace.terms.options.summing import SEQUENTIAL, order_of

PORT, SECRET, VERSION = 29500, b"of this test", "test"


def main(rank: int, workers: int, host: str, elements: int) -> None:
    address = Address(host, PORT)
    if rank == 0:
        listener = Listener(address, version=VERSION, secret=SECRET)
        print("listening", flush=True)
        generation = listener.gather(Muster(workers, workers), lambda text: None)
    else:
        member = Member(address, name=str(rank), version=VERSION, secret=SECRET)
        entered = member.enter()
        assert entered is not None
        generation = entered
    dtype = torch.bfloat16 if workers == 1 else torch.float32
    gradient, weights = torch.ones(elements, dtype=dtype), np.full(2 * elements, 7, np.uint8)
    phase("down", rank)
    if rank == 0:
        spread_out(generation.down, weights)
    else:
        take_in(generation.down, into := np.empty_like(weights))
        assert np.array_equal(into, weights)
    agree(generation)
    phase("up", rank)
    if rank == 0:
        take_sum(generation.up, total := torch.empty(elements, dtype=torch.bfloat16))
        assert torch.equal(total, torch.full_like(total, workers))
    else:
        add_up(generation.up, gradient, torch.bfloat16, order_of(workers, workers, SEQUENTIAL))
    agree(generation)
    phase("done", rank)
    if rank == 0:
        listener.close()
    else:
        member.close()


def agree(generation: Generation) -> None:
    """Wait until all are as far as this."""
    ranks = range(1, generation.num_workers + 1)
    if generation.rank == 0:
        for rank in ranks:
            generation.up.receive_message(rank)
        for rank in ranks:
            generation.down.send_message({}, rank)
    else:
        generation.up.send_message({}, 0)
        generation.down.receive_message(0)


def phase(name: str, rank: int) -> None:
    print(f"{name} {rank}", flush=True)
    sys.stdin.readline()


main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
