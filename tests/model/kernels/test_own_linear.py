"""Another way for `linear`: in the thread that entered it, inside out, and gone afterwards.

Run: pytest tests/model/kernels/test_own_linear.py
"""

import threading

import pytest
import torch
from torch._C import _nn
from torch.nn import functional

from headrace.model.kernels.own_linear import OwnLinear

ONE, LAYER = torch.ones(1, 4, dtype=torch.float32), torch.nn.Linear(4, 2, dtype=torch.float32)


class Fills(OwnLinear):
    """Takes products of so many rows, and returns a number in place of each."""

    def __init__(self, rows: int, number: float) -> None:
        self.rows, self.number = rows, number

    def take(self, inputs: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        return inputs.new_full((len(inputs), len(weights)), self.number) if len(inputs) <= self.rows else None


@torch.no_grad()
def test_who_entered_last_is_asked_first_and_torch_last() -> None:
    own = LAYER(ONE.repeat(3, 1))
    with Fills(2, 1.0):
        with Fills(1, 5.0):
            assert [float(LAYER(ONE.repeat(rows, 1))[0, 0]) for rows in (1, 2)] == [5, 1]
            assert torch.equal(LAYER(ONE.repeat(3, 1)), own)
        assert float(LAYER(ONE)[0, 0]) == 1
    assert functional.linear is _nn.linear


@torch.no_grad()
def test_other_threads_compute_as_before_and_a_failure_leaves_nothing() -> None:
    own, found = LAYER(ONE), list[torch.Tensor]()
    thread = threading.Thread(target=lambda: found.append(LAYER(ONE)))
    with Fills(1, 5.0):
        thread.start()
        thread.join()
    assert torch.equal(found[0], own)
    with pytest.raises(RuntimeError), Fills(1, 5.0):
        LAYER(torch.ones(3, 5, dtype=torch.float32))
    assert functional.linear is _nn.linear
    assert torch.equal(LAYER(ONE), own)
