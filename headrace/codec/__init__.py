"""Codes of weights: how weights are stored as bytes, and decoded for compute. One file for each code."""

from typing import TYPE_CHECKING

from headrace.terms.faces import lazy_face

if TYPE_CHECKING:
    from headrace.codec.codec import Codec, Parts
    from headrace.codec.grids import Grid, Int4Grid, TernaryGrid
    from headrace.codec.rounding import Rounded, gptq, nearest, product_errors
    from headrace.codec.units import coded_unit, decoding_bytes

__getattr__ = lazy_face(__name__)
