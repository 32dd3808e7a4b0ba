"""Learned projectors, as LSP-Offload has them (Chen et al., AAAI 2025, section 4.2): random positions, values by Adam.

The descent minimises the relative estimation error `||P P^T G Q Q^T - G|| / ||G||` on a sampled gradient. The gradients of the
values are written out by hand, so that no dense projector is made.
"""

import torch
from torch import Tensor

from headrace.update.projectors.projector import (
    Pair,
    Scattered,
    ScatteredKind,
    Sides,
    both,
    distinct_positions,
    random_signs,
)

_ITERATIONS, _RATE, _BETAS, _EPS = 100, 0.05, (0.9, 0.999), 1e-12


class LearnedKind(ScatteredKind):
    """Positions drawn without replacement; values begin as random signs, shrunk to their best scale, and descend from there."""

    name = "learned"

    def fit(
        self, gradient: Tensor, dimensions: Sides[int], nonzeros: int, generator: torch.Generator
    ) -> Sides[tuple[Tensor, Tensor | None]]:
        """Choose both sides for `gradient`: the best that a descent of a hundred steps meets."""
        stack, rows, columns = gradient.shape

        def drawn(rows: int, dimension: int | None) -> Scattered | None:
            if dimension is None:
                return None
            positions = distinct_positions(stack, rows, dimension, nonzeros, generator)
            values = random_signs(positions.shape, generator)
            return Scattered(values.to(gradient.device), positions.to(gradient.device), dimension)

        sides = Sides(drawn(rows, dimensions.left), drawn(columns, dimensions.right))
        sides = _best_scale(sides, gradient)
        sides = _descent(sides, gradient)
        return Sides(*(None if side is None else (side.values, side.positions) for side in sides))


def _best_scale(sides: Sides[Scattered], gradient: Tensor) -> Sides[Scattered]:
    """Return the projectors times that number with which the estimate of `gradient` is best."""
    pair = _pair(sides)
    estimate = pair.decompress(pair.compress(gradient))
    size = estimate.square().sum()
    factor = torch.where(size > 0, (estimate * gradient).sum() / size, torch.ones_like(size)).clamp_min(1e-6)
    number = sum(2 for side in sides if side is not None)
    return _with_values(sides, [side.values * factor ** (1 / number) for side in sides if side is not None])


def _descent(sides: Sides[Scattered], gradient: Tensor) -> Sides[Scattered]:
    """Return the best of the projectors that Adam meets, with a rate that falls as a cosine."""
    values = [side.values.clone() for side in sides if side is not None]
    first, second = ([torch.zeros_like(each) for each in values] for _ in range(2))
    best, least = sides, torch.full((), torch.inf, device=gradient.device, dtype=torch.float32)
    rate = _RATE / (values[0].shape[-1] ** 0.5) if values else 0.0
    for step in range(1, _ITERATIONS + 1 if values else 1):
        now = _with_values(sides, values)
        error, slopes = _slopes(now, gradient)
        if error < least:
            best, least = _with_values(sides, [each.clone() for each in values]), error
        turned = torch.cos(torch.tensor((step - 1) / _ITERATIONS * torch.pi, dtype=torch.float32)).item()
        scale = rate * 0.5 * (1 + turned)
        for value, m, v, slope in zip(values, first, second, slopes, strict=True):
            m.lerp_(slope, 1 - _BETAS[0])
            v.lerp_(slope.square(), 1 - _BETAS[1])
            corrected = v / (1 - _BETAS[1] ** step)
            value -= scale / (1 - _BETAS[0] ** step) * m / (corrected.sqrt_() + _EPS)
    return best


def _slopes(sides: Sides[Scattered], gradient: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the relative error, and the derivative of its square by each value of both sides."""
    pair = _pair(sides)
    core = pair.compress(gradient)
    off = pair.decompress(core).sub_(gradient)
    size = gradient.square().sum().clamp_min(torch.finfo(torch.float32).tiny)
    core_off = pair.compress(off)
    slopes = []
    if sides.left is not None:  # E Q K^T + G Q (P^T E Q)^T, where P has values
        dense = _right(pair, off) @ core.transpose(1, 2) + _right(pair, gradient) @ core_off.transpose(1, 2)
        slopes.append(2 / size * dense.gather(2, sides.left.positions))
    if sides.right is not None:  # E^T P K + G^T P (P^T E Q)
        dense = pair.left.reduce(off).transpose(1, 2) @ core + pair.left.reduce(gradient).transpose(1, 2) @ core_off
        slopes.append(2 / size * dense.gather(2, sides.right.positions))
    return (off.square().sum() / size).sqrt(), slopes


def _right(pair: Pair, matrices: Tensor) -> Tensor:
    return pair.right.reduce(matrices.transpose(1, 2)).transpose(1, 2)


def _pair(sides: Sides[Scattered]) -> Pair:
    return both(sides, lambda side: side)


def _with_values(sides: Sides[Scattered], values: list[Tensor]) -> Sides[Scattered]:
    """Return the same projectors with these values, those of the left side first where it has any."""
    rest = iter(values)
    return Sides(*(None if side is None else Scattered(next(rest), side.positions, side.dimension) for side in sides))
