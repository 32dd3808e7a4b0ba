"""Taps on blocks of a small hand-written model whose code asks tensors for their values."""

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from headrace.model.blocks.taps import Taps


class Asking(nn.Module):
    """A question to the masks on the device, if any, and draws on the host before blocks: as transformers' OPT and BioGPT."""

    def __init__(self, device: str | None, rate: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.device, self.rate = device, rate

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.device and not (torch.ones(2, 5, device=self.device) > 0).all():
            hidden = hidden * 2
        for block in self.blocks:
            if torch.rand([]) < self.rate:
                continue
            hidden = block(hidden)
        return hidden + 1


def run(model: Asking, inject: torch.Tensor) -> Any:
    with Taps(list(model.blocks), None, inject=inject):
        return model(torch.zeros_like(inject))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_lies_behind_the_blocks_runs_on_what_is_injected(device: str) -> None:
    """Asked for its value, a mask on meta would raise, and one on a GPU stop the host. No draw skips the last block."""
    hidden = torch.randn(2, 5, 4)
    assert torch.equal(run(Asking(device), hidden), hidden + 1)


def test_what_lies_behind_the_blocks_may_ask() -> None:
    class AskingAfterwards(Asking):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            hidden = super().forward(hidden)
            return -hidden if (hidden > 10).any() else hidden

    hidden = torch.randn(2, 5, 4)
    assert torch.equal(run(AskingAfterwards("meta"), hidden), hidden + 1)


def test_draws_are_numbers_where_tensors_have_no_values() -> None:
    model = Asking(None, rate=1e-30)
    with FakeTensorMode(allow_non_fake_inputs=True):
        hidden = torch.randn(2, 5, 4)
        with Taps(list(model.blocks), None) as taps:
            model(torch.ones(2, 5, 4))
        with Taps(list(model.blocks), None, inject=hidden):
            assert model(hidden).shape == hidden.shape
    assert len(taps.calls) == 3
