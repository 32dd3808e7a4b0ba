"""What crosses cables, as the kernel counts it: one copy of a unit out of the node and one into it, however many workers."""

import subprocess
from pathlib import Path

import pytest
from network import Network

PEER = str(Path(__file__).with_name("peer.py"))
ELEMENTS = 8 << 20
UNIT_BYTES = 2 * ELEMENTS  # 16 MiB of bfloat16
# Headers of packets, acknowledgements, heartbeats.
SLACK = 1.02


def heard(process: subprocess.Popen[str], word: str) -> None:
    """Read what a peer prints until it says `word`."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(word):
            return
    raise AssertionError("".join(lines))


@pytest.mark.net
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_node_moves_one_copy_each_way_and_workers_what_the_formula_says(workers: int) -> None:
    """The least of three tries counts: what a busy machine makes TCP send again is no byte of ours."""
    wrong: list[tuple[object, ...]] = []
    for _ in range(3):
        if not (wrong := wrong_in(moved_by_phase(workers), workers)):
            return
    raise AssertionError(wrong)


def moved_by_phase(workers: int) -> dict[str, list[tuple[int, int]]]:
    """Return what each rank had sent and received before the node sends, before it receives, and in the end."""
    with Network(1 + workers) as network:
        peers = []
        for rank in range(1 + workers):
            peers.append(network.start(rank, PEER, str(rank), str(workers), network.address(0), str(ELEMENTS)))
            if rank == 0:
                heard(peers[0], "listening")
        moved = {}
        for phase in ("down", "up", "done"):
            for peer in peers:
                heard(peer, phase)
            moved[phase] = [network.moved(rank) for rank in range(1 + workers)]
            for peer in peers:
                assert peer.stdin is not None
                peer.stdin.write("\n")
        for peer in peers:
            assert peer.wait(60) == 0
    return moved


def wrong_in(moved: dict[str, list[tuple[int, int]]], workers: int) -> list[tuple[object, ...]]:
    """Return what is not as the formula says."""
    others, wrong = (workers - 1) / workers, list[tuple[object, ...]]()
    for before, after, node, worker in (
        # (sent, received) in copies of the unit; between workers gradients are float32, two copies.
        ("down", "up", (1, 0), (others, 1)),
        ("up", "done", (0, 1), (2 * others + 1 / workers, 2 * others)),
    ):
        for rank in range(1 + workers):
            for which, copies in enumerate(node if rank == 0 else worker):
                found = (moved[after][rank][which] - moved[before][rank][which]) / UNIT_BYTES
                most = SLACK * copies or SLACK - 1  # what crosses the other way acknowledges it
                assert copies <= found, (before, rank, which, found)
                wrong += [(before, rank, which, found)] if found > most else []
    return wrong
