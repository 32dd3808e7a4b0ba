"""Codes of weights: how weights are stored as bytes, and decoded for compute. One file for each code."""

from typing import TYPE_CHECKING

from headrace.terms.faces import lazy_face

if TYPE_CHECKING:
    from headrace.codec.codec import Codec as Codec
    from headrace.codec.codec import Parts as Parts
    from headrace.codec.grids import Grid as Grid
    from headrace.codec.grids import Int4Grid as Int4Grid
    from headrace.codec.grids import TernaryGrid as TernaryGrid
    from headrace.codec.rounding import Rounded as Rounded
    from headrace.codec.rounding import gptq as gptq
    from headrace.codec.rounding import nearest as nearest
    from headrace.codec.rounding import product_errors as product_errors
    from headrace.codec.units import coded_unit as coded_unit
    from headrace.codec.units import decoding_bytes as decoding_bytes

__getattr__ = lazy_face(__name__)
