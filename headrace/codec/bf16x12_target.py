"""`bf16x12` as `headrace compress` writes it: the parts of a tensor in the place of its name, and its shape.

The tensors of `a.weight` are `a.weight_shape` int64 and `a.weight_low`, `a.weight_high`, ...: the parts of `bf16x12.Bf16x12`. A
stack of matrices has the rows of all, one after another. The widest numbers come first, so that all lie at multiples of their
size where matrices have even sizes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.codec.bf16x12 import Bf16x12
from headrace.codec.ternary_target import METHOD
from headrace.terms.coding import as_matrix

BF16X12 = "bf16x12"


@dataclass(frozen=True)
class Bf16x12Target:
    """Matrices and stacks of matrices of bfloat16."""

    name: str = BF16X12

    def takes(self, shape: tuple[int, ...], stored: torch.dtype) -> bool:
        """Return whether it is bfloat16 and a matrix, or a stack of matrices."""
        return stored is torch.bfloat16 and len(shape) in (2, 3) and Bf16x12().takes(*as_matrix(shape))

    def parts(self, weights: Tensor) -> Mapping[str, Tensor]:
        """Return shape and parts."""
        parts = Bf16x12().encode(weights.reshape(as_matrix(tuple(weights.shape))))
        shape = torch.tensor(weights.shape, dtype=torch.int64)
        return {"weight_shape": shape} | {f"weight_{name}": part for name, part in parts.items()}

    def describe(self, ignored: Sequence[str]) -> dict[str, Any]:
        """Return what names the format: no other program reads it."""
        return {"quant_method": METHOD, "format": BF16X12, "ignore": sorted(ignored)}
