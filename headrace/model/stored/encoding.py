"""Between stored weights (BF16, F16, F32) and the planes of a unit, without losing a bit that the planes can hold.

bfloat16 planes hold a float32 master exactly (`terms.split_master`), so a bfloat16 source is copied and a float32 source comes
back as it was. Arrays may be views of any shape.
"""

import numpy as np

from headrace.terms.errors import ModelError
from headrace.terms.split_master import joined, lower_half, upper_half


def float32_of(stored: np.ndarray, dtype: str) -> np.ndarray:
    """Return the exact float32 values of stored bits; `dtype` is BF16 (bits as uint16), F16 or F32."""
    if dtype == "BF16":
        return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return stored.astype(np.float32, copy=False)


def put(stored: np.ndarray, dtype: str, weight: np.ndarray, master: np.ndarray | None) -> None:
    """Write stored values into views of the weight plane and, if the plane set has one, of the plane that completes it.

    `weight` is uint16 (bfloat16 `hi`, `master` is the int16 `lo`), float32 (`master` None) or float16 (`master` float32).
    Weights that nothing completes, frozen ones, are rounded to nearest even, as transformers' loader does.

    Raises:
        ModelError: a value is NaN, infinite, or too large for the weight plane.
    """
    if dtype == "BF16" and weight.dtype == np.uint16:
        _refuse(stored, (stored & np.uint16(0x7F80)) == 0x7F80, "NaN or infinity")
        weight[...] = stored
        if master is not None:
            master[...] = 0
        return
    values = float32_of(stored, dtype)
    _refuse(values, ~np.isfinite(values), "NaN or infinity")
    if weight.dtype == np.uint16:
        _put_split(values, weight, master)
    elif weight.dtype == np.float32:
        weight[...] = values
    else:
        with np.errstate(over="ignore"):
            weight[...] = values
        _refuse(values, ~np.isfinite(weight), "a value beyond the range of float16 (65504); use bfloat16 or float32 compute")
        if master is not None:
            master[...] = values


def _put_split(values: np.ndarray, hi: np.ndarray, lo: np.ndarray | None) -> None:
    # Values may be a scalar or not contiguous, and such arrays have no view of another dtype.
    bits = np.ascontiguousarray(values).view(np.uint32)
    upper = _half_to_even(bits) if lo is None else upper_half(bits)
    _refuse(values, (upper & np.uint32(0x7F80)) == 0x7F80, "a value beyond the range of bfloat16")
    hi[...] = upper.reshape(hi.shape)
    if lo is not None:
        lo[...] = lower_half(bits, upper).view(np.int32).reshape(lo.shape)


def take(weight: np.ndarray, master: np.ndarray | None, dtype: str) -> np.ndarray:
    """Return the bits of `dtype` (BF16 as uint16) for views of the planes, from the most exact value they hold.

    bfloat16 planes give BF16 as their `hi`, the weight that compute used; other roundings are to nearest even.

    Raises:
        ModelError: a value is beyond the range of F16.
    """
    if weight.dtype == np.uint16 and (dtype == "BF16" or master is None):
        return weight if dtype == "BF16" else _narrow(float32_of(weight, "BF16"), dtype)
    return _narrow(_master_of(weight, master), dtype)


def _master_of(weight: np.ndarray, master: np.ndarray | None) -> np.ndarray:
    if master is None:
        return weight.astype(np.float32, copy=False)
    if weight.dtype != np.uint16:
        return master
    bits: np.ndarray = joined(weight.astype(np.uint32), master.astype(np.int32).view(np.uint32))
    return bits.view(np.float32)


def _narrow(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "F32":
        return values
    if dtype == "F16":
        with np.errstate(over="ignore"):
            narrow = values.astype(np.float16)
        _refuse(values, ~np.isfinite(narrow), "a value beyond the range of float16 (65504), in which the model was stored")
        return narrow
    bits = np.ascontiguousarray(values).view(np.uint32)
    return _half_to_even(bits).astype(np.uint16)


def _half_to_even(bits: np.ndarray) -> np.ndarray:
    halves: np.ndarray = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return halves


def _refuse(values: np.ndarray, wrong: np.ndarray, what: str) -> None:
    count = int(np.count_nonzero(wrong))
    if count:
        raise ModelError(f"{what} in {count} of {values.size} elements")
