"""The split master: an fp32 number as its bfloat16 rounding `hi` and an int16 remainder `lo`; and bfloat16 as bits.

For import and export of whole tensors: with the output arrays given, nothing is allocated.

Invariant: `join_master(*split_master(x))` has the bits of `x` for every number, infinities, zeros and subnormals included.
At the edges: a master from 3.3961775e38 on, half a place beyond the largest bfloat16, has `hi` = infinity,
as rounding demands, and `lo` still leads back to it. A NaN of any payload becomes the quiet NaN 0x7FC00000: it stays NaN in
both forms, but its payload is lost (a large one would otherwise round to minus zero in `hi`).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.terms.errors import ConfigError
from headrace.update import kernels


def split_master(
    master: NDArray[np.float32], *, hi: NDArray[np.uint16] | None = None, lo: NDArray[np.int16] | None = None
) -> tuple[NDArray[np.uint16], NDArray[np.int16]]:
    """Return `(hi, lo)` with `bits(master) == (hi << 16) + lo` and `hi` rounded half away from zero.

    Shapes: any, the same for all. Effects: writes `hi` and `lo` where given.

    Raises:
        ConfigError: an array of another type or shape, or one that is not contiguous.
    """
    hi = np.empty(master.shape, np.uint16) if hi is None else hi
    lo = np.empty(master.shape, np.int16) if lo is None else lo
    master_N, hi_N, lo_N = _flat(("master", master, "float32"), ("hi", hi, "uint16"), ("lo", lo, "int16"))
    kernels.split(master_N, hi_N, lo_N)
    return hi, lo


def join_master(
    hi: NDArray[np.uint16], lo: NDArray[np.int16], *, out: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """Return the fp32 master whose bits are `(hi << 16) + lo`: the inverse of `split_master`.

    Shapes: any, the same for all. Effects: writes `out` where given.

    Raises:
        ConfigError: an array of another type or shape, or one that is not contiguous.
    """
    out = np.empty(hi.shape, np.float32) if out is None else out
    hi_N, lo_N, out_N = _flat(("hi", hi, "uint16"), ("lo", lo, "int16"), ("out", out, "float32"))
    kernels.join(hi_N, lo_N, out_N)
    return out


def widen_bfloat16(bits: NDArray[np.uint16], *, out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """Return the float32 numbers that bfloat16 `bits` stand for, exactly.

    Raises:
        ConfigError: an array of another type or shape, or one that is not contiguous.
    """
    out = np.empty(bits.shape, np.float32) if out is None else out
    bits_N, out_N = _flat(("bits", bits, "uint16"), ("out", out, "float32"))
    kernels.widen(bits_N, out_N)
    return out


def round_to_bfloat16(values: NDArray[np.float32], *, out: NDArray[np.uint16] | None = None) -> NDArray[np.uint16]:
    """Return the bits of the bfloat16 nearest to each of `values`, ties to even: `tensor.to(torch.bfloat16)`.

    This is the rounding of gradients and of plain casts; `hi` of `split_master` differs from it in ties.

    Raises:
        ConfigError: an array of another type or shape, or one that is not contiguous.
    """
    out = np.empty(values.shape, np.uint16) if out is None else out
    values_N, out_N = _flat(("values", values, "float32"), ("out", out, "uint16"))
    kernels.narrow_bfloat16(values_N, out_N)
    return out


def _flat(*arrays: tuple[str, NDArray[Any], str]) -> list[NDArray[Any]]:
    """Return each `(name, array, dtype)` as a one-dimensional view, after checking that it fits the first."""
    shape = arrays[0][1].shape
    for name, array, dtype in arrays:
        if array.dtype.name != dtype or array.shape != shape or not array.flags.c_contiguous:
            raise ConfigError(
                f"{name} must be a contiguous array of {dtype} with shape {shape}; "
                f"found {array.dtype.name}, shape {array.shape}, strides {array.strides}"
            )
    return [array.reshape(-1) for _, array, _ in arrays]
