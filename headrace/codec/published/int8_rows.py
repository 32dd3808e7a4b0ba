"""bitsandbytes' eight bits (LLM.int8): `weight` int8 (rows, columns), and `SCB` float32 (rows), the largest of each row.

A weight is code times SCB times 1 / 127 in float32, in this order, rounded once. Inputs far from the others, which its kernels
multiply by themselves, are of the activations: stored weights have no such.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.codec.codec import Parts
from headrace.codec.row_pieces import piece_bytes, pieces, refuse_no_numbers
from headrace.terms.coding import CodePart

_STEPS = 127
_STEP = 7.874015718698502e-3  # 1 / 127 in float32


@dataclass(frozen=True)
class Int8Rows:
    """One scale to a row."""

    name = "llmint8"
    digest = None
    idempotent = False
    lossless = False

    def takes(self, rows: int, columns: int) -> bool:
        """Return whether it is a matrix at all."""
        return rows > 0 and columns > 0

    def places(self, rows: int, columns: int) -> tuple[CodePart, ...]:
        """Return codes and scales."""
        return CodePart("weight", "int8", 1, (rows, columns)), CodePart("SCB", "float32", 4, (rows,))

    def encode(self, weights: Tensor) -> Parts:
        """Round so that the largest weight of a row has the largest code.

        Raises:
            ModelError: a weight is no finite number.
        """
        refuse_no_numbers(weights)
        largest = weights.float().abs().amax(dim=1)
        sizes = torch.where(largest > 0, largest, 1.0)[:, None]
        return {"weight": (weights.float() * _STEPS / sizes).round().to(torch.int8), "SCB": largest}

    def decode(self, parts: Parts, into: Tensor, rows: range) -> None:
        """Fill `into` with these rows."""
        for here, there in pieces(rows, into.shape[1]):
            into[there].copy_(parts["weight"][here].float() * parts["SCB"][here, None] * _STEP)

    def decoding_bytes(self, rows: int, columns: int, *, on_host: bool = True) -> int:
        """Return the bytes of a piece's codes and products in float32."""
        return piece_bytes(rows, columns, 16)
