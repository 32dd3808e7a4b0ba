"""What a peer sends is taken if it is what was expected, and otherwise named, before a byte of it has moved."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from net_peers import at_once
from test_lane import lanes

from headrace.peers.meet import exchange
from headrace.peers.meet.lane import Channel
from headrace.terms.errors import Unlike

WANTED = np.zeros(100, np.float32)


@pytest.mark.parametrize(
    "sent",
    [
        np.ones(200, np.float32),
        np.ones(50, np.float32),
        np.ones(200, np.float16),
        np.ones((10, 10), np.float32),
        np.ones(0, np.float32),
    ],
    ids=["more", "half", "type", "shape", "none"],
)
def test_both_are_told_what_does_not_agree_and_go_on_over_the_same_lane(sent: np.ndarray) -> None:
    mine, its = lanes()
    for _ in range(2):
        into = np.full(100, 7, np.float32)
        words = at_once(lambda: told(mine.send, sent, 1), lambda into=into: told(its.receive, into, 0))
        shape = "x".join(map(str, sent.shape))
        expected = f"other: waits for float32 100, where {sent.dtype} {shape} was sent; nothing of it was taken"
        assert words[0] == expected
        assert words[1].startswith(f"one: sends {sent.dtype} ")
        assert (into == 7).all(), "nothing of it was taken"
    at_once(lambda: mine.send(np.ones(100, np.float32), 1), lambda: its.receive(into, 0))
    assert (into == 1).all()
    for lane in (mine, its):
        lane.close()


def told(call: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises(Unlike) as error:
        call(*arguments)
    return str(error.value)


@pytest.mark.parametrize("text", [b"{", b"\xff\xfe", b"[" * 100000, b"[]", b'{"do": 1}', b'{"do": true, "lot": true}'])
def test_what_is_no_message_of_ours_is_named(text: bytes) -> None:
    mine, its = lanes()

    def send() -> None:
        mine.meet({1: f"message {len(text)}"}, {})
        for start in range(0, len(text), 1 << 20):
            mine.start_send(torch.frombuffer(bytearray(text[start : start + (1 << 20)]), dtype=torch.uint8), 1).finish()

    words = at_once(send, lambda: told(its.receive_message, 0, {"do": str, "lot": int}))[1]
    assert words.startswith("one: sends ")
    assert words.endswith("is it the same version?")
    for lane in (mine, its):
        lane.close()


@pytest.mark.parametrize(
    "sort", ["uint8 10", "message", "message -1", "message 9999999999999", "message 0", "\N{DIGIT TWO}" * 200]
)
def test_what_is_no_message_at_all_is_named(sort: str) -> None:
    mine, its = lanes()
    at_once(lambda: told(mine.meet, {1: sort}, {}), lambda: told(its.receive_message, 0))
    at_once(lambda: mine.send_message({"a": 1}, 1), lambda: its.receive_message(0))
    for lane in (mine, its):
        lane.close()


@pytest.mark.parametrize("way", ["down", "up"])
def test_a_node_and_a_worker_of_other_units_are_told(way: str) -> None:
    node, worker = lanes()
    calls: tuple[Callable[[], Any], ...]
    if way == "down":
        calls = (lambda: exchange.spread_out(node, np.zeros(8, np.uint8)), lambda: take_in(worker, np.zeros(9, np.uint8)))
    else:
        gradient, total = torch.zeros(8, dtype=torch.float32), torch.zeros(8, dtype=torch.bfloat16)
        calls = (lambda: exchange.take_sum(node, total), lambda: exchange.add_up(worker, gradient, gradient.dtype, 1))
    worker.rank = 1
    for words in at_once(*(lambda call=call: told(call) for call in calls)):
        assert "nothing of it was taken" in words
    for lane in (node, worker):
        lane.close()


def take_in(lane: Channel, into: np.ndarray) -> None:
    exchange.take_in(lane, into)
