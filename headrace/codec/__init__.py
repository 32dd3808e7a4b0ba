"""How weights lie as bytes, where they do not lie as compute reads them: one file for each code."""

from headrace.codec.codec import Codec

__all__ = ["Codec"]
