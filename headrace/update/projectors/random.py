"""Random projectors, never changed: a control. Averaged over draws the estimate is right, but it is very noisy."""

import torch
from torch import Tensor

from headrace.update.projectors.projector import ScatteredKind, Sides, distinct_positions, random_signs


class RandomKind(ScatteredKind):
    """Positions drawn without replacement, values `+-1/sqrt(r)`, which have a smaller error than Gaussian values."""

    name = "random"

    def fit(
        self, gradient: Tensor, dimensions: Sides[int], nonzeros: int, generator: torch.Generator
    ) -> Sides[tuple[Tensor, Tensor | None]]:
        """Draw both sides; only the shape of the gradient matters."""
        stack = gradient.shape[0]

        def side(rows: int, dimension: int | None) -> tuple[Tensor, Tensor | None] | None:
            if dimension is None:
                return None
            positions = distinct_positions(stack, rows, dimension, nonzeros, generator)
            values = random_signs(positions.shape, generator)
            return values.to(gradient.device), positions.to(gradient.device)

        return Sides(side(gradient.shape[1], dimensions.left), side(gradient.shape[2], dimensions.right))
