"""MXFP4 (OCP Microscaling Formats 1.0, and gpt-oss): four-bit floats, 32 of which share a power of two.

A stack of experts has two parts. `blocks` uint8 (experts, outputs, groups, 16) has two codes to a byte, the lower half first.
`scales` uint8 (experts, outputs, groups) has the exponent plus 127. The parameter is transposed, (experts, inputs, outputs): a
row of it is one input of all outputs. A group has 32 inputs.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from headrace.codec.codec import Parts
from headrace.codec.published.lines import Lines, byte_pairs
from headrace.codec.row_pieces import piece_bytes, refuse_no_numbers
from headrace.terms.coding import CodePart

_GROUP, _BIAS = 32, 127
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_BYTES_OF_AN_ELEMENT = 40


@dataclass(frozen=True)
class Mxfp4:
    """Experts with `inputs` rows each, as the parameter has them."""

    inputs: int
    digest = None
    idempotent = False
    lossless = False

    @property
    def name(self) -> str:
        """The format, and the rows of an expert."""
        return f"mxfp4:{self.inputs}"

    def takes(self, rows: int, columns: int) -> bool:
        """Return whether these are whole experts of whole groups."""
        return rows % self.inputs == 0 and self.inputs % _GROUP == 0

    def places(self, rows: int, columns: int) -> tuple[CodePart, ...]:
        """Return codes and exponents."""
        shape = rows // self.inputs, columns, self.inputs // _GROUP
        return CodePart("blocks", "uint8", 1, (*shape, _GROUP // 2)), CodePart("scales", "uint8", 1, shape)

    def encode(self, weights: Tensor) -> Parts:
        """Round to the nearest float under the exponent of the group's largest weight (OCP, section 6.3).

        Raises:
            ModelError: a weight is no finite number.
        """
        refuse_no_numbers(weights)
        experts = weights.float().view(-1, self.inputs, weights.shape[1]).mT
        groups = experts.reshape(*experts.shape[:2], -1, _GROUP)
        largest = groups.abs().amax(dim=-1)
        exponent = (torch.frexp(largest)[1] - 3).clamp(-_BIAS, _BIAS).to(torch.int32)  # 4 <= largest / 2^e < 8
        scaled = torch.ldexp(groups, -exponent[..., None])
        table = torch.tensor(_VALUES, dtype=torch.float32)
        codes = torch.where(scaled < 0, 8, 0) + (scaled.abs()[..., None] - table[:8]).abs().argmin(dim=-1)
        codes = codes.to(torch.uint8)
        return {"blocks": codes[..., 0::2] | codes[..., 1::2] << 4, "scales": (exponent + _BIAS).to(torch.uint8)}

    def decode(self, parts: Parts, into: Tensor, rows: range) -> None:
        """Fill `into` with these rows. Powers of two change no digit, so the values are exact in bfloat16."""
        blocks, scales = parts["blocks"], parts["scales"]
        if into.device.type == "cpu" and (lines := self.lines(parts, into.shape[1])).decodes(into):
            self._decode_on_host(lines, into, rows)
            return
        table = torch.tensor(_VALUES, device=into.device, dtype=torch.float32)
        step = self._inputs_at_once(into.shape[1])
        start = rows.start
        while start < rows.stop:
            expert, first = divmod(start, self.inputs)
            group = first // _GROUP
            stop = min(rows.stop, (expert + 1) * self.inputs, expert * self.inputs + (group * _GROUP + step))
            last = -(-(stop - expert * self.inputs) // _GROUP)
            part = blocks[expert, :, group:last]
            codes = torch.stack([part & 0xF, part >> 4], dim=-1).flatten(2)
            exponents = scales[expert, :, group:last].to(torch.int32) - _BIAS
            values = torch.ldexp(table[codes.to(torch.int32)], exponents[..., None]).flatten(1)
            begin = first - group * _GROUP
            into[start - rows.start : stop - rows.start].copy_(values[:, begin : begin + stop - start].T)
            start = stop

    def multiplies(self, rows: int, columns: int) -> bool:
        """Return whether it is one expert."""
        return rows == self.inputs

    def lines(self, parts: Parts, columns: int) -> Lines:
        """Return what loops are told of experts on the host; `columns` are the outputs, and each has a line."""
        given = (parts["blocks"].contiguous(), parts["scales"].contiguous(), _pairs())
        return Lines("mxfp4", given[1].shape[0] * columns, self.inputs, given, (self.inputs // _GROUP,), across=True)

    def _decode_on_host(self, lines: Lines, into: Tensor, rows: range) -> None:
        start, outputs = rows.start, into.shape[1]
        while start < rows.stop:
            expert, first = divmod(start, self.inputs)
            stop = min(rows.stop, (expert + 1) * self.inputs)
            lines.decode_across(into[start - rows.start : stop - rows.start], expert * outputs, first)
            start = stop

    def _inputs_at_once(self, columns: int) -> int:
        return max(_GROUP, (1 << 18) // max(1, columns) // _GROUP * _GROUP)

    def decoding_bytes(self, rows: int, columns: int, *, on_host: bool = True) -> int:
        """Return the bytes of a piece's codes, exponents and values."""
        return max(self._inputs_at_once(columns), _GROUP) * columns * _BYTES_OF_AN_ELEMENT + piece_bytes(1, 64, 16)


@cache
def _pairs() -> Tensor:
    """Return the two values (256, 2) of each byte."""
    return torch.tensor(_VALUES, dtype=torch.float32)[byte_pairs(upper_first=False)]
