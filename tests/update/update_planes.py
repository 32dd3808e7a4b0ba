"""Planes and gradients for the tests of the update: ordinary values, and every kind of bit pattern."""

import dataclasses
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.terms.layout import COMPUTE_DTYPES
from headrace.update import StepScalars
from headrace.update.rules.adamw import AdamW, AdamWRule
from headrace.update.rules.tensors import split

Planes = tuple[NDArray[Any], tuple[NDArray[Any], ...]]

COMPUTE_DTYPES = tuple(COMPUTE_DTYPES)
ADAMW = AdamW(beta1=0.9, beta2=0.95, eps=1e-8)
STEP = StepScalars(learning_rate=1e-3, update=3, gradient_scale=0.5)
# fp32 patterns at the edges: zeros, least and greatest subnormal, least normal, one, a tie of bfloat16, greatest number,
# the first that rounds to infinity in bfloat16, infinities, NaNs of small and large payload.
EDGE_BITS = (0, 1, 0x7FFFFF, 0x800000, 0x3F800000, 0x3F808000, 0x7F7FFFFF, 0x7F7F8000, 0x7F800000, 0x7F800001, 0x7FFFFFFF)
EDGES = np.array([bits | sign for bits in EDGE_BITS for sign in (0, 1 << 31)], np.uint32).view(np.float32)


def adamw(compute_dtype: str, moments: str = "float32", **changes: Any) -> AdamWRule:
    """Return AdamW with the betas of these tests, or others."""
    return AdamWRule(dataclasses.replace(ADAMW, moments=moments, **changes), compute_dtype)


def planes_of(master: NDArray[np.float32], m: NDArray[np.float32], v: NDArray[np.float32], compute_dtype: str) -> Planes:
    """Return `(weight, states)` that stand for a master and its moments."""
    if compute_dtype == "bfloat16":
        hi, lo = split(as_tensor(master))
        return hi.numpy().view(np.uint16), (lo.numpy(), m.copy(), v.copy())
    if compute_dtype == "float32":
        return master.copy(), (m.copy(), v.copy())
    with np.errstate(over="ignore"):
        return master.astype(np.float16), (master.copy(), m.copy(), v.copy())


def ordinary(num_elements: int, seed: int, compute_dtype: str) -> Planes:
    """Return planes as they are in the middle of a run."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal((3, num_elements), np.float32)
    return planes_of(
        normal[0] * np.float32(0.02), normal[1] * np.float32(1e-3), (normal[2] * np.float32(1e-3)) ** 2, compute_dtype
    )


def wild(num_elements: int, seed: int, compute_dtype: str) -> Planes:
    """Return planes of random bits with edges among them; `v` is never negative, for its root is taken."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 1 << 32, (3, num_elements), np.uint32).view(np.float32)
    bits[:, ::7] = rng.choice(EDGES, bits[:, ::7].shape)
    return planes_of(bits[0], bits[1], np.abs(bits[2]), compute_dtype)


def gradient_of(num_elements: int, seed: int, dtype: str, *, any_bits: bool = False) -> NDArray[Any]:
    """Return a gradient: normal numbers, or any bit pattern of its type."""
    rng = np.random.default_rng(seed + 1)
    if any_bits:
        return rng.integers(0, 256, num_elements * np.dtype(dtype).itemsize, np.uint8).view(dtype)
    values = rng.standard_normal(num_elements, np.float32)
    return as_array(torch.from_numpy(values).to(torch.bfloat16)) if dtype == "uint16" else values.astype(dtype)


def copied(planes: Planes) -> Planes:
    """Return a copy of all planes."""
    return planes[0].copy(), tuple(state.copy() for state in planes[1])


def as_tensor(array: NDArray[Any], *, bfloat16: bool = False) -> torch.Tensor:
    """Return `array` as a tensor of its own memory; uint16 as bfloat16 where asked."""
    if bfloat16 and array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def as_array(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a tensor as an array; bfloat16 as uint16 bits."""
    return tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()


def same_bits(left: NDArray[Any], right: NDArray[Any]) -> bool:
    """Say whether two arrays have the same type and bits, any NaN being equal to any other."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    equal = left.view(f"u{left.itemsize}") == right.view(f"u{right.itemsize}")
    if left.dtype.kind == "f":
        equal |= np.isnan(left) & np.isnan(right)
    return bool(equal.all())


def same_planes(left: Planes, right: Planes) -> bool:
    """Say whether all planes have the same bits."""
    return all(same_bits(a, b) for a, b in zip((left[0], *left[1]), (right[0], *right[1]), strict=True))
