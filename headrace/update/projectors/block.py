"""Projectors of blocks, in closed form: rows are grouped, and each group gets the leading singular vectors of a sample.

The rows of a side are cut into d/r groups of neighbours, as equal as can be. Each group has r columns of its own: the r
directions in which its rows of the gradient vary most, by the eigenvectors of a small Gram matrix. P and Q take turns, each on
what the other leaves. So the columns are orthonormal, and products are many small ones of one shape.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from headrace.update.projectors.projector import Projector, Sides, both, smaller

# After P has been chosen for the whole gradient: Q for what P leaves, then P for what Q leaves; more turns gain nothing.
_TURNS = 2


@dataclass(frozen=True, slots=True)
class GroupProjector:
    """A projector of groups of rows. `values` (stack, rows, r) are each row's numbers in the columns of its group."""

    values: Tensor
    dimension: int

    def reduce(self, matrices: Tensor) -> Tensor:
        """Return `P^T` times `matrices`."""
        stack, _, nonzeros = self.values.shape
        groups = self.dimension // nonzeros
        product = in_groups(self.values, groups).transpose(1, 2) @ in_groups(matrices, groups)
        return product.view(stack, self.dimension, matrices.shape[2])

    def expand(self, matrices: Tensor) -> Tensor:
        """Return `P` times `matrices`."""
        stack, rows, nonzeros = self.values.shape
        groups = self.dimension // nonzeros
        product = in_groups(self.values, groups) @ matrices.reshape(stack * groups, nonzeros, matrices.shape[2])
        return _out_of_groups(product, stack, groups, rows)


class BlockKind:
    """Groups of neighbouring rows, each with the directions in which it varies most."""

    name = "block"
    keeps_positions = False

    def dimension(self, side: int, dimension: int) -> int | None:
        """Return the dimension for a side; None for one that is no larger."""
        return smaller(side, dimension)

    def projector(self, values: Tensor, positions: Tensor | None, dimension: int) -> Projector:
        """Return the projector of these values."""
        return GroupProjector(values, dimension)

    def fit(
        self, gradient: Tensor, dimensions: Sides[int], nonzeros: int, generator: torch.Generator
    ) -> Sides[tuple[Tensor, Tensor | None]]:
        """Choose both sides for `gradient`, in turns."""
        left = right = None
        for turn in range(1 + _TURNS):
            pair = both(Sides(None, None if right is None else (right, dimensions.right)), _groups)
            if dimensions.left is not None and (turn == 0 or dimensions.right is not None):
                left = _leading(pair.right.reduce(gradient.transpose(1, 2)).transpose(1, 2), dimensions.left, nonzeros)
            if dimensions.right is not None and turn < _TURNS and (right is None or dimensions.left is not None):
                pair = both(Sides(None if left is None else (left, dimensions.left), None), _groups)
                right = _leading(pair.left.reduce(gradient).transpose(1, 2), dimensions.right, nonzeros)
        return Sides(None if left is None else (left, None), None if right is None else (right, None))


def _groups(side: tuple[Tensor, int | None]) -> Projector:
    values, dimension = side
    assert dimension is not None, "a side with values has a dimension"
    return GroupProjector(values, dimension)


def _leading(matrices: Tensor, dimension: int, nonzeros: int) -> Tensor:
    """Return values (stack, rows, r): the r directions with the largest share of `matrices`, for each group of rows."""
    stack, rows, _ = matrices.shape
    groups = dimension // nonzeros
    cut = in_groups(matrices, groups)
    gram = (cut @ cut.transpose(1, 2)).to("cpu", torch.float64)
    real = in_groups(torch.ones(stack, rows, 1, dtype=torch.float32), groups)[:, :, 0].double()
    # Padding rows come last, also behind directions in which nothing varies.
    mean = gram.diagonal(dim1=1, dim2=2).mean(dim=1, keepdim=True)
    gram.diagonal(dim1=1, dim2=2).sub_((1 - real) * (mean + 1))
    vectors = torch.linalg.eigh(gram).eigenvectors[:, :, -nonzeros:].to(matrices.device, torch.float32)
    return _out_of_groups(vectors, stack, groups, rows)


def in_groups(matrices: Tensor, groups: int) -> Tensor:
    """Return (stack, rows, k) as (stack * groups, rows of a group, k); the shorter groups are padded with rows of zeros."""
    stack, rows, columns = matrices.shape
    most = -(-rows // groups)
    if rows == most * groups:
        return matrices.reshape(stack * groups, most, columns)
    filled = matrices.new_zeros(stack, groups * most, columns)
    filled[:, _places(rows, groups).to(matrices.device)] = matrices
    return filled.view(stack * groups, most, columns)


def _out_of_groups(cut: Tensor, stack: int, groups: int, rows: int) -> Tensor:
    """Return (stack * groups, rows of a group, k) as (stack, rows, k), without padding."""
    most, columns = cut.shape[1:]
    whole = cut.reshape(stack, groups * most, columns)
    return whole if rows == groups * most else whole[:, _places(rows, groups).to(cut.device)]


def _places(rows: int, groups: int) -> Tensor:
    """Return the index of each row among those of padded groups. Group g begins at row `g * rows // groups`."""
    most = -(-rows // groups)
    borders = [group * rows // groups for group in range(groups + 1)]
    return torch.cat([torch.arange(stop - start) + group * most for group, (start, stop) in enumerate(pairwise(borders))])
