"""AdamW in plain torch operations: what the compiled loops are tested against, and the rule for tensors on a device.

Each operation is one torch kernel with one rounding. No `addcmul`, `lerp` or `alpha=`: some backends contract those to a fused
multiply-add; and no division by a scalar, which a GPU computes as a product with the inverse.

Invariant: the bits of the compiled loops in `kernels` for every input; only NaNs outside `hi` and `lo` may differ in payload.

Legend: `hi` may be bfloat16, int16 or uint16, the same bits; `lo` is int16. Tensors may have any shape and live on any device.
"""

import torch
from torch import Tensor

from headrace.spec.errors import ConfigError
from headrace.update.base import Coefficients

_QUIET_NAN_BITS = 0x7FC00000


def adamw(p: Tensor, m: Tensor, v: Tensor, gradient: Tensor, k: Coefficients) -> tuple[Tensor, Tensor, Tensor]:
    """Return the new `(p, m, v)` of fp32 weights `p` and moments; `gradient` is fp32, bfloat16 or float16."""
    g = gradient.to(torch.float32) * k.gradient_scale
    m = (g if k.from_gradient else m) + (g - m) * k.moment
    v = v * k.keep + (g * k.gain) * g
    p = p * k.decay - (m * k.rate) / (_root(v) * k.correction + k.eps)
    return p, m, v


def _root(v: Tensor) -> Tensor:
    """Return the correctly rounded square root of fp32 `v`.

    By way of fp64, because torch's own fp32 root on a CPU is MKL's and misses the last bit of one number in five. In fp64 it
    is never so near to the middle of two fp32 numbers that rounding it once more could go astray.
    """
    return v.to(torch.float64).sqrt_().to(torch.float32)


def join(hi: Tensor, lo: Tensor) -> Tensor:
    """Return the fp32 master whose bits are `(hi << 16) + lo`."""
    return ((hi.view(torch.int16).to(torch.int32) << 16) + lo.to(torch.int32)).view(torch.float32)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return `(hi, lo)`, both int16, of an fp32 `master`: `hi` rounded half away from zero, NaN made the quiet NaN."""
    bits = master.view(torch.int32).masked_fill(master != master, _QUIET_NAN_BITS)
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16), (bits - (high << 16)).to(torch.int16)


def update_tensors(
    weight: Tensor, states: tuple[Tensor, ...], gradient: Tensor, k: Coefficients
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the new `(weight, states)`, in the types of the old. The plane set is told from the type of `weight`.

    Raises:
        ConfigError: `weight` has a type that no plane set has.
    """
    if weight.dtype in (torch.bfloat16, torch.int16, torch.uint16):
        lo, m, v = states
        p, m, v = adamw(join(weight, lo), m, v, gradient, k)
        hi, lo = split(p)
        return hi.view(weight.dtype), (lo, m, v)
    if weight.dtype == torch.float32:
        m, v = states
        p, m, v = adamw(weight, m, v, gradient, k)
        return p, (m, v)
    if weight.dtype == torch.float16:
        p, m, v = states
        p, m, v = adamw(p, m, v, gradient, k)
        return p.to(torch.float16), (p, m, v)
    raise ConfigError(f"update: weight must be bfloat16, float32 or float16, found {weight.dtype}")
