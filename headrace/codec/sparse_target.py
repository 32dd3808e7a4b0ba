"""Pruned weights as `headrace compress` writes them: half of them become zero, by SparseGPT's choice.

The tensors of `a.weight` are `a.weight_shape` int64 and `a.weight_bitmap`, `a.weight_offsets`, `a.weight_values`: the parts of
`sparse.Sparse`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.codec.grids import Grid, PrunedGrid
from headrace.codec.sparse import Sparse
from headrace.codec.ternary_target import METHOD

SPARSE = "sparse"
_MOST_GROUP, _LEAST_GROUP = 128, 8


@dataclass(frozen=True)
class SparseTarget:
    """Matrices of which half the weights of each group of columns become zero; the others are rounded to bfloat16."""

    name: str = "sparse50"

    def grid(self, columns: int, stored: torch.dtype) -> Grid | None:
        """Return the grid with the largest group, 128 columns or halves of it down to 8, that divides `columns`."""
        group = _MOST_GROUP
        while columns % group and group > _LEAST_GROUP:
            group //= 2
        return PrunedGrid(group=group if columns % group == 0 else None) if columns > 1 else None

    def parts(self, codes: Tensor, sides: Tensor, stored: torch.dtype) -> Mapping[str, Tensor]:
        """Return shape and parts; `codes` are the weights."""
        shape = torch.tensor(codes.shape, dtype=torch.int64)
        return {"weight_shape": shape} | {f"weight_{name}": part for name, part in Sparse().encode(codes).items()}

    def describe(self, groups: Mapping[str, int], ignored: Sequence[str]) -> dict[str, Any]:
        """Return what names the format: no other program reads it."""
        return {"quant_method": METHOD, "format": SPARSE, "ignore": sorted(ignored)}
