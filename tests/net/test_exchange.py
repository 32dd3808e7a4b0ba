"""The exchange between workers: what comes down is what was sent, what goes up is the sum in the order of ranks, rounded once;
and the node moves one copy each way, however many workers there are.
"""

from collections import Counter
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from net_peers import at_once, joined, listening
from tiers import sampled

from headrace.peers.meet import exchange
from headrace.peers.meet.generation import Generation
from headrace.peers.meet.lane import Channel
from headrace.terms.errors import PeerLost
from headrace.terms.options.summing import SEQUENTIAL, order_of


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, int]]:
    """Count bytes by direction of a transfer and rank."""
    moved: Counter[tuple[str, int]] = Counter()
    for name, word in (("start_send", "tx"), ("start_receive", "rx")):
        real = getattr(Channel, name)

        def call(lane: Channel, data: torch.Tensor, peer: int, *, real: Any = real, word: str = word) -> Any:
            moved[word, lane.rank] += data.numel() * data.element_size()
            return real(lane, data, peer)

        monkeypatch.setattr(Channel, name, call)
    return moved


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_one_copy_each_way_and_the_sum_by_rank(
    workers: int, counted: Counter[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "PIECE_ELEMENTS", 1000)
    size = 7001
    generator = torch.Generator().manual_seed(workers)
    dtype = torch.float32 if workers > 1 else torch.bfloat16
    gradients = [torch.randn(size, generator=generator).to(dtype) for _ in range(workers)]
    weights, into = torch.randint(0, 255, (2 * size,), dtype=torch.uint8, generator=generator).numpy(), []
    order = order_of(workers, workers, SEQUENTIAL)
    with listening() as listener:
        node, members, others = joined(listener, workers)
        into = [np.empty(2 * size, np.uint8) for _ in range(workers)]
        total = torch.empty(size, dtype=torch.bfloat16)
        counted.clear()
        at_once(
            lambda: exchange.spread_out(node.down, weights),
            *(lambda rank=rank: exchange.take_in(others[rank].down, into[rank]) for rank in range(workers)),
        )
        down = dict(counted)
        counted.clear()
        at_once(
            lambda: exchange.take_sum(node.up, total),
            *(
                lambda rank=rank: exchange.add_up(others[rank].up, gradients[rank], torch.bfloat16, order)
                for rank in range(workers)
            ),
        )
        for member in members:
            member.close()
    assert all(np.array_equal(each, weights) for each in into)
    expected = torch.zeros(size)
    for gradient in gradients:
        expected += gradient
    assert torch.equal(total, expected.to(torch.bfloat16))
    exact = torch.stack([gradient.double() for gradient in gradients]).sum(dim=0)
    assert (total.double() - exact).norm() <= 1.05 * (exact.to(torch.bfloat16).double() - exact).norm()
    assert (down["tx", 0], counted["rx", 0]) == (2 * size, 2 * size), "one copy of the weights out, one of the gradients in"
    assert max(down.get(("tx", rank), 0) for rank in range(1, workers + 1)) <= (workers - 1) / workers * 2 * size * 1.02 + 8


def test_rounds_cover_every_element_once() -> None:
    for size in (1, 5, 1000, 1 << 20, (3 << 20) + 17):
        for workers in (2, 3, 4, 7):
            pieces = [piece for each in exchange._rounds(size, workers) for piece in each.values()]
            assert [index for piece in pieces for index in (piece.start, piece.stop)][1:-1:2] == [p.start for p in pieces[1:]]
            assert (pieces[0].start, pieces[-1].stop) == (0, size)


def test_the_node_sends_a_round_while_workers_pass_on_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "PIECE_ELEMENTS", 10)
    waiting: Counter[tuple[str, int]] = Counter()

    class Recorded:
        """A lane that notes what is under way at once, by direction and peer."""

        def __init__(self, rank: int) -> None:
            self.rank, self.size, self.most = rank, 3, 0

        def meet(self, sends: Any, receives: Any) -> None:
            """All are there."""

        def start_send(self, data: torch.Tensor, peer: int) -> SimpleNamespace:
            return self._start("send", peer)

        def start_receive(self, data: torch.Tensor, peer: int) -> SimpleNamespace:
            return self._start("receive", peer)

        def _start(self, way: str, peer: int) -> SimpleNamespace:
            waiting[way, peer] += 1
            self.most = max(self.most, waiting[way, peer])
            return SimpleNamespace(finish=lambda: waiting.subtract({(way, peer): 1}))

    for rank, transfer in ((0, exchange.spread_out), (1, exchange.take_in)):
        lane: Any = Recorded(rank)
        transfer(lane, np.zeros(60, np.uint8))  # three rounds
        assert lane.most == 2
        assert not any(waiting.values())


@pytest.mark.parametrize(("way", "moment"), sampled(product(["down", "up"], range(14)), [("down", 3), ("down", 9), ("up", 7)]))
def test_all_are_told_of_a_loss_in_the_middle_of_rounds(way: str, moment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first worker is killed before its `moment`th transfer of many: nobody who waits for somebody else waits for ever,
    whoever of the others breaks off first.
    """
    monkeypatch.setattr(exchange, "PIECE_ELEMENTS", 1 << 16)
    size, order = 1 << 20, order_of(2, 2, SEQUENTIAL)
    with listening() as listener:
        node, members, others = joined(listener, 2)
        lane = getattr(others[0], way)
        lane._start = killed_at(moment, lane._start, others[0])
        gradients = [torch.zeros(size) for _ in members]
        calls = {
            "down": (
                lambda: exchange.spread_out(node.down, np.zeros(size, np.uint8)),
                *(lambda each=each: exchange.take_in(each.down, np.empty(size, np.uint8)) for each in others),
            ),
            "up": (
                lambda: exchange.take_sum(node.up, torch.empty(size, dtype=torch.bfloat16)),
                *(
                    lambda each=each, mine=mine: exchange.add_up(each.up, mine, torch.bfloat16, order)
                    for each, mine in zip(others, gradients, strict=True)
                ),
            ),
        }

        def broken_off(generation: Generation, call: Callable[[], None]) -> None:
            with pytest.raises(PeerLost):
                call()
            generation.end("the step failed")  # as engines do when a lane has failed

        at_once(*(lambda pair=pair: broken_off(*pair) for pair in zip((node, *others), calls[way], strict=True)))
        for member in members:
            member.close()


def killed_at(moment: int, real: Callable[..., Any], generation: Generation) -> Callable[..., Any]:
    """Return a lane's `_start` that breaks all connections before the given call of it, as a kill does."""
    calls = iter(range(1 << 30))

    def start(*arguments: Any) -> Any:
        if next(calls) == moment:
            generation.close()
        return real(*arguments)

    return start
