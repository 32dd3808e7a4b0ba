"""How weights lie as bytes, where they do not lie as compute reads them: one file for each code."""

from headrace.codec.codec import Codec, Parts
from headrace.codec.gptq import Rounded, gptq, nearest, product_errors
from headrace.codec.grids import Grid, Int4Grid, TernaryGrid
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
