"""Which matrices of a block are coded, and how they are rounded. This module knows one block at a time.

No architecture is named here. A matrix is coded if a trial saw it multiply, if it is stored as a separate matrix, and if the
code can hold its width. Routers are left alone: matrices with one row for each expert, or with few rows.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

import numpy as np
import torch

from headrace.codec import Grid, Rounded, gptq, nearest, product_errors
from headrace.codec.targets import Target
from headrace.compress.room import groups_of_sums
from headrace.model import WeightMap
from headrace.model.caught import Caught, Matrix
from headrace.model.encoding import float32_of
from headrace.model.importing import at_least_1d
from headrace.model.matching import Piece
from headrace.model.safetensors_file import WEIGHT_DTYPES, StoredTensor, read_rows
from headrace.terms.layout import ParameterSpec

_LEAST_ROWS = 8
_STORED = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
# Float copies of a matrix while it is rounded (weights, rounded values, errors) and of H (with its damped copy and factors).
_COPIES = 5


@dataclass(frozen=True, slots=True)
class Coded:
    """A parameter whose matrices are coded: `spec` as in the layout, its stored `pieces` and their dtype, and the grid."""

    spec: ParameterSpec
    pieces: tuple[Piece, ...]
    stored: torch.dtype
    grid: Grid

    @property
    def experts(self) -> int:
        """Number of its matrices."""
        return self.spec.shape[0] if len(self.spec.shape) == 3 else 1

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of each matrix."""
        return self.spec.shape[-2], self.spec.shape[-1]

    def matrices(self) -> Iterator[Matrix]:
        """Yield its matrices, in order."""
        for expert in range(self.experts):
            yield Matrix(self.spec.name, expert if len(self.spec.shape) == 3 else None, self.shape)


@dataclass(frozen=True, kw_only=True)
class ParameterReport:
    """What became of a parameter: relative errors of its products, ||(Q - W) X||^2 / ||W X||^2, averaged over its matrices.

    `plain` are matrices without tokens, `failed` those without a factor: both are rounded plainly. `zeros` is the share of
    weights that became zero. `unsorted`: it was unknown which tokens count, so all did.
    """

    name: str
    shape: tuple[int, ...]
    error: float
    rounding_error: float
    tokens: int
    zeros: float
    plain: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()
    unsorted: bool = False


@dataclass
class BlockCode:
    """The coded tensors of a block by stored name, and the report of each parameter. `groups` are the columns of a group, by
    parameter (0: whole rows).
    """

    parts: dict[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    groups: dict[str, int] = field(default_factory=dict)
    reports: list[ParameterReport] = field(default_factory=list)


def choose(
    weights: WeightMap, specs: Sequence[ParameterSpec], seen: Mapping[Matrix, int], target: Target, *, experts_only: bool
) -> tuple[list[Coded], dict[str, str]]:
    """Return the parameters of a block to code, and by name why other matrices are left."""
    multiplied = {matrix.name for matrix in seen}
    counts = {spec.shape[0] for spec in specs if len(spec.shape) == 3}
    # All matrices of experts have one size of groups, which readers of the formats expect.
    common = math.gcd(*(spec.shape[-1] for spec in specs if len(spec.shape) == 3))
    coded, left = [], {}
    for spec in specs:
        if len(spec.shape) not in (2, 3):
            continue
        reason = ""
        pieces = tuple(weights.pieces.get(spec.name, ()))
        stored = [weights.checkpoint.tensors[piece.key] for piece in pieces]
        if len(spec.shape) == 2 and (experts_only or spec.shape[0] in counts or spec.shape[0] < _LEAST_ROWS):
            reason = "no experts" if experts_only else "chooses among experts, or has few rows"
        elif not pieces or weights.copies.get(spec.name) or not all(_is_matrix(tensor) for tensor in stored):
            reason = "not stored as matrices of their own"
        elif spec.name not in multiplied:
            reason = "no product of it was seen"
        else:
            dtype = _STORED[stored[0].dtype]
            grid = target.grid(common if len(spec.shape) == 3 else spec.shape[-1], dtype)
            if grid is None:
                reason = f"the code takes no width of {spec.shape[-1]}"
            else:
                coded.append(Coded(spec, pieces, dtype, grid))
        if reason:
            left[spec.name] = reason
    return coded, left


def _is_matrix(stored: StoredTensor) -> bool:
    return len(stored.shape) == 2 and stored.dtype in WEIGHT_DTYPES and stored.key.endswith(".weight")


def catch_groups(coded: Sequence[Coded], allowed_bytes: int) -> list[list[Matrix]]:
    """Return the matrices in groups whose sums of inputs together fit into `allowed_bytes`; a single one may be larger."""
    matrices = [matrix for parameter in coded for matrix in parameter.matrices()]
    found = iter(matrices)
    sizes = groups_of_sums((4 * matrix.shape[1] ** 2 for matrix in matrices), allowed_bytes)
    return [list(islice(found, size)) for size in sizes]


class Rounding(Protocol):
    """Where the matrices of a parameter go once they are rounded."""

    device: torch.device

    def put(self, expert: int | None, values: torch.Tensor) -> None:
        """Take a rounded matrix, or one of a stack."""


class BlockRounder:
    """Rounds the matrices of one block, a group at a time, and puts the values of the codes in the place of its weights.

    `parameters` take these values, by name. `target` is the code; up to `allowed_bytes` may be allocated for a moment.
    """

    def __init__(
        self,
        weights: WeightMap,
        parameters: Mapping[str, "Rounding"],
        target: Target,
        allowed_bytes: int,
    ) -> None:
        self.code = BlockCode()
        self._weights, self._parameters, self._target = weights, parameters, target
        self._allowed_bytes = allowed_bytes
        self._found: dict[str, list[tuple[int, int, float, float, int, bool, bool, bool]]] = {}

    def round(self, parameter: Coded, matrices: Sequence[Matrix], caught: Caught) -> None:
        """Round `matrices` of `parameter` with the inputs that were `caught`."""
        rows, columns = parameter.shape
        bytes_of_one = 4 * _COPIES * (columns * columns + rows * columns)
        step = max(1, self._allowed_bytes // bytes_of_one)
        for start in range(0, len(matrices), step):
            self._round_some(parameter, matrices[start : start + step], caught)

    def finish(self, parameter: Coded) -> None:
        """Report on `parameter`, whose matrices have all been rounded."""
        found = sorted(self._found.pop(parameter.spec.name))
        several = len(parameter.spec.shape) == 3
        self.code.groups[parameter.spec.name] = parameter.grid.group or 0
        self.code.reports.append(
            ParameterReport(
                name=parameter.spec.name,
                shape=parameter.spec.shape,
                error=float(np.mean([each[2] for each in found])),
                rounding_error=float(np.mean([each[3] for each in found])),
                tokens=sum(each[1] for each in found),
                zeros=sum(each[4] for each in found) / parameter.spec.num_elements,
                plain=tuple(each[0] for each in found if each[5]) if several else (),
                failed=tuple(each[0] for each in found if each[6]),
                unsorted=any(each[7] for each in found),
            )
        )

    def _round_some(self, parameter: Coded, matrices: Sequence[Matrix], caught: Caught) -> None:
        grid = parameter.grid
        device = self._parameters[parameter.spec.name].device
        inputs = [caught.inputs.get(matrix) for matrix in matrices]
        identity = torch.eye(parameter.shape[1], device=device)
        sums = [own.hessian if own is not None and own.tokens else identity for own in inputs]
        hessians = torch.stack(sums)
        before = torch.stack(
            [stored_matrix(self._weights, parameter.pieces, parameter.shape, matrix.expert) for matrix in matrices]
        ).to(device)
        plainly = nearest(before, grid)
        rounded = gptq(before, hessians, grid)
        values = rounded.values
        rounding, errors = product_errors(before, hessians, plainly.values, values)
        for index, matrix in enumerate(matrices):
            own = inputs[index]
            expert = matrix.expert or 0
            tokens = own.tokens if own is not None else 0
            zeros = int((values[index] == 0).sum())
            failed = index in rounded.failed
            entry = (expert, tokens, float(errors[index]), float(rounding[index]), zeros, tokens == 0, failed)
            self._found.setdefault(matrix.name, []).append((*entry, matrix in caught.unsorted))
            self._parameters[matrix.name].put(matrix.expert, values[index])
        self._store(parameter, matrices, rounded)

    def _store(self, parameter: Coded, matrices: Sequence[Matrix], rounded: Rounded) -> None:
        for index, matrix in enumerate(matrices):
            for piece in parameter.pieces:
                if matrix.expert is None or piece.index[0] == matrix.expert:
                    rows = _within(piece)
                    codes, sides = rounded.codes[index][rows].cpu(), rounded.sides[index][rows].cpu()
                    self.code.parts[piece.key] = self._target.parts(codes, sides, parameter.stored)


def stored_matrix(weights: WeightMap, pieces: Sequence[Piece], shape: tuple[int, int], expert: int | None) -> torch.Tensor:
    """Return a matrix exactly as its `pieces` store it, float32 (rows, columns); `expert`: its number in a stack."""
    out = np.empty(shape, np.float32)
    for piece in pieces:
        if expert is None or piece.index[0] == expert:
            place = at_least_1d(out[_within(piece)])
            tensor = weights.checkpoint.tensors[piece.key]
            for start, stop, rows in read_rows(tensor):
                place[start:stop] = float32_of(rows, tensor.dtype)
    return torch.from_numpy(out)


def _within(piece: Piece) -> slice:
    """Return the rows of its matrix that a piece has."""
    last = piece.index[-1] if piece.index else slice(None)
    return last if isinstance(last, slice) else slice(None)
