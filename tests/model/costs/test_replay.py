"""What may be kept of a block's operators, on shapes alone: a GPU's attention needs no GPU to be asked.

That replay changes no bit is tested with whole runs (tests/equivalence, gpu). Run: pytest tests/model/costs/test_replay.py
"""

from typing import Any

import pytest
import torch

from headrace.model import Record
from headrace.model.costs.cost_meter import CostMeter
from headrace.terms.costs import ATTENTION

_aten = torch.ops.aten


def call(name: str, dropout: float, *, by_keyword: bool) -> Any:
    query = torch.empty(1, 2, 64, 32, dtype=torch.float16, device="meta")
    operator = getattr(_aten, name).default
    before = {"_scaled_dot_product_efficient_attention": (None, False), "_scaled_dot_product_cudnn_attention": (None, False)}
    if by_keyword:
        return operator(query, query, query, *before.get(name, ()), dropout_p=dropout)
    return operator(query, query, query, *before.get(name, ()), dropout)


@pytest.mark.parametrize("by_keyword", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(
    "name",
    [
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    ],
)
def test_attention_with_dropout_is_counted_and_not_kept(name: str, dropout: float, by_keyword: bool) -> None:
    with Record(frozenset({0, 1})) as record:
        call(name, dropout, by_keyword=by_keyword)
        torch.empty(4, 4, device="meta") @ torch.empty(4, 4, device="meta")
    assert record.names == [ATTENTION, "aten.mm.default"]
    assert set(record.kept) == ({1} if dropout else {0, 1})


def test_what_is_planned_of_attention_is_what_is_kept() -> None:
    """The logarithm of the sum, too, which forward leaves out unless it is asked for."""
    with Record(frozenset({0})) as record:
        call("_scaled_dot_product_efficient_attention", 0.0, by_keyword=True)
    with CostMeter(wide=False) as meter:
        call("_scaled_dot_product_efficient_attention", 0.0, by_keyword=True)
    (_, (output, log_sum, seed, offset)) = record.kept[0]
    assert log_sum.numel() == 2 * 64
    assert meter.operators[0].output_bytes == output.nbytes + log_sum.nbytes + seed.nbytes + offset.nbytes
