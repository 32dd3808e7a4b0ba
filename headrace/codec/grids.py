"""Grids: which values a code can hold, how a weight is rounded to one of them, and how a grid is fitted to weights.

A grid belongs to a *group* of columns of a row. The few numbers that distinguish one group's grid from another's (a scale, two
levels) are its *side*. Invariant: `values` gives exactly what the stored code decodes to, so that GPTQ corrects for the error
that compute will see.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from headrace.codec.row_pieces import on_all_cores

# Scales that are tried for a group, relative to the one that clips nothing; the smallest clips more than a third of the range.
_SHRINKS = tuple(1 - step / 40 for step in range(1, 16))
_LEAST_CODE, _MOST_CODE = -8, 7
_FACTORS = np.array([1.0, *_SHRINKS], np.float32)

# Rounds columns of float32 on a CPU: a block (rows, columns), the first and last column, sides, factor, codes and errors.
ColumnLoop = Callable[[Any, int, int, Any, Any, Any, Any], None]


class Grid(Protocol):
    """The values that a code can hold."""

    @property
    def name(self) -> str:
        """Its name, in messages."""

    @property
    def group(self) -> int | None:
        """Columns that share a side; None for all of a row."""

    @property
    def damping(self) -> float:
        """What is added to the diagonal of H in GPTQ, as a share of the diagonal's mean."""

    @property
    def tries(self) -> int:
        """Sides that `fit` tries for a group."""

    @property
    def loop(self) -> ColumnLoop | None:
        """The compiled loop that does what `round` and `values` do, column by column; None: there is none."""

    @property
    def by_column(self) -> bool:
        """Whether a side has a number for each column of its group, which alone counts for that column."""

    def fit(self, weights: Tensor, importance: Tensor) -> Tensor:
        """Return the sides (..., rows, n) for weights (..., rows, columns); errors count by `importance` (..., columns)."""

    def round(self, weights: Tensor, side: Tensor) -> Tensor:
        """Return the codes, of one dtype, of weights (..., rows, columns) under sides (..., rows, n)."""

    def values(self, codes: Tensor, side: Tensor) -> Tensor:
        """Return what codes (..., rows, columns) stand for, in the dtype of `side`."""


@dataclass(frozen=True)
class Int4Grid:
    """Sixteen symmetric steps: code u stands for (u - 8) times the group's scale.

    Scales and products are rounded to `stored`, the dtype in which both lie. The scale is searched: the largest weight of a
    group may be clipped where that makes the sum of squared errors smaller (Frantar et al. 2024, MARLIN, clip search).
    """

    group: int | None = 128
    stored: torch.dtype = torch.bfloat16
    name: str = "int4"
    damping: float = 0.01
    tries: int = 1 + len(_SHRINKS)
    by_column: bool = False

    def fit(self, weights: Tensor, importance: Tensor) -> Tensor:
        """Return the scales (..., rows, 1): the best of those tried."""
        if weights.device.type == "cpu" and weights.dtype == torch.float32 and self.stored in _IN_LOOPS:
            return self._fit_by_loop(weights, importance.expand(*weights.shape[:-2], weights.shape[-1]))
        largest = weights.abs().amax(dim=-1, keepdim=True) / _MOST_CODE
        best = self._stored_scale(largest)
        least = self._error(weights, best, importance)
        for shrink in _SHRINKS:
            scale = self._stored_scale(largest * shrink)
            error = self._error(weights, scale, importance)
            better = error < least
            best, least = torch.where(better, scale, best), torch.where(better, error, least)
        return best

    def round(self, weights: Tensor, side: Tensor) -> Tensor:
        """Return codes 0 to 15."""
        return ((weights / side).round_().clamp_(_LEAST_CODE, _MOST_CODE) - _LEAST_CODE).to(torch.uint8)

    def values(self, codes: Tensor, side: Tensor) -> Tensor:
        """Return (code - 8) times scale, rounded to the stored dtype."""
        return ((codes.to(side.dtype) + _LEAST_CODE) * side).to(self.stored).to(side.dtype)

    @property
    def loop(self) -> ColumnLoop | None:
        """The loop, where values are stored as it rounds them."""
        return partial(_int4_columns, self.stored == torch.bfloat16) if self.stored in _IN_LOOPS else None

    def _fit_by_loop(self, weights: Tensor, importance: Tensor) -> Tensor:
        from headrace.codec.rounding_loops import best_scales  # late: numba

        scales, narrow = torch.empty(weights.shape[:-1], dtype=torch.float32), self.stored == torch.bfloat16
        columns, least = weights.shape[-1], float(torch.finfo(self.stored).tiny)
        groups = [each.reshape(-1, *each.shape[-2:]) for each in (weights, importance[..., None, :], scales[..., None])]
        for own, counts, found in zip(*groups, strict=True):
            matrix, weighed, out = own.contiguous().numpy(), counts[0].contiguous().numpy(), found[:, 0].numpy()

            def work(start: int, stop: int, matrix: Any = matrix, weighed: Any = weighed, out: Any = out) -> None:
                best_scales(matrix[start:stop], weighed, _FACTORS, narrow, least, out[start:stop])

            on_all_cores(work, len(matrix), columns * self.tries)
        return scales[..., None]

    def _stored_scale(self, scale: Tensor) -> Tensor:
        # A group of zeros, or of numbers too small for a scale of this dtype, gets one: its codes are 8, which is zero.
        held = scale.to(self.stored).to(scale.dtype)
        return torch.where(held >= torch.finfo(self.stored).tiny, held, 1.0)

    def _error(self, weights: Tensor, scale: Tensor, importance: Tensor) -> Tensor:
        difference = (weights / scale).round_().clamp_(_LEAST_CODE, _MOST_CODE).mul_(scale).sub_(weights)
        return (difference.square_() * importance[..., None, :]).sum(dim=-1, keepdim=True)


_IN_LOOPS = frozenset((torch.bfloat16, torch.float32))


def _int4_columns(narrow: bool, block: Any, first: int, last: int, scales: Any, factor: Any, codes: Any, errors: Any) -> None:
    from headrace.codec.rounding_loops import int4_columns  # late: numba

    int4_columns(block, first, last, scales[:, 0], narrow, factor, codes, errors)


@dataclass(frozen=True)
class TernaryGrid:
    """Three levels for a row: its least weight, zero, its largest (Frantar and Alistarh 2023, QMoE, section 3).

    Nothing is clipped: the wide grid makes four of five weights zero, and the code is short because of the zeros. Codes are 0
    for zero, 1 for the least, 2 for the largest.
    """

    group: int | None = None
    name: str = "ternary"
    damping: float = 0.1
    tries: int = 1
    by_column: bool = False

    @property
    def loop(self) -> ColumnLoop:
        """The loop."""
        from headrace.codec.rounding_loops import ternary_columns  # late: numba

        return ternary_columns

    def fit(self, weights: Tensor, importance: Tensor) -> Tensor:
        """Return least and largest (..., rows, 2), with zero between them; -1 and 1 for a row of zeros."""
        held = weights.to(torch.bfloat16).to(weights.dtype)  # as levels are stored
        least, largest = held.amin(dim=-1).clamp(max=0), held.amax(dim=-1).clamp(min=0)
        empty = (least == 0) & (largest == 0)
        return torch.stack([torch.where(empty, -1.0, least), torch.where(empty, 1.0, largest)], dim=-1)

    def round(self, weights: Tensor, side: Tensor) -> Tensor:
        """Return codes 0 to 2. A level that is itself zero is never chosen: every zero is coded as 0."""
        least, largest = side[..., 0:1], side[..., 1:2]
        upper = ((weights > largest / 2) & (largest > 0)).to(torch.uint8) * 2
        return torch.where((weights < least / 2) & (least < 0), 1, upper).to(torch.uint8)

    def values(self, codes: Tensor, side: Tensor) -> Tensor:
        """Return the levels that codes stand for."""
        return torch.where(codes == 2, side[..., 1:2], torch.where(codes == 1, side[..., 0:1], 0.0))


@dataclass(frozen=True)
class PrunedGrid:
    """Zero for a share of the weights of a group of columns, and any bfloat16 for the others (Frantar and Alistarh 2023,
    SparseGPT, section 3). The mask is chosen for each group after the errors of the columns before it are made up for.

    Those become zero that cost least by themselves: w^2 / [H^-1]_jj, over all rows of the group together. Sides are the mask,
    one where a weight stays; codes are the weights.
    """

    group: int | None = 128
    zeros: float = 0.5
    name: str = "pruned"
    damping: float = 0.01
    tries: int = 1
    loop: ColumnLoop | None = None
    by_column: bool = True

    def fit(self, weights: Tensor, importance: Tensor) -> Tensor:
        """Return the mask, uint8 (..., rows, columns)."""
        costs = (weights.square() * importance[..., None, :]).flatten(-2)
        number = int(costs.shape[-1] * self.zeros)
        least = costs.argsort(dim=-1, stable=True)[..., :number]  # equal costs: the first
        return torch.ones_like(costs, dtype=torch.uint8).scatter_(-1, least, 0).view(weights.shape)

    def round(self, weights: Tensor, side: Tensor) -> Tensor:
        """Return the weights that stay, as bfloat16 holds them; zero for the others."""
        return torch.where(side > 0, weights.to(torch.bfloat16).to(weights.dtype), 0.0)

    def values(self, codes: Tensor, side: Tensor) -> Tensor:
        """Return the codes."""
        return codes
