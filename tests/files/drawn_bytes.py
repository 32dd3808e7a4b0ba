"""Buffers for the tests of this folder."""

import numpy as np

from headrace.files import Bytes
from headrace.machine.host_memory import huge_page_buffer


def random_bytes(num_bytes: int, seed: int = 0) -> Bytes:
    """Return random bytes, aligned as direct input and output wants them."""
    buffer = huge_page_buffer(num_bytes)
    buffer[:] = np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)
    return buffer
