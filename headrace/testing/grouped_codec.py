"""A code for tests: eight bits a weight, and one scale for each group of weights. Encoding is lossy, decoding is exact."""

import torch
from torch import Tensor

from headrace.codec import Parts
from headrace.terms.coding import CodePart
from headrace.terms.errors import ModelError

_GROUP = 64


class GroupedCodec:
    """int8 codes, and a float32 scale for each 64 weights of a row."""

    name = "grouped"
    digest = None
    idempotent = False
    lossless = False

    def takes(self, rows: int, columns: int) -> bool:
        """Return whether rows consist of whole groups."""
        return columns % _GROUP == 0

    def places(self, rows: int, columns: int) -> tuple[CodePart, ...]:
        """Return codes and scales."""
        return CodePart("codes", "int8", 1, (rows, columns)), CodePart("scale", "float32", 4, (rows, columns // _GROUP))

    def encode(self, weights: Tensor) -> Parts:
        """Round each weight to the nearest of 255 steps up to the largest of its group.

        Raises:
            ModelError: a weight is no finite number.
        """
        if not bool(torch.isfinite(weights).all()):
            raise ModelError("weights to be coded hold NaN or infinity")
        groups = weights.float().view(len(weights), -1, _GROUP)
        scale = groups.abs().amax(dim=2) / 127
        codes = torch.where(scale[..., None] > 0, groups / scale[..., None], 0).round().to(torch.int8)
        return {"codes": codes.view(weights.shape), "scale": scale}

    def decode(self, parts: Parts, into: Tensor, rows: range) -> None:
        """Multiply codes and scales in float32, and round to the dtype of `into`."""
        these = slice(rows.start, rows.stop)
        codes, scale = parts["codes"][these].float(), parts["scale"][these]
        groups = codes.view(len(rows), into.shape[1] // _GROUP, _GROUP)
        into.copy_((groups * scale[..., None]).view(into.shape))

    def decoding_bytes(self, rows: int, columns: int, *, on_host: bool = True) -> int:
        """Return the bytes of codes and products in float32."""
        return 8 * rows * columns
