"""Which matrices of a block have subspaces, of which shapes, and where the numbers of their projectors lie in a basis."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from headrace.terms.layout import PARAMETER_ALIGNMENT, UnitLayout
from headrace.terms.sizes import round_up
from headrace.update.projectors import Pair, Projector, ProjectorKind
from headrace.update.projectors.projector import Sides, both

# Where no dimension is given, it is half of a side, rounded to a multiple of this.
_ROUNDED_TO = 64


@dataclass(frozen=True, slots=True)
class Subspace:
    """The subspace of one parameter: a stack of matrices (packed experts), or one.

    Attributes:
        stack, rows, columns: the parameter's shape; of more than two dimensions the last two are a matrix.
        dimensions: the subspace's; None for a side that is left as it is.
        offset: the first of its numbers in the unit's basis.
    """

    name: str
    stack: int
    rows: int
    columns: int
    dimensions: Sides[int]
    nonzeros: int
    lead: tuple[int, ...]
    offset: int

    @property
    def factor_name(self) -> str:
        """The name in the trained family of the factor by which the stored matrix is multiplied."""
        return f"{self.name}:factor"

    @property
    def matrices(self) -> tuple[int, int, int]:
        """The parameter's shape as a stack of matrices."""
        return self.stack, self.rows, self.columns

    @property
    def core(self) -> tuple[int, int, int]:
        """The shape of S, as a stack."""
        return self.stack, self.dimensions.left or self.rows, self.dimensions.right or self.columns

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of S, as a parameter."""
        return (*self.lead, *self.core[1:])

    def numbers(self, kind: ProjectorKind) -> dict[str, int]:
        """Return how many numbers of the basis each side has."""
        return {f"{self.name}:{side}": self._count(kind, rows) for side, rows, _ in self._sides()}

    def pair(self, kind: ProjectorKind, basis: Tensor) -> Pair:
        """Return the projectors whose numbers `basis` has."""

        def made(side: tuple[Tensor, Tensor | None, int]) -> Projector:
            return kind.projector(*side)

        sides = {name: (values, positions, dimension) for name, values, positions, dimension in self._read(kind, basis)}
        return both(Sides(sides.get("left"), sides.get("right")), made)

    def fit(self, kind: ProjectorKind, sample: Tensor, basis: Tensor, generator: torch.Generator) -> None:
        """Fit projectors to `sample` (a stack of gradients, float32), and write them into `basis`."""
        fitted = kind.fit(sample, self.dimensions, self.nonzeros, generator)
        found = {"left": fitted.left, "right": fitted.right}
        for name, values, positions, _ in self._read(kind, basis):
            side = found[name]
            assert side is not None, "a side that is brought to fewer dimensions has numbers"
            values.copy_(side[0])
            if positions is not None and side[1] is not None:
                positions.copy_(side[1])

    def copy(self, kind: ProjectorKind, basis: Tensor, into: Tensor) -> None:
        """Copy the numbers of this parameter from `basis` into another one."""
        place = self._place(kind)
        into[place].copy_(basis[place])

    def is_alike(self, kind: ProjectorKind, basis: Tensor, other: Tensor) -> bool:
        """Return whether two bases have the same projectors for this parameter, bit for bit."""
        place = self._place(kind)
        return torch.equal(basis[place].view(torch.int32), other[place].view(torch.int32))

    def _sides(self) -> Iterator[tuple[str, int, int]]:
        sides = (("left", self.rows, self.dimensions.left), ("right", self.columns, self.dimensions.right))
        yield from ((name, rows, dimension) for name, rows, dimension in sides if dimension is not None)

    def _count(self, kind: ProjectorKind, rows: int) -> int:
        return (2 if kind.keeps_positions else 1) * self.stack * rows * self.nonzeros

    def _place(self, kind: ProjectorKind) -> slice:
        return slice(self.offset, self.offset + basis_elements(self, kind))

    def _read(self, kind: ProjectorKind, basis: Tensor) -> Iterator[tuple[str, Tensor, Tensor | None, int]]:
        """Yield each side's values and positions, views of `basis` (positions as the bits of its numbers), and dimension."""
        start = self.offset
        for name, rows, dimension in self._sides():
            shape = self.stack, rows, self.nonzeros
            count = prod(shape)
            positions = basis[start + count : start + 2 * count].view(torch.int32).view(shape) if kind.keeps_positions else None
            yield name, basis[start : start + count].view(shape), positions, dimension
            start += round_up(self._count(kind, rows), PARAMETER_ALIGNMENT)


def basis_elements(subspace: Subspace, kind: ProjectorKind) -> int:
    """Return how many numbers of its unit's basis a parameter has, each side aligned as in `lay_out`."""
    return sum(round_up(count, PARAMETER_ALIGNMENT) for count in subspace.numbers(kind).values())


def half_and_quarter(layouts: Sequence[UnitLayout]) -> tuple[int, ...]:
    """Return the dimensions from which a plan chooses: half and a quarter of the commonest side of the blocks' matrices,
    rounded to multiples of 64. One dimension if both are the same, none if there are no matrices.
    """
    sides = Counter(side for layout in layouts for spec in layout.parameters if len(spec.shape) > 1 for side in spec.shape[-2:])
    if not sides:
        return ()
    commonest = sides.most_common(1)[0][0]
    return tuple(dict.fromkeys(_rounded(commonest / share) for share in (2, 4)))


def _rounded(side: float) -> int:
    return max(_ROUNDED_TO, round(side / _ROUNDED_TO) * _ROUNDED_TO)


def subspaces(layout: UnitLayout, dimension: int | None, nonzeros: int, kind: ProjectorKind) -> tuple[Subspace, ...]:
    """Return the subspaces of those matrices of a unit that have a side of more than `dimension`.

    If it is None, it is half of the commonest side of the unit's matrices, rounded to a multiple of 64.
    """
    if dimension is None:
        dimension = next(iter(half_and_quarter([layout])), 0)
    if not dimension:
        return ()
    dimension -= dimension % nonzeros  # in blocks, each group of rows has `nonzeros` columns
    found: list[Subspace] = []
    offset = 0
    for spec in layout.parameters:
        if not spec.is_matrix:
            continue
        rows, columns = spec.shape[-2:]
        own = Sides(kind.dimension(rows, dimension), kind.dimension(columns, dimension))
        if own == (None, None):
            continue
        lead = spec.shape[:-2]
        each = Subspace(spec.name, prod(lead), rows, columns, own, nonzeros, lead, offset)
        found.append(each)
        offset += basis_elements(each, kind)
    return tuple(found)
