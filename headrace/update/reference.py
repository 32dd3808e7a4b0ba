"""AdamW in plain torch operations: what the compiled loops are tested against, and the rule for tensors on a device.

Each operation is one torch kernel with one rounding. No `addcmul`, `lerp` or `alpha=`: some backends contract those to a fused
multiply-add; and no division by a scalar, which a GPU computes as a product with the inverse.

Invariant: the bits of the compiled loops in `kernels` for every input; only NaNs outside `hi` and `lo` may differ in payload.

Moments of fewer than 32 bits are told from their types: int16 or uint16 are bfloat16 bits, int8 and uint8 are codes.

Legend: `hi` may be bfloat16, int16 or uint16, the same bits; `lo` is int16. Tensors may have any shape and live on any device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.terms.errors import ConfigError
from headrace.terms.layout import MOMENT_BLOCK_ELEMENTS
from headrace.update.kernels import LARGEST_M, LARGEST_V, NOISE_LAST_SHIFT, NOISE_ROUNDS, SMALLEST_M
from headrace.update.rule import Coefficients

_QUIET_NAN_BITS = 0x7FC00000


@dataclass(frozen=True, slots=True)
class Noise:
    """Where random roundings come from: the `key` of the update and unit, and the number of the first element."""

    key: int
    first_element: int


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
    weight: Tensor, states: tuple[Tensor, ...], gradient: Tensor, k: Coefficients, noise: Noise | None = None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the new `(weight, states)`, in the types of the old. The plane set is told from the types.

    `noise` is needed where moments have fewer than 32 bits; there all tensors have one dimension.

    Raises:
        ConfigError: `weight` has a type that no plane set has.
    """
    if weight.dtype in (torch.bfloat16, torch.int16, torch.uint16):
        lo, *moments = states
        m, v = decode(moments)
        p, m, v = adamw(join(weight, lo), m, v, gradient, k)
        hi, lo = split(p)
        return hi.view(weight.dtype), (lo, *encode(m, v, moments, noise))
    if weight.dtype == torch.float32:
        m, v = decode(states)
        p, m, v = adamw(weight, m, v, gradient, k)
        return p, encode(m, v, states, noise)
    if weight.dtype == torch.float16:
        p, *moments = states
        m, v = decode(moments)
        p, m, v = adamw(p, m, v, gradient, k)
        return p.to(torch.float16), (p, *encode(m, v, moments, noise))
    raise ConfigError(f"update: weight must be bfloat16, float32 or float16, found {weight.dtype}")


def decode(moments: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the fp32 `(m, v)` that the state planes of the moments stand for."""
    m, v, *units = moments
    if m.dtype == torch.float32:
        return m, v
    if not units:
        return _from_bfloat16(m), _from_bfloat16(v)
    m_unit, v_unit = (_by_block(unit, m.numel()) for unit in units)
    code = m.to(torch.float32)
    root = v.to(torch.float32)
    root = (root * root) * v_unit
    return (code * code.abs()) * m_unit, root * root


def encode(m: Tensor, v: Tensor, like: Sequence[Tensor], noise: Noise | None) -> tuple[Tensor, ...]:
    """Return the planes, of the types of `like`, that keep fp32 `m` and `v`: rounded at random, without bias."""
    if like[0].dtype == torch.float32:
        return m, v
    if noise is None:
        raise ConfigError("update: moments of fewer than 32 bits are rounded at random; say where the range lies")
    bits = _random_bits(noise, m)
    if like[0].dtype != torch.int8:
        return tuple(
            _to_bfloat16(moment, half).view(plane.dtype)
            for moment, half, plane in ((m, _upper(bits), like[0]), (v, _lower(bits), like[1]))
        )
    return _encode_int8(m, _root(v), bits)


def _encode_int8(m: Tensor, root: Tensor, bits: Tensor) -> tuple[Tensor, ...]:
    """Return codes and units: `kernels._encode_int8` says what they mean."""
    n = m.numel()
    largest_m, largest_root = _largest_of_blocks(m), _largest_of_blocks(root)
    m_unit = (largest_m * _fp32(1 / LARGEST_M**2)).masked_fill(largest_m < SMALLEST_M, 0.0)
    v_unit = largest_root * _fp32(1 / LARGEST_V**2)
    broken = ~(largest_m.isfinite() & largest_root.isfinite())
    m_inverse, v_inverse = (
        # A tensor of ones: torch makes a division of a number by a tensor a product with the inverse.
        _by_block((torch.ones_like(unit) / unit).masked_fill((unit == 0) | broken, 0.0), n)
        for unit in (m_unit, v_unit)
    )
    zero = _by_block(broken, n)
    value = (m.abs() * m_inverse).masked_fill(zero, 0.0)
    low = _root(value).floor().clamp_max(LARGEST_M - 1)
    below, above = low * low, (low + 1) * (low + 1)
    up = _as_fraction(_upper(bits)) * (above - below) < value - below
    code = low + up
    m_code = torch.where(m > 0, code, -code).to(torch.int8)
    value = (root * v_inverse).masked_fill(zero, 0.0)
    low = _root(value).floor().clamp_max(LARGEST_V - 1)
    below, above = low * low, (low + 1) * (low + 1)
    up = _as_fraction(_lower(bits)) * ((above - below) * (above + below)) < (value - below) * (value + below)
    v_code = torch.maximum(low + up, (value > 0).to(torch.float32)).to(torch.uint8)
    return m_code, v_code, *(unit.masked_fill(broken, float("nan")) for unit in (m_unit, v_unit))


def _largest_of_blocks(values: Tensor) -> Tensor:
    """Return the largest magnitude of each block, NaN where there is one."""
    padded = torch.nn.functional.pad(values.abs(), (0, -values.numel() % MOMENT_BLOCK_ELEMENTS))
    return padded.view(-1, MOMENT_BLOCK_ELEMENTS).amax(dim=1)


def _by_block(units: Tensor, num_elements: int) -> Tensor:
    """Return each block's number for each of its elements."""
    return units.repeat_interleave(MOMENT_BLOCK_ELEMENTS)[:num_elements]


def _fp32(value: float) -> float:
    """Return `value` rounded to fp32 once."""
    return float(torch.tensor(value, dtype=torch.float32))


def _random_bits(noise: Noise, like: Tensor) -> Tensor:
    """Return 32 random bits for each element as int32: `kernels._noise`. Products wrap around, as they do there."""
    value = torch.arange(like.numel(), dtype=torch.int32, device=like.device) + _signed(noise.first_element)
    value ^= _signed(noise.key)
    for shift, factor in NOISE_ROUNDS:
        value ^= _shifted(value, shift)
        value *= _signed(factor)
    return value ^ _shifted(value, NOISE_LAST_SHIFT)


def _signed(word: int) -> int:
    """Return the int32 that has the lower 32 bits of `word`."""
    return (word + (1 << 31)) % (1 << 32) - (1 << 31)


def _shifted(bits: Tensor, places: int) -> Tensor:
    """Return int32 `bits` shifted to the right, zeros coming in."""
    return (bits >> places) & ((1 << (32 - places)) - 1)


def _upper(bits: Tensor) -> Tensor:
    return _shifted(bits, 16)


def _lower(bits: Tensor) -> Tensor:
    return bits & 0xFFFF


def _as_fraction(half: Tensor) -> Tensor:
    """Return 16 random bits as a number inside (0, 1)."""
    return (half.to(torch.float32) + 0.5) * 2.0**-16


def _from_bfloat16(bits: Tensor) -> Tensor:
    return (bits.view(torch.int16).to(torch.int32) << 16).view(torch.float32)


def _to_bfloat16(values: Tensor, half: Tensor) -> Tensor:
    """Return bfloat16 bits (int16): 16 random bits are added below the last place, then cut off. NaN becomes the quiet NaN."""
    bits = values.view(torch.int32).masked_fill(values != values, _QUIET_NAN_BITS)
    return ((bits + half) >> 16).to(torch.int16)
