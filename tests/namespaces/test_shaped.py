"""On cables that are held to a rate, a copy down and a copy up take what the planner's rule of links says, and little more.

What a busy machine adds, it adds to a plain copy on the same cable, too: that is the measure, and the best of three tries
counts. The unit is large: a small one has few rounds, of which the first and the last fill only a part of the cables.
"""

import time

import pytest
from network import Network
from test_bytes import PEER, heard

from headrace.peers.node import links
from headrace.terms.lanes import Lane

MEGABITS, ELEMENTS = 50.0, 32 << 20
UNIT_BYTES = 2 * ELEMENTS  # 64 MiB of bfloat16
PLAIN_BYTES, PLAIN_PORT = 8 << 20, 29400
TAKES = f"""import socket
with socket.create_server(("", {PLAIN_PORT})) as server:
    print("listening", flush=True)
    with server.accept()[0] as taken:
        while taken.recv(1 << 20):
            pass
"""
SENDS = f"""import socket, sys
with socket.create_connection((sys.argv[1], {PLAIN_PORT})) as out:
    out.sendall(bytes({PLAIN_BYTES}))
    out.shutdown(socket.SHUT_WR)
    out.recv(1)
"""
# Rounds begin and end, and packets have headers.
SLACK = 1.35


@pytest.mark.net
@pytest.mark.timeout(600)
def test_a_copy_takes_what_its_links_allow() -> None:
    link = links.Link.duplex(MEGABITS / 8 * 1e6)
    rule = links.Network(workers=2, worker_link=link, node_link=link, widening=2.0)
    for _ in range(3):
        taken, plain = seconds_of_a_try(workers=2)  # with four a copy down took 1.5 times as long (docs/log/slow-link)
        slowed = max(1.0, plain * link.in_bytes_per_second / PLAIN_BYTES)
        expected = {lane: UNIT_BYTES / rule.alone_bytes_per_second(lane) for lane in taken}
        assert all(0.9 * expected[lane] <= seconds for lane, seconds in taken.items()), (taken, expected)
        if all(seconds <= SLACK * slowed * expected[lane] for lane, seconds in taken.items()):
            return
    raise AssertionError((taken, expected, plain))


def seconds_of_a_try(workers: int) -> tuple[dict[Lane, float], float]:
    """Return the seconds of a unit's copy on each lane of the network, and the longer of two plain copies before and after."""
    with Network(1 + workers, megabits=MEGABITS) as network:
        plain = plain_seconds(network)
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
        return taken, max(plain, plain_seconds(network))


def plain_seconds(network: Network) -> float:
    """Return the seconds of a copy of `PLAIN_BYTES` from machine 1 to machine 0 through a plain socket, processes included."""
    taker = network.start(0, "-c", TAKES)
    heard(taker, "listening")
    begin = time.monotonic()
    assert network.start(1, "-c", SENDS, network.address(0)).wait(120) == 0
    return time.monotonic() - begin
