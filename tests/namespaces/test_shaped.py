"""On cables that are held to a rate, a copy down and a copy up take what the planner's rule of links says, and little more.

Times are those of cables, seconds each, so that what processors do meanwhile hardly counts. The unit is large: a small
one has few rounds, of which the first and the last fill only a part of the cables.
"""

import time

import pytest
from network import Network
from test_bytes import PEER, heard

from headrace.plan import links
from headrace.terms.lanes import Lane

MEGABITS, ELEMENTS = 50.0, 32 << 20
UNIT_BYTES = 2 * ELEMENTS  # 64 MiB of bfloat16
# Rounds begin and end, and packets have headers.
SLACK = 1.35


@pytest.mark.net
def test_a_copy_takes_what_its_links_allow() -> None:
    workers = 2  # with four a copy down took 1.5 times as long (docs/log/slow-link)
    link = links.Link.duplex(MEGABITS / 8 * 1e6)
    rule = links.Network(workers=workers, worker_link=link, node_link=link, widening=2.0)
    with Network(1 + workers, megabits=MEGABITS) as network:
        peers = []
        for rank in range(1 + workers):
            peers.append(network.start(rank, PEER, str(rank), str(workers), network.address(0), str(ELEMENTS)))
            if rank == 0:
                heard(peers[0], "listening")
        taken, begin = {}, 0.0
        for phase, before in (("down", None), ("up", Lane.NIC_DOWN), ("done", Lane.NIC_UP)):
            for peer in peers:
                heard(peer, phase)
            if before is not None:
                taken[before] = time.monotonic() - begin
            begin = time.monotonic()
            for peer in peers:
                assert peer.stdin is not None
                peer.stdin.write("\n")
        for peer in peers:
            assert peer.wait(60) == 0
    for lane, seconds in taken.items():
        expected = UNIT_BYTES / rule.alone_bytes_per_second(lane)
        assert 0.9 * expected <= seconds <= SLACK * expected, (lane, seconds, expected)
