"""Whole numbers in groups, with a scale and a zero point each: AWQ, GPTQ, and what `pack_quantized` does not read.

A weight is (code - zero point) times the scale of its group, rounded to the dtype of scales, as its publisher's code has it. A
*layout* says where codes lie in int32 words, earlier ones in lower bits:

- `awq` (AutoAWQ's `gemm`): `qweight` (columns, rows / 8), `qzeros` (groups, rows / 8), `scales` (groups, rows). Code k of a
  word is that of row 0, 2, 4, 6, 1, 3, 5, 7 of eight.
- `gptq` (AutoGPTQ's format 1, `gptq_v2` without its mistake): `qweight` (columns / 8, rows), `qzeros` (groups, rows / 8),
  `scales` (groups, rows), `g_idx` (columns), the group of each column. Format 1 stores each zero point less one.
- `packed` (compressed-tensors): `weight_packed` (rows, columns / 8), `weight_scale` (rows, groups), `weight_zero_point`
  (rows / 8, groups), `weight_g_idx`. With eight bits, a word has four codes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.codec.codec import Parts
from headrace.codec.int4 import pack
from headrace.codec.published.pack_quantized import PackQuantized
from headrace.codec.row_pieces import pieces, refuse_no_numbers, rows_of_a_piece
from headrace.terms.coding import CodePart

# The parts of a layout: codes, scales, zero points, and the group of each column.
NAMES = {
    "awq": ("qweight", "scales", "qzeros", ""),
    "gptq": ("qweight", "scales", "qzeros", "g_idx"),
    "gptq_v2": ("qweight", "scales", "qzeros", "g_idx"),
    "packed": ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx"),
}
KINDS = {"awq": "awq", "gptq": "gptq", "gptq_v2": "gptq", "packed": "packed"}
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # of eight rows, which code of the word
_BYTES_OF_AN_ELEMENT = 32


@dataclass(frozen=True)
class IntGroups:
    """Codes of `bits` in a `layout`, `group` columns to a scale (0: the whole row) of dtype `scales`.

    `ordered`: columns name their groups themselves. `symmetric`: without zero points, as `packed` alone may be.
    """

    layout: str
    group: int
    scales: str = "float16"
    bits: int = 4
    symmetric: bool = False
    ordered: bool = False
    digest = None
    idempotent = False
    lossless = False

    @property
    def name(self) -> str:
        """The layout and its parameters."""
        words = [KINDS[self.layout], str(self.group), self.scales, f"{self.bits}bit", self.layout]
        return ":".join(words + ["symmetric"] * self.symmetric + ["ordered"] * self.ordered)

    @property
    def _in_word(self) -> int:
        return 32 // self.bits

    def takes(self, rows: int, columns: int) -> bool:
        """Return whether the matrix is whole groups and, but in `packed`, whole words."""
        return columns % (self.group or columns) == 0 and (self.layout == "packed" or (rows % 8 == 0 and columns % 8 == 0))

    def places(self, rows: int, columns: int) -> tuple[CodePart, ...]:
        """Return codes, scales, zero points and the groups of columns."""
        groups, word = columns // (self.group or columns), self._in_word
        shapes = {
            "awq": ((columns, rows // word), (groups, rows), (groups, rows // word)),
            "packed": ((rows, -(-columns // word)), (rows, groups), (-(-rows // word), groups)),
        }.get(self.layout, ((columns // word, rows), (groups, rows), (groups, rows // word)))
        codes, scales, zeros, order = NAMES[self.layout]
        found = [
            CodePart(codes, "int32", 4, shapes[0]),
            CodePart(scales, self.scales, getattr(torch, self.scales).itemsize, shapes[1]),
        ]
        found += [] if self.symmetric else [CodePart(zeros, "int32", 4, shapes[2])]
        return tuple(found + ([CodePart(order, "int32", 4, (columns,))] if self.ordered else []))

    def encode(self, weights: Tensor) -> Parts:
        """Round to the nearest step; the largest weight of a group has the largest code. Groups are neighbouring columns.

        Raises:
            ModelError: a weight is no finite number.
        """
        refuse_no_numbers(weights)
        rows, columns = weights.shape
        dtype, middle = getattr(torch, self.scales), 1 << (self.bits - 1)
        groups = weights.float().view(rows, -1, self.group or columns)
        scales = (groups.abs().amax(dim=-1) / (middle - 1)).to(dtype)
        scales = torch.where(scales > 0, scales, torch.finfo(dtype).tiny)
        codes = (groups / scales.float()[..., None]).round().clamp(-middle, middle - 1).view(rows, columns) + middle
        names, zeros = NAMES[self.layout], torch.full((columns // groups.shape[-1], rows), middle, dtype=torch.int64)
        if self.layout == "awq":
            stored = self._words(codes.T, awq=True), scales.T, self._words(zeros, awq=True)
        elif self.layout == "packed":
            stored = self._words(codes), scales, self._words(zeros).T
        else:
            stored = self._words(codes).T, scales.T, self._words(zeros - int(self.layout == "gptq"))
        parts = {name: part.contiguous() for name, part in zip(names[: 2 if self.symmetric else 3], stored, strict=False)}
        if self.ordered:
            parts[names[3]] = (torch.arange(columns) // groups.shape[-1]).int()
        return parts

    def decode(self, parts: Parts, into: Tensor, rows: range) -> None:
        """Fill `into` with these rows."""
        codes, scales, zeros = self._aligned(parts)
        columns, order = into.shape[1], parts[NAMES[self.layout][3]].long() if self.ordered else None
        for here, there in pieces(rows, columns):
            steps, points = scales[here], self._zeros(zeros, here, scales)
            if order is not None:
                steps, points = steps[:, order], points[:, order]
            else:
                steps, points = (each.repeat_interleave(columns // scales.shape[1], dim=1) for each in (steps, points))
            into[there].copy_((self._codes(codes, here, columns) - points).to(scales.dtype) * steps)

    def repacked(self, parts: Parts) -> tuple[PackQuantized, Parts] | None:
        """Return the same weights as `pack-quantized`, whose loops are faster, bit for bit.

        None where that is not possible: columns have an order of their own, or eight bits.
        """
        if self.ordered or self.bits != 4:
            return None
        codes, scales, zeros = self._aligned(parts)
        every = slice(0, len(scales))
        columns = parts["qweight"].shape[0] * (1 if self.layout == "awq" else 8)
        found = {
            "weight_packed": pack(self._codes(codes, every, columns).to(torch.uint8)),
            "weight_scale": scales.contiguous(),
            "weight_zero_point": pack(self._zeros(zeros, every, scales).to(torch.uint8).T).T.contiguous(),
        }
        return PackQuantized(self.group, self.scales, symmetric=False), found

    def _aligned(self, parts: Parts) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return codes, scales (rows, groups), and zero points."""
        codes, scales, zeros, _ = NAMES[self.layout]
        return parts[codes], parts[scales] if self.layout == "packed" else parts[scales].T, parts.get(zeros)

    def _codes(self, words: Tensor, rows: slice, columns: int) -> Tensor:
        """Return the codes (rows, columns) int16 of these rows."""
        if self.layout == "packed":
            return self._spread(words[rows])[:, :columns]
        if self.layout == "awq":
            return self._of_rows(words, rows).T
        return self._spread(words[:, rows].T)

    def _zeros(self, words: Tensor | None, rows: slice, scales: Tensor) -> Tensor:
        """Return the zero points (rows, groups) int16 of these rows."""
        if words is None:
            middle = 1 << (self.bits - 1)
            return torch.full((rows.stop - rows.start, scales.shape[1]), middle, dtype=torch.int16, device=scales.device)
        found = self._of_rows(words.T if self.layout == "packed" else words, rows).T
        return (found + 1) & ((1 << self.bits) - 1) if self.layout == "gptq" else found

    def _of_rows(self, words: Tensor, rows: slice) -> Tensor:
        """Return the numbers of these rows, int16, of `words` (any, rows / 8): the last dimension is packed."""
        first = rows.start // self._in_word
        found = self._spread(words[:, first : -(-rows.stop // self._in_word)])
        return found[:, rows.start - first * self._in_word : rows.stop - first * self._in_word]

    def _spread(self, words: Tensor) -> Tensor:
        """Return what `words` (any, words) hold, int16: (any, words * 8)."""
        order = _AWQ_ORDER if self.layout == "awq" else range(self._in_word)
        shifts = torch.tensor([self.bits * place for place in order], dtype=torch.int32, device=words.device)
        return ((words[..., None] >> shifts) & ((1 << self.bits) - 1)).to(torch.int16).flatten(1)

    def _words(self, numbers: Tensor, *, awq: bool = False) -> Tensor:
        """Return numbers (any, columns) as int32 words."""
        filled = torch.nn.functional.pad(numbers.long(), (0, -numbers.shape[1] % self._in_word))
        order = _AWQ_ORDER if awq else range(self._in_word)
        shifts = torch.tensor([self.bits * place for place in order])
        return (filled.view(len(filled), -1, self._in_word) << shifts).sum(dim=-1).to(torch.int32)

    def decoding_bytes(self, rows: int, columns: int, *, on_host: bool = True) -> int:
        """Return the bytes of a piece's words, codes, values and zero points; rows of whole words are unpacked."""
        return min(rows + 8, rows_of_a_piece(columns) + 16) * (columns + 8) * _BYTES_OF_AN_ELEMENT + 16 * columns + 8192
