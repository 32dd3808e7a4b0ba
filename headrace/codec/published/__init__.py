"""The codes in which models are published, each decoded as its publisher's own code decodes it."""

from typing import TYPE_CHECKING

from headrace.terms.faces import lazy_face

if TYPE_CHECKING:
    from headrace.codec.published.fp4_blocks import Fp4Blocks
    from headrace.codec.published.fp8_blocks import Fp8Blocks
    from headrace.codec.published.gguf_blocks import GgufBlocks
    from headrace.codec.published.int8_rows import Int8Rows
    from headrace.codec.published.int_groups import IntGroups
    from headrace.codec.published.mxfp4 import Mxfp4
    from headrace.codec.published.nf4 import Nf4
    from headrace.codec.published.pack_quantized import PackQuantized

__getattr__ = lazy_face(__name__)
