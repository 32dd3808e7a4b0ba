"""The codes that are no system's own under the contract: the double that `headrace.testing` ships, and the page's example."""

import numpy as np
from numpy.typing import NDArray

from headrace.codec import Parts
from headrace.testing import GroupedCodec
from headrace.testing.codec_contract import CodecContract


class TestGrouped(CodecContract):
    codec = GroupedCodec()
    error = 0.5 / 127 * 1.01

    def reference(self, parts: Parts, rows: int, columns: int) -> NDArray[np.float64]:
        """Codes times scales; float32 products, which is what is rounded to the dtype."""
        codes, scale = parts["codes"].numpy(), parts["scale"].numpy()
        return (codes.astype(np.float32) * np.repeat(scale, 64, axis=1)).astype(np.float64)
