"""The planes on tensors: the split master in plain torch operations, and an update of it by any rule that has a tensor form.

Each operation is one torch kernel with one rounding. There is no `addcmul`, `lerp` or `alpha=`, which some backends contract to
a fused multiply-add. There is no division by a scalar, which a GPU computes as a product with the inverse. The compiled loops
are tested against this, and it runs on a device.

Invariant: the bits of the compiled loops for every input; only the payloads of NaNs outside `hi` and `lo` may differ.

Legend: `hi` may be bfloat16, int16 or uint16, the same bits; `lo` is int16. Tensors may have any shape and live on any device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.terms.errors import ConfigError
from headrace.terms.split_master import QUIET_NAN_BITS, joined, lower_half, upper_half

States = tuple[Tensor, ...]
Updated = tuple[Tensor, States]  # the new fp32 weights, and the new states
Scalars = tuple[float, ...]  # of an update, as a rule gives them


@dataclass(frozen=True, slots=True)
class Noise:
    """What decides random roundings: the `key` of the update and unit, and the number of the first element."""

    key: int
    first_element: int


def as_tensor(array: NDArray[Any], *, bfloat16: bool = False) -> Tensor:
    """Return an array as a tensor over the same memory; uint16 becomes `bfloat16`, or stays bits."""
    if array.dtype.name != "uint16":
        return torch.from_numpy(array)
    tensor = torch.from_numpy(array.view(np.int16))
    return tensor.view(torch.bfloat16) if bfloat16 else tensor


def root_of(v: Tensor) -> Tensor:
    """Return the correctly rounded square root of fp32 `v`.

    It goes through fp64. Torch's own fp32 root on a CPU is MKL's, which misses the last bit of one number in five. In fp64 a
    root is never so near to the middle of two fp32 numbers that the second rounding could go wrong.
    """
    return v.to(torch.float64).sqrt_().to(torch.float32)


def join(hi: Tensor, lo: Tensor) -> Tensor:
    """Return the fp32 master whose halves are `hi` and `lo`."""
    bits: Tensor = joined(hi.view(torch.int16).to(torch.int32), lo.to(torch.int32))
    return bits.view(torch.float32)


def rounded_bits(values: Tensor) -> Tensor:
    """Return the bits (int32) of fp32 `values` before they are rounded to bfloat16: every NaN becomes the quiet NaN."""
    return values.view(torch.int32).masked_fill(values != values, QUIET_NAN_BITS)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return `(hi, lo)`, both int16, of an fp32 `master`."""
    bits = rounded_bits(master)
    high = upper_half(bits)
    return high.to(torch.int16), lower_half(bits, high).to(torch.int16)


def update_tensors(weight: Tensor, states: Sequence[Tensor], update: Callable[[Tensor, Sequence[Tensor]], Updated]) -> Updated:
    """Return the new `(weight, states)`, in the types of the old ones, by applying `update` to the fp32 master and the rule's
    states.

    The type of `weight` tells the plane set; `states` begin with the rest of its master, if there is one.

    Raises:
        ConfigError: no plane set has weights of that type.
    """
    if weight.dtype in (torch.bfloat16, torch.int16, torch.uint16):
        p, new = update(join(weight, states[0]), states[1:])
        hi, lo = split(p)
        return hi.view(weight.dtype), (lo, *new)
    if weight.dtype == torch.float32:
        return update(weight, states)
    if weight.dtype == torch.float16:
        p, new = update(states[0], states[1:])
        return p.to(torch.float16), (p, *new)
    raise ConfigError(f"update: weight must be bfloat16, float32 or float16, found {weight.dtype}")
