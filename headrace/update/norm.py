"""The sum of squares of a gradient, the same bits for any chunks and any threads.

The norm of all units is not here (add their sums in the order of the units, then take the root), nor what follows (`clip`).

Invariant: each block of `BLOCK_ELEMENTS` elements is summed alone, in fp64; block sums are added in the order of the elements.
"""

import numpy as np
from numpy.typing import NDArray

from headrace.terms.errors import ConfigError
from headrace.update import kernels
from headrace.update.kernels import BLOCK_ELEMENTS
from headrace.update.rule import GRADIENT_DTYPES

__all__ = ["BLOCK_ELEMENTS", "add_block_sums", "block_square_sums", "square_sum"]


def square_sum(gradient: NDArray[np.generic], carry: float = 0.0) -> float:
    """Return `carry` plus the sum of squares of `gradient`; infinite or NaN if and only if an element is not finite.

    If a unit comes in chunks, pass each chunk's result as the `carry` of the next. The bits are those of one call on the whole,
    provided each chunk but the last is a multiple of `BLOCK_ELEMENTS` long.

    Shapes: `(n,)`, contiguous; uint16 (bfloat16 bits), float32 or float16. Cost: one pass, no GIL.

    Raises:
        ConfigError: an array of another type or shape.
    """
    return add_block_sums(block_square_sums(gradient), carry)


def block_square_sums(gradient: NDArray[np.generic]) -> NDArray[np.float64]:
    """Return the sum of squares of each block, `(ceil(n / BLOCK_ELEMENTS),)`: threads can compute it for parts of a unit.

    Raises:
        ConfigError: an array of another type or shape.
    """
    if gradient.dtype.name not in GRADIENT_DTYPES or gradient.ndim != 1 or not gradient.flags.c_contiguous:
        raise ConfigError(
            f"gradient must be one contiguous dimension of {' or '.join(GRADIENT_DTYPES)}; "
            f"found {gradient.dtype.name}, shape {gradient.shape}, strides {gradient.strides}"
        )
    sums = np.empty(-(-gradient.size // BLOCK_ELEMENTS), np.float64)
    kernels.block_square_sums(gradient.view(np.int16) if gradient.dtype == np.float16 else gradient, sums)
    return sums


def add_block_sums(sums: NDArray[np.float64], carry: float = 0.0) -> float:
    """Return `carry` plus the `sums` of blocks, added one after the other."""
    return float(kernels.add_in_order(sums, float(carry)))
