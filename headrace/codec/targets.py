"""What `headrace compress` can write: the grid that weights are rounded to, the stored parts of a matrix, their description.

Invariant: what the described parts decode to, by the published definition of the format, is `Rounded.values` bit for bit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from headrace.codec.bf16x12 import Bf16x12
from headrace.codec.dictionary import QMOE_ZEROS, Dictionary
from headrace.codec.grids import Grid, Int4Grid, PrunedGrid, TernaryGrid
from headrace.codec.int4 import pack
from headrace.codec.sparse import Sparse
from headrace.codec.ternary import TritsCodec, WordsCodec, parts_bytes, share_of_zeros
from headrace.terms.coding import as_matrix

_LEAST_GROUP = 32
_MOST_PRUNED, _LEAST_PRUNED = 128, 8
METHOD, FORMAT, SPARSE, BF16X12 = "headrace", "ternary", "sparse", "bf16x12"  # formats that no other program reads
# Names of tables in a file: one of these, a dictionary's thousandths, and the number of the file's unit.
TABLE, DIGEST = "headrace.dictionary.", "headrace.dictionary_sha256."
# There are dictionaries for shares of zeros in steps of 20 thousandths, and for QMoE's 885.
_STEP, _LEAST, _MOST = 20, 500, 960
_NEAR = 6


class Target(Protocol):
    """A code in which matrices are written."""

    @property
    def name(self) -> str:
        """Its name in options."""

    def grid(self, columns: int, stored: torch.dtype) -> Grid | None:
        """Return the grid for a matrix of so many columns whose weights are stored as `stored`; None: it is not coded."""

    def parts(self, codes: Tensor, sides: Tensor, stored: torch.dtype) -> Mapping[str, Tensor]:
        """Return the stored tensors of a matrix, by what takes the place of `weight` in its name.

        `codes` are (rows, columns) uint8, `sides` (rows, groups, numbers).
        """

    def describe(self, groups: Mapping[str, int], ignored: Sequence[str]) -> dict[str, Any]:
        """Return the `quantization_config` of `config.json`.

        `groups` are the columns of a group (0: whole rows) by the name of the coded module. A name that begins with `re:` is a
        regular expression for several modules. `ignored` are the names of linear modules that are not coded.
        """


class DirectTarget(Protocol):
    """A lossless code in which matrices are written as they are, without data."""

    @property
    def name(self) -> str:
        """Its name in options."""

    def takes(self, shape: tuple[int, ...], stored: torch.dtype) -> bool:
        """Return whether it codes a tensor of this shape whose numbers are stored as `stored`."""

    def parts(self, weights: Tensor) -> Mapping[str, Tensor]:
        """Return the stored tensors of such a tensor, by what takes the place of `weight` in its name."""

    def describe(self, ignored: Sequence[str]) -> dict[str, Any]:
        """Return the `quantization_config` of `config.json`. `ignored` are the names of linear modules that are not coded."""


@dataclass(frozen=True)
class Int4Target:
    """compressed-tensors' `pack-quantized`, symmetric; `group_size` columns to a scale (fewer where a width needs it)."""

    group_size: int = 128
    name: str = "int4"

    def grid(self, columns: int, stored: torch.dtype) -> Grid | None:
        """Return the grid with the largest group, `group_size` or halves of it down to 32, that divides `columns`."""
        size = self.group_size
        while columns % size and size % 2 == 0 and size > _LEAST_GROUP:
            size //= 2
        return None if columns % size else Int4Grid(group=size, stored=stored)

    def parts(self, codes: Tensor, sides: Tensor, stored: torch.dtype) -> Mapping[str, Tensor]:
        """Return packed words, scales and shape."""
        shape = torch.tensor(codes.shape, dtype=torch.int64)
        return {"weight_packed": pack(codes), "weight_scale": sides[:, :, 0].to(stored), "weight_shape": shape}

    def describe(self, groups: Mapping[str, int], ignored: Sequence[str]) -> dict[str, Any]:
        """Return one group of the configuration for each size: the most common size applies to all linear modules."""
        sizes = sorted(set(groups.values()), key=lambda size: -sum(size == other for other in groups.values()))
        described = {}
        for number, size in enumerate(sizes):
            # Names win over expressions, and both win over classes. So modules of the most common size are named only where
            # the expression of another size might match them.
            names = sorted(name for name, other in groups.items() if other == size)
            several = any(name.startswith("re:") and groups[name] != size for name in groups)
            targets = ["Linear", *(names if several else ())] if number == 0 else names
            described[f"group_{number}"] = {"targets": targets, "weights": _weights(size)} | _NO_ACTIVATIONS
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "ignore": sorted(ignored),
            "kv_cache_scheme": None,
            "config_groups": described,
        }


def with_one_group(target: Target, widths: Sequence[int]) -> Target:
    """Return a target whose groups have one size in all matrices of these `widths` that it codes."""
    if not isinstance(target, Int4Target):
        return target
    grids = [target.grid(width, torch.bfloat16) for width in widths]
    return replace(target, group_size=min((grid.group or 0 for grid in grids if grid is not None), default=target.group_size))


_NO_ACTIVATIONS: dict[str, Any] = {"input_activations": None, "output_activations": None}


def _weights(group_size: int) -> dict[str, Any]:
    return {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": group_size,
        "dynamic": False,
        "observer": "minmax",
        "actorder": None,
        "block_structure": None,
        "observer_kwargs": {},
    }


def _own_format(name: str, ignored: Sequence[str]) -> dict[str, Any]:
    return {"quant_method": METHOD, "format": name, "ignore": sorted(ignored)}


@dataclass(frozen=True)
class TernaryTarget:
    """Ternary weights: in words where these take `least_gain_bytes` less than trits, because a table has half a megabyte.

    These tensors of a matrix lie in the file of its block, in the place of `weight`. `weight_shape` int64 has rows, columns,
    and the dictionary's share of zeros in thousandths (0: trits). `weight_levels` is bfloat16 (rows, 2). The codes are
    `weight_codes` uint16 with `weight_row_offsets` int32, or `weight_trits` uint8. Each file has the tables of the dictionaries
    that it needs, once, with their digests. Invariant: the choice of a dictionary follows from the matrix alone, so that a
    resumed run writes the same.
    """

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
        """Return what names the format."""
        return _own_format(FORMAT, ignored)

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


@dataclass(frozen=True)
class SparseTarget:
    """Matrices of which half the weights of each group of columns become zero, by SparseGPT's choice; the others are rounded to
    bfloat16. The tensors of `a.weight` are `a.weight_shape` int64 and `a.weight_bitmap`, ...: the parts of `sparse.Sparse`.
    """

    name: str = "sparse50"

    def grid(self, columns: int, stored: torch.dtype) -> Grid | None:
        """Return the grid with the largest group, 128 columns or halves of it down to 8, that divides `columns`."""
        group = _MOST_PRUNED
        while columns % group and group > _LEAST_PRUNED:
            group //= 2
        return PrunedGrid(group=group if columns % group == 0 else None) if columns > 1 else None

    def parts(self, codes: Tensor, sides: Tensor, stored: torch.dtype) -> Mapping[str, Tensor]:
        """Return shape and parts; `codes` are the weights."""
        shape = torch.tensor(codes.shape, dtype=torch.int64)
        return {"weight_shape": shape} | {f"weight_{name}": part for name, part in Sparse().encode(codes).items()}

    def describe(self, groups: Mapping[str, int], ignored: Sequence[str]) -> dict[str, Any]:
        """Return what names the format."""
        return _own_format(SPARSE, ignored)


@dataclass(frozen=True)
class Bf16x12Target:
    """Matrices and stacks of matrices of bfloat16: the parts of `bf16x12.Bf16x12`, and the shape.

    The tensors of `a.weight` are `a.weight_shape` int64 and `a.weight_low`, `a.weight_high`, ...; a stack of matrices has the
    rows of all, one after another. The widest numbers come first, so that all lie at multiples of their size where matrices
    have even sizes.
    """

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
        """Return what names the format."""
        return _own_format(BF16X12, ignored)
