"""Weights are merged with what is trained on their fp32 master, in pieces: the bits of the whole, and little memory."""

from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.flow.weights.load import merge
from headrace.model.costs.cost_meter import CostMeter
from headrace.update.rules.tensors import split, update_tensors


class Adding:
    """Stands in for the maker: decays a master and adds what is trained."""

    def complete(self, unit: int, slot: Tensor, trained: Tensor) -> None:
        slot.mul_(0.99).add_(trained)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_merge_in_pieces_has_the_bits_of_the_whole_and_allocates_one_master(dtype: torch.dtype) -> None:
    generator, count = torch.Generator().manual_seed(1), (6 << 20) + 777
    master, trained = (torch.randn(count, generator=generator) for _ in range(2))
    rest: Tensor | None = None
    if dtype == torch.bfloat16:
        high, rest = split(master)
        weights = high.view(dtype)
    else:
        weights, rest = master.to(dtype), master.clone() if dtype == torch.float16 else None

    def merged(whole: Tensor, states: Any) -> tuple[Tensor, Any]:
        return whole * 0.99 + trained, ()

    expected, rests = update_tensors(weights.clone(), () if rest is None else (rest.clone(),), merged)
    with CostMeter(wide=False, huge_pages=False) as meter:
        merge(Adding(), 1, weights, rest, trained)  # type: ignore[arg-type]
    assert torch.equal(weights.view(torch.uint8), expected.view(torch.uint8))
    assert rest is None or torch.equal(rest, rests[0])
    allowed = (4 * count if dtype == torch.bfloat16 else 0) + (40 << 20)
    seen = 4 * count + (2 * count if rest is not None else 0) + (4 * count if dtype == torch.float16 else 0)
    assert meter.peak_bytes <= allowed + seen, "views of what is given are counted, too"
