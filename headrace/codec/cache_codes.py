"""Codes of keys and values: groups of up to 64 of a token's numbers, with a step and a least value in float16 each.

It is FlexGen's code of caches (Sheng et al. 2023, section 5: groups of 64, asymmetric). A token of a row is coded by itself.
So new tokens lie behind old ones, and the codes of a row depend on no other row. Code c stands for c times the step plus the
least value. The product is exact in float32 (8 and 11 bits), so that every processor gives the same bits.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from headrace.codec.cache_loops import decode_tokens
from headrace.codec.row_pieces import on_all_cores
from headrace.terms.sizes import round_up

_GROUP = 64
_PARAMETER_BYTES = 4  # of a group: step and least value
_MOST = torch.finfo(torch.float16).max
# Numbers that are coded at once; temporaries take some 20 bytes for each.
_PIECE_NUMBERS = 1 << 16


class CacheCode(Protocol):
    """A code of keys or values. Each token of a row takes the same bytes, and is coded and decoded by itself."""

    @property
    def name(self) -> str:
        """Its name in options."""

    @property
    def bits(self) -> float:
        """The bits of a number, all counted, in whole groups."""

    def coded_bytes(self, numbers: int) -> int:
        """Return the bytes of so many numbers: those of a token of a row."""

    def encode(self, numbers: Tensor, into: Tensor) -> None:
        """Code `numbers` (rows, heads, tokens, width) to `into` (tokens, rows * coded bytes) uint8; its lines may lie apart."""

    def decode(self, coded: Tensor, into: Tensor) -> None:
        """Fill `into` (rows, heads, tokens, width) with the first tokens, those in `coded` (see `encode`)."""


@dataclass(frozen=True)
class GroupCode:
    """Codes of `code_bits` bits, 4 or 8."""

    name: str
    code_bits: int

    @property
    def bits(self) -> float:
        """See `CacheCode`."""
        return self.code_bits + 8 * _PARAMETER_BYTES / _GROUP

    def coded_bytes(self, numbers: int) -> int:
        """See `CacheCode`: steps and least values of all groups come first, then the codes."""
        count, size = _groups(numbers)
        return count * (_PARAMETER_BYTES + size * self.code_bits // 8)

    def encode(self, numbers: Tensor, into: Tensor) -> None:
        """See `CacheCode`."""
        rows, heads, tokens, width = numbers.shape
        lines = numbers.permute(2, 0, 1, 3)
        for start, stop in _pieces(tokens, rows * heads * width):
            piece = lines[start:stop].reshape(stop - start, rows, heads * width)
            into[start:stop].copy_(self._encoded(piece).flatten(1))

    def decode(self, coded: Tensor, into: Tensor) -> None:
        """See `CacheCode`. On the host a compiled loop does it, on all cores."""
        if into.device.type == "cpu" and into.dtype in (torch.float32, torch.bfloat16) and into.is_contiguous():
            self._by_loop(coded, into)
        else:
            self.decode_plainly(coded, into)

    def decode_plainly(self, coded: Tensor, into: Tensor) -> None:
        """Do as `decode`, on any device: the definition, to which the loop is compared."""
        rows, heads, _, width = into.shape
        for start, stop in _pieces(coded.shape[0], rows * heads * width):
            lines = coded[start:stop].reshape(stop - start, rows, -1)
            found = self._decoded(lines, heads * width).to(into.dtype)
            into[:, :, start:stop] = found.view(stop - start, rows, heads, width).permute(1, 2, 0, 3)

    def _encoded(self, numbers: Tensor) -> Tensor:
        """Return the bytes (..., coded bytes) of `numbers` (..., numbers)."""
        count, size = _groups(numbers.shape[-1])
        if missing := count * size - numbers.shape[-1]:
            numbers = torch.cat([numbers, numbers[..., -1:].expand(*numbers.shape[:-1], missing)], dim=-1)
        groups, levels = numbers.float().reshape(*numbers.shape[:-1], count, size), (1 << self.code_bits) - 1
        least = groups.amin(-1, keepdim=True).clamp(-_MOST, _MOST).half()
        step = ((groups.amax(-1, keepdim=True) - least.float()) / levels).clamp(max=_MOST).half()
        # A group of equal numbers has no step: whatever its codes are, they stand for the least value.
        codes = ((groups - least.float()) / step.float()).round_().nan_to_num_(0.0).clamp_(0, levels).to(torch.uint8)
        if self.code_bits == 4:
            low, high = codes.chunk(2, dim=-1)
            codes = low | high << 4
        parameters = torch.cat([step, least], dim=-1).view(torch.uint8)
        return torch.cat([parameters.flatten(-2), codes.flatten(-2)], dim=-1)

    def _decoded(self, coded: Tensor, numbers: int) -> Tensor:
        """Return the numbers (..., numbers), float32, that bytes (..., coded bytes) stand for."""
        count, size = _groups(numbers)
        lead, start = coded.shape[:-1], count * _PARAMETER_BYTES
        parameters = coded[..., :start].contiguous().view(torch.float16).float().view(*lead, count, 2)
        codes = coded[..., start:].reshape(*lead, count, size * self.code_bits // 8)
        if self.code_bits == 4:
            codes = torch.cat([codes & 15, codes >> 4], dim=-1)
        found = codes.float() * parameters[..., :1] + parameters[..., 1:]
        return found.view(*lead, count * size)[..., :numbers]

    def _by_loop(self, coded: Tensor, into: Tensor) -> None:
        rows, heads, _, width = into.shape
        table, sizes = coded.numpy(), _groups(heads * width)
        out = into.view(torch.uint16 if into.dtype is torch.bfloat16 else torch.uint32).flatten(0, 1).numpy()

        def decode(start: int, stop: int) -> None:
            decode_tokens(table, rows, *sizes, self.code_bits, out, start, stop)

        on_all_cores(decode, coded.shape[0], rows * heads * width)


def _groups(numbers: int) -> tuple[int, int]:
    """Return how many groups so many numbers are, and the size of each; the last one may be filled up."""
    count = -(-numbers // _GROUP)
    return count, round_up(-(-numbers // count), 4)


def _pieces(tokens: int, numbers: int) -> list[tuple[int, int]]:
    """Return ranges of tokens of so many numbers each."""
    step = max(1, _PIECE_NUMBERS // numbers)
    return list(pairwise([*range(0, tokens, step), tokens]))


CACHE_CODES: dict[str, CacheCode] = {code.name: code for code in (GroupCode("int4", 4), GroupCode("int8", 8))}
