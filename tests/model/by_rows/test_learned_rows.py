"""Rows of a table that is trained by rows, as compute reads them.

Run: pytest tests/model/by_rows/test_learned_rows.py
"""

import numpy as np
import pytest
import torch
from torch import nn

from headrace.model.by_rows.learned_rows import LearnedRows
from headrace.terms.layout import lay_out
from headrace.update.rules.tensors import split

# Halfway between two numbers of bfloat16, and next to it.
MASTERS = np.array([[1 + 2**-8, -1 - 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20], [2**-126, -0.0, 0.1, 3e38]], np.float32)


class Masters:
    """Gives rows of two, and takes no gradients."""

    def gather(self, unit, ids):
        return MASTERS[ids]

    def add(self, unit, ids, gradient):
        raise AssertionError("nothing was differentiated")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_are_rounded_as_the_planes_of_a_whole_table_are(dtype):
    """In bfloat16 a master is rounded half away from zero: torch's own conversion rounds half to even."""
    rows = LearnedRows(nn.Embedding(2, 4, device="meta", dtype=dtype), dtype, lay_out("", []), lambda: None)
    rows.serve(Masters())
    with torch.no_grad():
        found = rows(torch.tensor([[1, 0]]))[0].flip(0)
    masters = torch.from_numpy(MASTERS)
    expected = split(masters)[0].view(torch.bfloat16) if dtype == torch.bfloat16 else masters.to(dtype)
    assert found.dtype == dtype
    assert torch.equal(found, expected)
