"""What `headrace compress` can write: the grid that weights are rounded to, the stored parts of a matrix, their description.

Invariant: what the described parts decode to, by the published definition of the format, is `Rounded.values` bit for bit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from headrace.codec.grids import Grid, Int4Grid
from headrace.codec.int4 import pack

_LEAST_GROUP = 32


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
