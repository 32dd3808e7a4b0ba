"""GPTQ: round the columns of a matrix one after the other, and let the remaining columns make up for the error.

It minimises the error of products, ||(Q - W) X||^2 = trace (Q - W) H (Q - W)^T with H = X X^T (Frantar et al. 2023,
section 3). Matrices of one shape are rounded together: experts come by the hundred (QMoE, section 3.2).
Invariants: the result depends neither on the number of columns in a block nor on the other matrices of the batch. With H = I it
is plain rounding, bit for bit.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.codec.grids import ColumnLoop, Grid
from headrace.codec.row_pieces import on_all_cores

_BLOCK_COLUMNS = 128
_SQUARES_COLUMNS = 512
_LEAST_DAMPING = 1e-6


@dataclass(frozen=True)
class Rounded:
    """Matrices on a grid: codes (n, rows, columns), and sides (n, rows, groups, numbers) in the dtype of the weights.

    `failed` are the matrices whose H was not positive definite, which were rounded plainly.
    """

    grid: Grid
    codes: Tensor
    sides: Tensor
    failed: tuple[int, ...] = ()

    @property
    def values(self) -> Tensor:
        """The weights that the codes stand for, (n, rows, columns)."""
        num, rows, columns = self.codes.shape
        grouped = self.codes.view(num, rows, self.sides.shape[2], -1)
        return self.grid.values(grouped, self.sides).view(num, rows, columns)


def gptq(weights: Tensor, hessians: Tensor, grid: Grid, *, block_columns: int = _BLOCK_COLUMNS) -> Rounded:
    """Return `weights` (n, rows, columns) on `grid`, for products with inputs whose `hessians` are (n, columns, columns).

    Both are float32 or float64. The number of columns must be a multiple of the grid's group.
    """
    weights = weights.clone()
    columns = weights.shape[2]
    group = grid.group or columns
    if grid.group:  # so that a group is fitted after all corrections from columns before it
        block_columns = -(-max(block_columns, group) // group) * group
    factor, failed = inverse_factor(hessians, grid.damping)
    diagonal = factor.diagonal(dim1=-2, dim2=-1)
    importance = (diagonal.amin(dim=-1, keepdim=True) / diagonal) ** 2
    parts, sides = list[Tensor](), [] if grid.group else [grid.fit(weights, importance)]
    for start in range(0, columns, block_columns):
        stop = min(start + block_columns, columns)
        block, errors = weights[:, :, start:stop].clone(), torch.empty_like(weights[:, :, start:stop])
        within = factor[:, start:stop, start:stop].contiguous()
        for at in range(start, stop, group if grid.group else block_columns):
            part = slice(at - start, min(at - start + group, stop - start))
            if grid.group:
                sides.append(grid.fit(block[:, :, part], importance[:, at : at + group]))
            parts.append(_round_columns(grid, block, part, sides[-1], within, errors))
        weights[:, :, stop:] -= errors @ factor[:, start:stop, stop:]
    return Rounded(grid, torch.cat(parts, dim=2), torch.stack(sides, dim=2), failed)


def _round_columns(grid: Grid, block: Tensor, part: slice, side: Tensor, factor: Tensor, errors: Tensor) -> Tensor:
    """Round the columns `part` of a block (n, rows, columns) that have one `side`, correct the columns after each, note the
    `errors`, and return the codes. `factor` (n, columns, columns) is that of the block's columns.
    """
    if block.device.type == "cpu" and block.dtype == torch.float32 and grid.loop is not None:
        codes = torch.empty((*block.shape[:2], part.stop - part.start), dtype=torch.uint8)
        for each in range(len(block)):
            arrays = [tensor[each].numpy() for tensor in (block, side, factor, codes, errors)]
            _on_all_cores(grid.loop, part, *arrays)
        return codes
    found = []
    for at in range(part.start, part.stop):
        column, place = block[:, :, at : at + 1], at - part.start
        own = side[:, :, place : place + 1] if grid.by_column else side
        chosen = grid.round(column, own)
        found.append(chosen)
        row = factor[:, at, None, at:]
        error = (column - grid.values(chosen, own)) / row[:, :, :1]
        errors[:, :, at] = error[:, :, 0]
        block[:, :, at:] -= error * row
    return torch.cat(found, dim=2)


def _on_all_cores(loop: ColumnLoop, part: slice, block: Any, side: Any, factor: Any, codes: Any, errors: Any) -> None:
    def work(start: int, stop: int) -> None:
        rows = slice(start, stop)
        loop(block[rows], part.start, part.stop, side[rows], factor, codes[rows], errors[rows])

    on_all_cores(work, len(block), codes.shape[1] * block.shape[1] // 2)


def nearest(weights: Tensor, grid: Grid) -> Rounded:
    """Return `weights` (n, rows, columns) on `grid`, each rounded by itself."""
    num, rows, columns = weights.shape
    grouped = weights.view(num, rows, -1, grid.group or columns)
    groups = grouped.transpose(1, 2)  # a group's rows are fitted together
    sides = grid.fit(groups, torch.ones_like(groups[:, :, 0])).transpose(1, 2).contiguous()
    return Rounded(grid, grid.round(grouped, sides).reshape(weights.shape), sides)


def inverse_factor(hessians: Tensor, damping: float) -> tuple[Tensor, tuple[int, ...]]:
    """Return the upper Cholesky factors of the inverses of damped `hessians` (n, c, c), and which matrices have none.

    Those have the identity instead, with which GPTQ becomes plain rounding.
    """
    damped = hessians.clone()
    diagonal = damped.diagonal(dim1=-2, dim2=-1)
    diagonal += (damping * diagonal.mean(dim=-1, keepdim=True)).clamp(min=_LEAST_DAMPING)
    lower, wrong = torch.linalg.cholesky_ex(damped)
    del damped, diagonal  # of wide matrices each of these takes a large part of memory
    wrong = (wrong != 0) | ~lower.isfinite().all(dim=-1).all(dim=-1)
    _put_identity(lower, wrong)
    inverse = torch.cholesky_inverse(lower)
    del lower
    upper, again = torch.linalg.cholesky_ex(inverse, upper=True)
    del inverse
    again = (again != 0) | ~upper.isfinite().all(dim=-1).all(dim=-1)
    _put_identity(upper, wrong | again)
    return upper, tuple((wrong | again).nonzero().flatten().tolist())


def _put_identity(factors: Tensor, where: Tensor) -> None:
    if bool(where.any()):
        factors[where] = torch.eye(factors.shape[-1], dtype=factors.dtype, device=factors.device)


def product_errors(weights: Tensor, hessians: Tensor, *rounded: Tensor | Rounded) -> tuple[Tensor, ...]:
    """Return ||(Q - W) X||^2 / ||W X||^2 of each matrix, (n,) float64, for each Q in `rounded`; 0 for products of zero.

    Values of codes are there one after the other, for a moment each.
    """
    whole = _squares(weights, hessians)
    differences = ((each.values if isinstance(each, Rounded) else each) - weights for each in rounded)
    errors = (_squares(each, hessians).clamp(min=0) for each in differences)
    return tuple(torch.where(whole > 0, error / whole, 0.0) for error in errors)


def _squares(matrices: Tensor, hessians: Tensor) -> Tensor:
    """Return ||M X||^2 = trace M H M^T of each matrix, (n,) float64; of the symmetric H what lies above the diagonal, twice."""
    total = torch.zeros(len(matrices), dtype=torch.float64, device=matrices.device)
    memory = torch.empty_like(matrices).flatten()
    for start in range(0, matrices.shape[2], _SQUARES_COLUMNS):
        stop = start + _SQUARES_COLUMNS
        shape = (*matrices.shape[:2], matrices.shape[2] - start)
        products = memory[: math.prod(shape)].view(shape)
        torch.matmul(matrices[:, :, start:stop], hessians[:, start:stop, start:], out=products)
        products[:, :, _SQUARES_COLUMNS:] *= 2
        total += products.mul_(matrices[:, :, start:]).sum(dim=(-2, -1), dtype=torch.float64)
    return total
