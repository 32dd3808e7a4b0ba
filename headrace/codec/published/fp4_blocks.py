"""Floats of four bits (E2M1) by rows: NVFP4, whose scales have two levels, and MXFP4 as DeepSeek publishes experts.

A matrix has `weight_packed` uint8 (rows, columns / 2), two codes to a byte, the lower half first. `weight_scale` is (rows,
columns / 16) float8_e4m3fn. Or it is (rows, columns / 32) float8_e8m0fnu, a power of two. NVFP4 has one float32 besides:
compressed-tensors' `weight_global_scale` divides scales, ModelOpt's `weight_scale_2` multiplies them. Products are those of
float32, rounded once.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.codec.codec import Parts
from headrace.codec.row_pieces import piece_bytes, pieces, refuse_no_numbers
from headrace.terms.coding import CodePart

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BYTES_OF_AN_ELEMENT = 40


@dataclass(frozen=True)
class Fp4Blocks:
    """`group` columns to a scale of dtype `scales`. `whole` is the part that all scales share: none, or one of those above."""

    group: int = 16
    scales: str = "float8_e4m3fn"
    whole: str = "weight_global_scale"
    digest = None
    idempotent = False
    lossless = False

    @property
    def name(self) -> str:
        """The format and its parameters."""
        return f"{'nvfp4' if self.whole else 'fp4'}:{self.group}:{self.scales}:{self.whole}"

    def takes(self, rows: int, columns: int) -> bool:
        """Return whether the columns are whole groups."""
        return columns % self.group == 0

    def places(self, rows: int, columns: int) -> tuple[CodePart, ...]:
        """Return codes, scales, and the scale of the whole."""
        found = (
            CodePart("weight_packed", "uint8", 1, (rows, columns // 2)),
            CodePart("weight_scale", self.scales, 1, (rows, columns // self.group)),
        )
        return (*found, CodePart(self.whole, "float32", 4, (1,))) if self.whole else found

    def encode(self, weights: Tensor) -> Parts:
        """Round to the nearest float under the group's scale. The largest scale of the matrix is the largest that is stored.

        Raises:
            ModelError: a weight is no finite number.
        """
        refuse_no_numbers(weights)
        groups = weights.float().view(len(weights), -1, self.group)
        dtype, wanted = getattr(torch, self.scales), groups.abs().amax(dim=-1) / _VALUES[-1]
        whole = (wanted.max() / torch.finfo(dtype).max).clamp(min=1e-30) if self.whole else torch.tensor(1.0)
        stored = (wanted / whole).clamp(min=torch.finfo(dtype).tiny).to(dtype)
        shared = {self.whole: (1 / whole if self.whole == "weight_global_scale" else whole).view(1)} if self.whole else {}
        scaled = groups / self._scales({"weight_scale": stored} | shared, slice(None))[..., None]
        codes = (scaled.abs()[..., None] - torch.tensor(_VALUES)).abs().argmin(dim=-1) + torch.where(scaled < 0, 8, 0)
        codes = codes.to(torch.uint8).view(len(weights), -1)
        return {"weight_packed": codes[:, 0::2] | codes[:, 1::2] << 4, "weight_scale": stored} | shared

    def decode(self, parts: Parts, into: Tensor, rows: range) -> None:
        """Fill `into` with these rows."""
        table = torch.tensor((*_VALUES, *(-value for value in _VALUES)), device=into.device)
        for here, there in pieces(rows, into.shape[1]):
            packed = parts["weight_packed"][here].view(torch.uint8)
            codes = torch.stack([packed & 15, packed >> 4], dim=-1).to(torch.int32)
            values = table[codes].view(len(packed), -1, self.group) * self._scales(parts, here)[..., None]
            into[there].copy_(values.view(len(packed), -1))

    def _scales(self, parts: Parts, rows: slice) -> Tensor:
        scales = parts["weight_scale"][rows].float()
        if not self.whole:
            return scales
        return scales / parts[self.whole] if self.whole == "weight_global_scale" else scales * parts[self.whole]

    def decoding_bytes(self, rows: int, columns: int, *, on_host: bool = True) -> int:
        """Return the bytes of a piece's codes, scales and values."""
        return piece_bytes(rows, columns, _BYTES_OF_AN_ELEMENT)
