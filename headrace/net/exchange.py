"""One copy in and one out at the node, however many workers there are.

With one worker, bytes go straight.
"""

from headrace.machine.host_memory import Bytes
from headrace.net.lane import Lane

NODE = 0


def spread_out(lane: Lane, data: Bytes) -> None:
    """Send `data` from the node to every worker."""
    for rank in range(1, lane.size):
        lane.send(data, rank)


def take_in(lane: Lane, into: Bytes) -> None:
    """Fill `into` with what the node spreads out."""
    lane.receive(into, NODE)
