"""How fast a link to a node is each way, measured between two ends that do nothing else with it.

The visitor says how much it is about to send; the node receives it, says so, and sends as much back. Sizes double until one
takes long enough to be measured, so that nothing is heavy, also on a link of 100 Mbit/s.
"""

import time
from dataclasses import dataclass

import numpy as np
from torch.distributed import Store  # type: ignore[attr-defined]

from headrace.peers.meet.lane import Channel
from headrace.terms.sizes import MIB

NODE, VISITOR = 0, 1
_LEAST_BYTES, _MOST_BYTES = MIB // 4, 256 * MIB
_ENOUGH_SECONDS = 0.25
_ROUND_TRIPS = 10


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """Bytes per second to the node (`up`) and from it (`down`), each alone, and seconds of a short message there and back."""

    up_bytes_per_second: float
    down_bytes_per_second: float
    round_trip_seconds: float


def visitors_lane(store: Store, ticket: int, *, host: str, rank: int, piece_seconds: float) -> Channel:
    """Return the lane between the node and the visitor with that ticket.

    Raises:
        PeerLost: the other end did not come.
    """
    names = ("the node", f"visitor {ticket}")
    return Channel(store, f"visit/{ticket}", host=host, rank=rank, names=names, why=lambda: None, piece_seconds=piece_seconds)


def measure_link(lane: Channel) -> MeasuredLink:
    """Measure the link as the visitor of `lane`; the other end answers (`answer_link`).

    Raises:
        PeerLost: the node is gone.
    """
    trips = []
    for _ in range(_ROUND_TRIPS):
        begin = time.perf_counter()
        lane.send_message({"bytes": 0}, NODE)
        lane.receive_message(NODE)
        trips.append(time.perf_counter() - begin)
    num_bytes = _LEAST_BYTES
    while True:
        data = np.zeros(num_bytes, np.uint8)
        lane.send_message({"bytes": num_bytes}, NODE)
        begin = time.perf_counter()
        lane.send(data, NODE)
        lane.receive_message(NODE)
        up = time.perf_counter() - begin
        begin = time.perf_counter()
        lane.send_message({"bytes": num_bytes}, NODE)
        lane.receive(data, NODE)
        down = time.perf_counter() - begin
        if min(up, down) >= _ENOUGH_SECONDS or num_bytes >= _MOST_BYTES:
            break
        num_bytes *= 2
    lane.send_message({"bytes": -1}, NODE)
    return MeasuredLink(num_bytes / up, num_bytes / down, sorted(trips)[_ROUND_TRIPS // 2])


def answer_link(lane: Channel) -> None:
    """Be the other end of `measure_link`, until it is done.

    Raises:
        PeerLost: the visitor is gone.
    """
    while (num_bytes := int(lane.receive_message(VISITOR, {"bytes": int})["bytes"])) >= 0:
        if num_bytes > _MOST_BYTES:
            return
        data = np.empty(num_bytes, np.uint8)
        if num_bytes:
            lane.receive(data, VISITOR)
        lane.send_message({"taken": num_bytes}, VISITOR)
        if num_bytes:
            lane.receive_message(VISITOR)
            lane.send(data, VISITOR)
