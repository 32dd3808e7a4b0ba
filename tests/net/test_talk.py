"""Words and their numbers come as they were sent; what there cannot be is refused by name, and the lane can be used further."""

from typing import Any

import pytest
import torch
from net_peers import at_once
from test_lane import lanes

from headrace.peers.meet.talk import agree, hear, tell
from headrace.terms.errors import PeerLost, Unlike

NUMBERS = {
    "rows": torch.arange(6, dtype=torch.int64).view(2, 3),
    "mask": torch.tensor([True, False, True]),
    "turned": torch.arange(6, dtype=torch.float32).view(2, 3).t(),
    "half": torch.tensor(1.5, dtype=torch.bfloat16),
    "none": torch.empty(0, 4, dtype=torch.float16),
}


@pytest.mark.parametrize("numbers", [NUMBERS, {}])
def test_words_and_numbers_of_all_types_come_as_they_were_sent(numbers: dict[str, torch.Tensor]) -> None:
    mine, its = lanes()
    _, (words, found) = at_once(lambda: tell(mine, {"do": "step"}, 1, numbers), lambda: hear(its, 0, {"do": str}))
    assert words == {"do": "step"}
    assert list(found) == list(numbers)
    assert all(found[name].dtype is each.dtype and torch.equal(found[name], each) for name, each in numbers.items())
    for lane in (mine, its):
        lane.close()


@pytest.mark.parametrize("described", [["load", [2]], ["float32", [-1]], ["float32", "x"], ["float32"], 7, ["no_type", [1]]])
def test_numbers_that_there_cannot_be_are_refused_by_name(described: Any) -> None:
    mine, its = lanes()

    def refused() -> None:
        with pytest.raises(Unlike, match="one: tells of numbers that there cannot be"):
            hear(its, 0)

    at_once(lambda: mine.send_message({"numbers": {"rows": described}}, 1), refused)
    at_once(lambda: tell(mine, {}, 1), lambda: hear(its, 0))
    for lane in (mine, its):
        lane.close()


@pytest.mark.parametrize("said", [[{"can": True}], [{"can": True}, {"can": 1}]])
def test_what_is_not_of_all_is_refused(said: Any) -> None:
    mine, its = lanes()

    def leads() -> None:
        mine.receive_message(1, {"can": bool})
        mine.send_message({"all": said}, 1)

    def follows() -> None:
        with pytest.raises(PeerLost, match="one: tells what makes no sense"):
            agree(its, {"can": True}, {"can": bool})

    at_once(leads, follows)
    found = at_once(*(lambda lane=lane: agree(lane, {"can": bool(lane.rank)}, {"can": bool}) for lane in (mine, its)))
    assert found == [[{"can": False}, {"can": True}]] * 2
    for lane in (mine, its):
        lane.close()
