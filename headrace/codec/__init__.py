"""Codes of weights: how weights are stored as bytes, and decoded for compute. One file for each code.

What is exported is loaded when it is first asked for: the table of codes (`table.py`) is read without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.codec.codec import Codec, Parts
    from headrace.codec.grids import Grid, Int4Grid, TernaryGrid
    from headrace.codec.rounding import Rounded, gptq, nearest, product_errors
    from headrace.codec.units import coded_unit, decoding_bytes

__all__ = [
    "Codec",
    "Grid",
    "Int4Grid",
    "Parts",
    "Rounded",
    "TernaryGrid",
    "coded_unit",
    "decoding_bytes",
    "gptq",
    "nearest",
    "product_errors",
]


def __getattr__(name: str) -> Any:
    for home in ("codec", "grids", "rounding", "units"):
        if name in __all__ and hasattr(found := import_module(f"headrace.codec.{home}"), name):
            return getattr(found, name)
    raise AttributeError(f"module 'headrace.codec' has no attribute {name!r}")
