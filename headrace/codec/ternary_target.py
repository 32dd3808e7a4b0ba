"""Ternary weights as `headrace compress` writes them: in words where these are smaller than trits, with the tables they need.

These tensors of a matrix lie in the file of its block, in the place of `weight`. `weight_shape` int64 has rows, columns, and
the dictionary's share of zeros in thousandths (0: trits). `weight_levels` is bfloat16 (rows, 2). The codes are `weight_codes`
uint16 with `weight_row_offsets` int32, or `weight_trits` uint8. Each file has the tables of the dictionaries that it needs,
once, with their digests. Invariant: the choice of a dictionary follows from the matrix alone, so that a resumed run writes the
same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headrace.codec.dictionary import QMOE_ZEROS, Dictionary
from headrace.codec.grids import Grid, TernaryGrid
from headrace.codec.ternary import TritsCodec, WordsCodec, parts_bytes, share_of_zeros

METHOD, FORMAT = "headrace", "ternary"
# Names of tables in a file: one of these, a dictionary's thousandths, and the number of the file's unit.
TABLE, DIGEST = "headrace.dictionary.", "headrace.dictionary_sha256."
# There are dictionaries for shares of zeros in steps of 20 thousandths, and for QMoE's 885.
_STEP, _LEAST, _MOST = 20, 500, 960
_NEAR = 6


@dataclass(frozen=True)
class TernaryTarget:
    """Ternary weights: in words where these take `least_gain_bytes` less than trits, because a table has half a megabyte."""

    least_gain_bytes: int = 32768
    name: str = "ternary"
    _codecs: dict[int, WordsCodec] = field(default_factory=dict, repr=False, compare=False)

    def grid(self, columns: int, stored: torch.dtype) -> Grid | None:
        """Return three levels for each row."""
        return TernaryGrid() if columns > 1 else None

    def parts(self, codes: Tensor, sides: Tensor, stored: torch.dtype) -> Mapping[str, Tensor]:
        """Return the tensors of a matrix and, with words, those of their dictionary, whose names are complete already."""
        levels, zeros = sides[:, 0].to(torch.bfloat16), zeros_of_dictionary(share_of_zeros(codes))
        levels = torch.where(_used(codes), levels, 0)  # a level that no weight uses becomes 0
        codec = self._codec(zeros)
        words, trits = codec.encode_symbols(codes, levels), TritsCodec().encode_symbols(codes, levels)
        small = words if parts_bytes(words) + self.least_gain_bytes <= parts_bytes(trits) else trits
        shape = torch.tensor([*codes.shape, zeros if small is words else 0], dtype=torch.int64)
        found = {"weight_shape": shape} | {f"weight_{name}": part for name, part in small.items()}
        return found | (tables_of(codec.dictionary) if small is words else {})

    def describe(self, groups: Mapping[str, int], ignored: Sequence[str]) -> dict[str, Any]:
        """Return the `quantization_config` of `config.json`: no other program reads this format."""
        return {"quant_method": METHOD, "format": FORMAT, "ignore": sorted(ignored)}

    def _codec(self, zeros: int) -> WordsCodec:
        if zeros not in self._codecs:
            self._codecs[zeros] = WordsCodec(Dictionary.build(zeros))
        return self._codecs[zeros]


def zeros_of_dictionary(share: float) -> int:
    """Return the thousandths of zeros of the dictionary for a matrix whose weights have this share of zeros."""
    if abs(1000 * share - QMOE_ZEROS) < _NEAR:
        return QMOE_ZEROS
    return min(_MOST, max(_LEAST, _STEP * round(1000 * share / _STEP)))


def tables_of(dictionary: Dictionary) -> dict[str, Tensor]:
    """Return a dictionary's table (as int32, which every reader of safetensors knows) and its digest as tensors."""
    digest = torch.tensor(list(bytes.fromhex(dictionary.digest)), dtype=torch.uint8)
    table = torch.from_numpy(dictionary.words.view("<i4").copy())
    return {f"{TABLE}{dictionary.zeros}": table, f"{DIGEST}{dictionary.zeros}": digest}


def is_dictionary_table(name: str) -> bool:
    """Return whether a part is a table, which a file has once, and not a part of one matrix."""
    return name.startswith((TABLE, DIGEST))


def _used(codes: Tensor) -> Tensor:
    return torch.stack([(codes == symbol).any(dim=1) for symbol in (1, 2)], dim=1)
