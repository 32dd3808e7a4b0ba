"""The node sends one copy and receives one, however many workers there are: workers pass on what all of them need.

Down: the node sends piece j of each round to worker j, which sends it on to the others. Up: workers send piece j of their
gradients to worker j. It adds them in fp32 in a given order, rounds once, and sends the sum to the node. So the sum has the
same bits in every run, and the node moves S bytes each way per unit. A worker moves up to (2 - 1/W) S. It is never a star, and
never one of gloo's collectives. Gloo's broadcast sends log2 W copies from the root, and its reduce adds in an order of its own.

Down, two rounds are under way at once: while workers pass on what they have, the node sends what they will pass on next.
"""

from collections.abc import Iterator, Mapping

import torch

from headrace.machine.host_memory import Bytes
from headrace.peers.meet.lane import Channel, PieceTransfer, finish_all, sort_of
from headrace.terms.options.summing import Order

NODE = 0
# Elements of a piece: small enough that the pieces of a round overlap, large enough for the link.
PIECE_ELEMENTS = 1 << 20


def spread_out(lane: Channel, data: Bytes) -> None:
    """Send `data` from the node to every worker.

    Raises:
        PeerLost: a worker is gone, or waits for something else (`Unlike`); so for all of these functions.
    """
    if lane.size == 2:
        lane.send(data, 1)
        return
    flat, before = torch.from_numpy(data), list[PieceTransfer]()
    lane.meet(dict.fromkeys(range(1, lane.size), sort_of(flat)), {})
    for pieces in _rounds(flat.numel(), lane.size - 1):
        works = [lane.start_send(flat[piece], rank) for rank, piece in pieces.items()]
        finish_all(before)
        before = works
    finish_all(before)


def take_in(lane: Channel, into: Bytes) -> None:
    """Fill `into` with what the node sends (`spread_out`), and pass on this worker's pieces.

    Raises:
        PeerLost: the node or a worker is gone.
    """
    if lane.size == 2:
        lane.receive(into, NODE)
        return
    flat, me, before = torch.from_numpy(into), lane.rank, list[PieceTransfer]()
    others = [rank for rank in range(1, lane.size) if rank != me]
    sort = sort_of(flat)
    lane.meet(dict.fromkeys(others, sort), dict.fromkeys((NODE, *others), sort))
    for pieces in _rounds(flat.numel(), lane.size - 1):
        own = lane.start_receive(flat[pieces[me]], NODE) if me in pieces else None
        works = [lane.start_receive(flat[pieces[rank]], rank) for rank in others if rank in pieces]
        # The node's piece of this round comes while those of the round before go from worker to worker.
        if own is not None:
            own.finish()
            works += [lane.start_send(flat[pieces[me]], rank) for rank in others]
        finish_all(before)
        before = works
    finish_all(before)


def add_up(lane: Channel, gradient: torch.Tensor, dtype: torch.dtype, order: Order) -> None:
    """Add this worker's flat `gradient` to the others' in the given `order`. Send the sum of its own pieces to the node,
    rounded to `dtype`.

    With other workers the gradient is fp32; without, it has `dtype`.

    Raises:
        PeerLost: the node or a worker is gone.
    """
    if lane.size == 2:
        lane.send(gradient, NODE)
        return
    me = lane.rank
    others = [rank for rank in range(1, lane.size) if rank != me]
    places = {rank: torch.empty(PIECE_ELEMENTS, dtype=torch.float32) for rank in others}
    sort = sort_of(gradient)
    lane.meet(
        {**dict.fromkeys(others, sort), NODE: sort_of(torch.empty(0, dtype=dtype), gradient.shape)}, dict.fromkeys(others, sort)
    )
    for pieces in _rounds(gradient.numel(), lane.size - 1):
        own = pieces.get(me)
        length = own.stop - own.start if own else 0
        works = [lane.start_receive(places[rank][:length], rank) for rank in others if length]
        works += [lane.start_send(gradient[pieces[rank]], rank) for rank in others if rank in pieces]
        finish_all(works)
        if own is not None:
            total = add_in_order(order, {me: gradient[own], **{rank: place[:length] for rank, place in places.items()}})
            lane.start_send(total.to(dtype), NODE).finish()


def add_in_order(order: Order, parts: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Return the sum of the ranks' parts, added in the given order."""
    if isinstance(order, int):
        return parts[order]
    left, right = order
    return add_in_order(left, parts) + add_in_order(right, parts)


def take_sum(lane: Channel, into: torch.Tensor) -> None:
    """Fill `into`, flat, with the sum of the workers' gradients.

    Raises:
        PeerLost: a worker is gone.
    """
    if lane.size == 2:
        lane.receive(into, 1)
        return
    lane.meet({}, dict.fromkeys(range(1, lane.size), sort_of(into)))
    for pieces in _rounds(into.numel(), lane.size - 1):
        finish_all([lane.start_receive(into[piece], rank) for rank, piece in pieces.items()])


def _rounds(num_elements: int, num_workers: int) -> Iterator[dict[int, slice]]:
    """Yield the pieces of each round by rank. They are as even as possible, so that no link waits for another."""
    whole = PIECE_ELEMENTS * num_workers
    for start in range(0, num_elements, whole):
        stop = min(start + whole, num_elements)
        size = -(-(stop - start) // num_workers)
        starts = {rank: start + (rank - 1) * size for rank in range(1, num_workers + 1)}
        yield {rank: slice(begin, min(begin + size, stop)) for rank, begin in starts.items() if begin < stop}
