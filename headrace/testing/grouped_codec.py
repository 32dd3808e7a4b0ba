"""A code for tests: eight bits a weight, and one scale for each group of weights. It is lossy, and what it gives is exact."""

import torch
from torch import Tensor

from headrace.terms.layout import Plane

_GROUP = 64


class GroupedCodec:
    """int8 codes, and a float32 scale for each 64 weights."""

    name = "grouped"
    planes = (Plane("codes", "int8", 1), Plane("scale", "float32", 4, _GROUP))

    def encode(self, weights: Tensor) -> tuple[Tensor, ...]:
        """Round each weight to the nearest of 255 steps up to the largest of its group."""
        groups = weights.float().view(-1, _GROUP)
        scale = groups.abs().amax(dim=1) / 127
        codes = torch.where(scale[:, None] > 0, groups / scale[:, None], 0).round().to(torch.int8)
        return codes.flatten(), scale

    def decode(self, planes: tuple[Tensor, ...], into: Tensor) -> None:
        """Multiply codes and scales in float32, and round to the dtype of `into`."""
        codes, scale = planes
        into.view(-1, _GROUP).copy_(codes.view(-1, _GROUP).float() * scale[:, None])

    def decoding_bytes(self, num_elements: int) -> int:
        """Return the bytes of codes and products in float32."""
        return 8 * num_elements
