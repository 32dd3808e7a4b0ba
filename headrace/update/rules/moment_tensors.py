"""Moments of 16 and 8 bits on tensors: the same bits as the compiled loops (`moments.py`) give."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.update.rules.moment_planes import (
    LARGEST_M,
    LARGEST_V,
    MOMENT_BLOCK_ELEMENTS,
    NOISE_LAST_SHIFT,
    NOISE_ROUNDS,
    SMALLEST_M,
)
from headrace.update.rules.tensors import Noise, root_of, rounded_bits


def decode_tensors_bfloat16(planes: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the fp32 moments of bfloat16 bits."""
    return tuple((bits.view(torch.int16).to(torch.int32) << 16).view(torch.float32) for bits in planes)


def encode_tensors_bfloat16(states: Sequence[Tensor], noise: Noise) -> tuple[Tensor, ...]:
    """Return bfloat16 bits (int16): 16 random bits are added below the last place, then cut off. NaN becomes the quiet NaN."""
    bits = _random_bits(noise, states[0])
    return tuple(_to_bfloat16(state, half) for state, half in zip(states, (_upper(bits), _lower(bits)), strict=True))


def tensor_rounded_at_random(values: Tensor, noise: Noise) -> Tensor:
    """Return bfloat16 bits (int16) of fp32 values: `rounded_at_random` of each."""
    return _to_bfloat16(values, _lower(_random_bits(noise, values)))


def decode_tensors_int8(planes: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the fp32 moments of codes and of their blocks' units."""
    m, v, *units = planes
    m_unit, v_unit = (_by_block(unit, m.numel()) for unit in units)
    code = m.to(torch.float32)
    root = v.to(torch.float32)
    root = (root * root) * v_unit
    return (code * code.abs()) * m_unit, root * root


def encode_tensors_int8(states: Sequence[Tensor], noise: Noise) -> tuple[Tensor, ...]:
    """Return the codes of fp32 moments, and their blocks' units: NaN where a block has a number that is not finite."""
    m, root = states[0], root_of(states[1])
    bits, n = _random_bits(noise, m), m.numel()
    largest_m, largest_root = _largest_of_blocks(m), _largest_of_blocks(root)
    m_unit = (largest_m * _fp32(1 / LARGEST_M**2)).masked_fill(largest_m < SMALLEST_M, 0.0)
    v_unit = largest_root * _fp32(1 / LARGEST_V**2)
    broken = ~(largest_m.isfinite() & largest_root.isfinite())
    m_inverse, v_inverse = (
        # A tensor of ones, because torch turns the division of a number by a tensor into a product with the inverse.
        _by_block((torch.ones_like(unit) / unit).masked_fill((unit == 0) | broken, 0.0), n)
        for unit in (m_unit, v_unit)
    )
    zero = _by_block(broken, n)
    value = (m.abs() * m_inverse).masked_fill(zero, 0.0)
    low = root_of(value).floor().clamp_max(LARGEST_M - 1)
    below, above = low * low, (low + 1) * (low + 1)
    up = _as_fraction(_upper(bits)) * (above - below) < value - below
    code = low + up
    m_code = torch.where(m > 0, code, -code).to(torch.int8)
    value = (root * v_inverse).masked_fill(zero, 0.0)
    low = root_of(value).floor().clamp_max(LARGEST_V - 1)
    below, above = low * low, (low + 1) * (low + 1)
    up = _as_fraction(_lower(bits)) * ((above - below) * (above + below)) < (value - below) * (value + below)
    v_code = torch.maximum(low + up, (value > 0).to(torch.float32)).to(torch.uint8)
    return m_code, v_code, *(unit.masked_fill(broken, float("nan")) for unit in (m_unit, v_unit))


def _largest_of_blocks(values: Tensor) -> Tensor:
    """Return the largest magnitude of each block, NaN where the block has one."""
    padded = torch.nn.functional.pad(values.abs(), (0, -values.numel() % MOMENT_BLOCK_ELEMENTS))
    return padded.view(-1, MOMENT_BLOCK_ELEMENTS).amax(dim=1)


def _by_block(units: Tensor, num_elements: int) -> Tensor:
    """Return for each element its block's number."""
    return units.repeat_interleave(MOMENT_BLOCK_ELEMENTS)[:num_elements]


def _fp32(value: float) -> float:
    """Return `value` rounded to fp32 once."""
    return float(torch.tensor(value, dtype=torch.float32))


def _random_bits(noise: Noise, like: Tensor) -> Tensor:
    """Return 32 random bits for each element as int32, as `_noise` does: products wrap around in both."""
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
    """Return int32 `bits` shifted to the right, filled up with zeros."""
    return (bits >> places) & ((1 << (32 - places)) - 1)


def _upper(bits: Tensor) -> Tensor:
    return _shifted(bits, 16)


def _lower(bits: Tensor) -> Tensor:
    return bits & 0xFFFF


def _as_fraction(half: Tensor) -> Tensor:
    """Return 16 random bits as a number inside (0, 1)."""
    return (half.to(torch.float32) + 0.5) * 2.0**-16


def _to_bfloat16(values: Tensor, half: Tensor) -> Tensor:
    return ((rounded_bits(values) + half) >> 16).to(torch.int16)
