"""The codes in which models are published, each decoded as its publisher's own code decodes it."""

from headrace.codec.published.fp8_blocks import Fp8Blocks
from headrace.codec.published.mxfp4 import Mxfp4
from headrace.codec.published.nf4 import Nf4
from headrace.codec.published.pack_quantized import PackQuantized

__all__ = ["Fp8Blocks", "Mxfp4", "Nf4", "PackQuantized"]
