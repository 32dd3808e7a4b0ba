"""A lane tells whoever waits on it that a peer is gone, also in the middle of a transfer's first piece."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from torch.distributed import HashStore

from headrace.peers.meet.lane import PIECE_BYTES, Channel
from headrace.terms.errors import PeerLost

PIECE_SECONDS = 2.0


def lanes(piece_seconds: float = PIECE_SECONDS) -> list[Channel]:
    """Return both ends of a lane over loopback."""
    store, names = HashStore(), ("one", "other")

    def made(rank: int) -> Channel:
        return Channel(store, "lane", host="127.0.0.1", rank=rank, names=names, why=lambda: None, piece_seconds=piece_seconds)

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(made, range(2)))


@pytest.mark.parametrize("sends", [True, False])
def test_who_is_in_the_middle_of_a_first_piece_hears_of_a_loss(sends: bool) -> None:
    """gloo tells neither who has begun to send nor who has begun to receive. Losses come at many moments: before, within,
    after.
    """
    ends = 0
    for moment in range(12):
        mine, its = lanes(piece_seconds=0.1)
        own, other = (np.zeros(PIECE_BYTES, np.uint8) for _ in range(2))

        def moved(lane: Channel = mine, data: np.ndarray = own) -> None:
            (lane.send if sends else lane.receive)(data, 1)

        with ThreadPoolExecutor(2) as threads:
            waits, others = threads.submit(moved), threads.submit(its.receive if sends else its.send, other, 0)
            time.sleep(moment * 5e-4)
            its.end()
            others.exception(timeout=60)
            try:
                waits.result(timeout=60)
            except PeerLost:
                ends += 1
        mine.close()
        its.close()
    assert ends > 0


def test_who_waits_for_a_peer_that_is_not_as_far_waits_longer_than_for_a_piece() -> None:
    mine, its = lanes()
    sent, came = np.arange(100, dtype=np.uint8), np.empty(100, np.uint8)
    thread = threading.Thread(target=mine.send, args=(sent, 1))
    thread.start()
    time.sleep(PIECE_SECONDS * 1.2)
    its.receive(came, 0)
    thread.join(60)
    assert not thread.is_alive()
    assert (came == sent).all()
    mine.close()
    its.close()


def test_the_seconds_of_a_message_begin_when_its_sender_does() -> None:
    """Stages say how long a group takes on a link, and their receivers wait from long before."""
    mine, its = lanes()
    begun: list[float] = []

    def send_late() -> None:
        time.sleep(0.3)
        begun.append(time.perf_counter())
        mine.send(np.zeros(PIECE_BYTES + 1, np.uint8), 1)

    with ThreadPoolExecutor(1) as threads:
        sends = threads.submit(send_late)
        seconds = its.receive(np.empty(PIECE_BYTES + 1, np.uint8), 0)
        end = time.perf_counter()
        sends.result(timeout=60)
    assert 0.0 < seconds <= end - begun[0]
    mine.close()
    its.close()
