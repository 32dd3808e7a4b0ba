"""What a projector is: a tall matrix with a few non-zeros in each row, which maps one side of a matrix to fewer dimensions.

A gradient G (m, n) is compressed to `P^T G Q` (d, d), and the learned S is decompressed to `P S Q^T`. These are the (d,
r)-sparse projectors of LSP-Offload (Chen et al., AAAI 2025, section 4). Each row of P (m, d) and Q (n, d) has r non-zeros. All
tensors here are stacks of matrices, float32: each packed expert is one matrix, and a plain matrix is a stack of one.

Invariant: results depend on the arguments alone, the order of sums included, so that a repetition gives the same bits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from headrace.update.projectors.sparse import Csr, csr_times_dense

_T = TypeVar("_T")


class Projector(Protocol):
    """One side's projectors, for a stack of matrices."""

    def reduce(self, matrices: Tensor) -> Tensor:
        """Return `P^T` times `matrices`: (stack, rows, k) -> (stack, d, k)."""

    def expand(self, matrices: Tensor) -> Tensor:
        """Return `P` times `matrices`: (stack, d, k) -> (stack, rows, k)."""


class _Identity:
    """The projector of a side that is not larger than the subspace."""

    def reduce(self, matrices: Tensor) -> Tensor:
        return matrices

    def expand(self, matrices: Tensor) -> Tensor:
        return matrices


IDENTITY: Projector = _Identity()


class Pair(NamedTuple):
    """The projectors of both sides: `left` is P, `right` is Q."""

    left: Projector
    right: Projector

    def compress(self, gradient: Tensor) -> Tensor:
        """Return `P^T G Q`."""
        left = self.left.reduce(gradient)
        return self.right.reduce(left.transpose(1, 2)).transpose(1, 2)

    def compress_factors(self, outputs: Tensor, inputs: Tensor) -> Tensor:
        """Return `P^T G Q` of `G = dY^T X`, without making G: `outputs` are dY^T (stack, m, tokens), `inputs` X^T."""
        return self.left.reduce(outputs) @ self.right.reduce(inputs).transpose(1, 2)

    def decompress(self, subspace: Tensor) -> Tensor:
        """Return `P S Q^T`."""
        right = self.right.expand(subspace.transpose(1, 2))
        return self.left.expand(right.transpose(1, 2))

    def move(self, other: "Pair", moment: Tensor, *, square: bool) -> Tensor:
        """Return the counterpart of `moment` for gradients compressed by `other` instead of this pair: `A M B` with
        `A = P_new^T P_old` and `B = Q_old^T Q_new`. A second moment takes the squares of A and B, so that it stays >= 0.
        """
        rows, columns = _change(self.left, other.left, moment, 1), _change(self.right, other.right, moment, 2)
        if rows is not None:
            moment = (rows * rows if square else rows) @ moment
        if columns is not None:
            moment = moment @ (columns * columns if square else columns).transpose(1, 2)
        return moment


def _change(old: Projector, new: Projector, moment: Tensor, side: int) -> Tensor | None:
    """Return `new^T old`; None where neither projects."""
    if old is IDENTITY and new is IDENTITY:
        return None
    stack, size = moment.shape[0], moment.shape[side]
    basis = torch.eye(size, device=moment.device, dtype=torch.float32).expand(stack, size, size)
    return new.reduce(old.expand(basis))


def relative_error(pair: Pair, gradient: Tensor) -> Tensor:
    """Return `||P P^T G Q Q^T - G|| / ||G||` of a whole stack, in Frobenius norms; 0 for a gradient of zero."""
    norm = gradient.square().sum().sqrt()
    off = pair.decompress(pair.compress(gradient)).sub_(gradient).square_().sum().sqrt()
    return torch.where(norm > 0, off / norm, torch.zeros_like(norm))


class Sides(NamedTuple, Generic[_T]):
    """Something for each of both sides; None for a side that keeps the identity."""

    left: _T | None
    right: _T | None


class ProjectorKind(Protocol):
    """A way to choose projectors. One side has `nonzeros` numbers for each row of each matrix of the stack."""

    @property
    def name(self) -> str:
        """What `projector=` calls it."""

    @property
    def keeps_positions(self) -> bool:
        """Whether the places of non-zeros are kept beside their values; if not, they follow from the shape."""

    def dimension(self, side: int, dimension: int) -> int | None:
        """Return the dimension to which a side is reduced where `dimension` was asked for; None if it is left as it is."""

    def projector(self, values: Tensor, positions: Tensor | None, dimension: int) -> Projector:
        """Return the projector with these `values` (stack, rows, nonzeros), at columns `positions` (int64) of each row."""

    def fit(
        self, gradient: Tensor, dimensions: Sides[int], nonzeros: int, generator: torch.Generator
    ) -> Sides[tuple[Tensor, Tensor | None]]:
        """Return values and positions of both sides, None for a side whose dimension is None: it keeps the identity.

        `gradient` (stack, m, n) is a sample; all random numbers come from `generator`, which is on the CPU.
        """


def smaller(side: int, dimension: int) -> int | None:
    """Return `dimension` for a side that is larger than it, else None."""
    return dimension if 0 < dimension < side else None


@dataclass(frozen=True, slots=True)
class Scattered:
    """A projector with non-zeros anywhere: `values` (stack, rows, r) at the columns `positions`, which differ in each row.

    Its products are sparse: no dense projector is made, and sums have a fixed order.
    """

    values: Tensor
    positions: Tensor
    dimension: int

    def expand(self, matrices: Tensor) -> Tensor:
        """Return `P` times `matrices`."""
        stack, rows, nonzeros = self.values.shape
        begins = torch.arange(0, self.values.numel() + 1, nonzeros, device=self.values.device)
        product = csr_times_dense(Csr(self.values.reshape(-1), self._columns(), begins), matrices.flatten(0, 1))
        return product.view(stack, rows, matrices.shape[2])

    def reduce(self, matrices: Tensor) -> Tensor:
        """Return `P^T` times `matrices`."""
        stack, _, nonzeros = self.values.shape
        columns, order = torch.sort(self._columns(), stable=True)
        counts = torch.bincount(columns, minlength=stack * self.dimension)
        begins = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        transposed = Csr(self.values.reshape(-1)[order], order // nonzeros, begins)
        return csr_times_dense(transposed, matrices.flatten(0, 1)).view(stack, self.dimension, matrices.shape[2])

    def _columns(self) -> Tensor:
        """Return where the numbers are in the matrix that has those of the stack along its diagonal."""
        first = torch.arange(len(self.values), device=self.values.device)[:, None, None] * self.dimension
        return (self.positions + first).reshape(-1)


class ScatteredKind:
    """What all kinds of projectors with `r` non-zeros anywhere in a row have in common."""

    keeps_positions = True

    def dimension(self, side: int, dimension: int) -> int | None:
        """Return the dimension for a side; None for one that is no larger."""
        return smaller(side, dimension)

    def projector(self, values: Tensor, positions: Tensor | None, dimension: int) -> Projector:
        """Return the projector of these values."""
        assert positions is not None, "they are kept"
        return Scattered(values, positions, dimension)


def both(sides: Sides[_T], make: Callable[[_T], Projector]) -> Pair:
    """Return a pair: `make` makes a projector of each side, the identity stands for a side that is None."""
    left, right = (IDENTITY if side is None else make(side) for side in sides)
    return Pair(left, right)


def distinct_positions(stack: int, rows: int, dimension: int, nonzeros: int, generator: torch.Generator) -> Tensor:
    """Return `nonzeros` different columns for each row (stack, rows, nonzeros), each set as likely as any other."""
    drawn = torch.rand(stack * rows, dimension, generator=generator, dtype=torch.float32)
    return drawn.topk(nonzeros, dim=1).indices.view(stack, rows, nonzeros)


def random_signs(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return values of `1/sqrt(r)` with random signs, r for each row: so each row has length 1."""
    signs = torch.randint(0, 2, tuple(shape), generator=generator) * 2 - 1
    return signs.to(torch.float32) / float(shape[-1] ** 0.5)
