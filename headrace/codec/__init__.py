"""How weights lie as bytes, where they do not lie as compute reads them: one file for each code."""

from headrace.codec.codec import Codec, Parts
from headrace.codec.units import coded_unit, decoding_bytes

__all__ = ["Codec", "Parts", "coded_unit", "decoding_bytes"]
