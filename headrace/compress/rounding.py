"""How the matrices of a block are rounded, and how they are encoded. This module knows one block at a time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from headrace.codec import Rounded, gptq, nearest, product_errors
from headrace.codec.targets import Target
from headrace.compress.choosing import Coded
from headrace.model import WeightMap
from headrace.model.chain.caught import Caught, Matrix
from headrace.model.directory.importing import at_least_1d
from headrace.model.directory.matching import Piece
from headrace.model.stored.encoding import float32_of
from headrace.model.stored.safetensors_file import read_tensor_rows
from headrace.terms.sizes import MIB

# Float copies of a matrix while it is rounded (weights, rounded values, errors) and of H (with its damped copy and factors).
_COPIES = 5
# Codes wait for their lane as bytes; where there would be more, they are encoded at once.
_MOST_WAITING_BYTES = 64 * MIB


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
        self._waiting: list[tuple[Coded, Piece, torch.Tensor, torch.Tensor]] = []

    def round(self, parameter: Coded, matrices: Sequence[Matrix], caught: Caught) -> None:
        """Round `matrices` of `parameter` with the inputs that were `caught`."""
        rows, columns = parameter.shape
        bytes_of_one = 4 * _COPIES * (columns * columns + rows * columns)
        step = max(1, self._allowed_bytes // bytes_of_one)
        for start in range(0, len(matrices), step):
            self._round_some(parameter, matrices[start : start + step], caught)

    def encode(self) -> None:
        """Encode what was rounded since the last call."""
        waiting, self._waiting = self._waiting, []
        for parameter, piece, codes, sides in waiting:
            self.code.parts[piece.key] = self._target.parts(codes, sides, parameter.stored)

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
        columns = parameter.shape[1]
        sums = [
            own.hessian if own is not None and own.tokens else torch.eye(columns, device=device, dtype=torch.float32)
            for own in inputs
        ]
        hessians = torch.stack(sums) if len(sums) > 1 else sums[0][None]
        before = torch.stack(
            [stored_matrix(self._weights, parameter.pieces, parameter.shape, matrix.expert) for matrix in matrices]
        ).to(device)
        plainly = nearest(before, grid)
        rounded = gptq(before, hessians, grid)
        rounding, errors = product_errors(before, hessians, plainly, rounded)
        values = rounded.values
        for index, matrix in enumerate(matrices):
            own = inputs[index]
            expert = matrix.expert or 0
            tokens = own.tokens if own is not None else 0
            zeros = int((values[index] == 0).sum())
            failed = index in rounded.failed
            entry = (expert, tokens, float(errors[index]), float(rounding[index]), zeros, tokens == 0, failed)
            self._found.setdefault(matrix.name, []).append((*entry, matrix in caught.unsorted))
            self._parameters[matrix.name].put(matrix.expert, values[index])
        self._set_aside(parameter, matrices, rounded)

    def _set_aside(self, parameter: Coded, matrices: Sequence[Matrix], rounded: Rounded) -> None:
        for index, matrix in enumerate(matrices):
            for piece in parameter.pieces:
                if matrix.expert is None or piece.index[0] == matrix.expert:
                    rows = _within(piece)
                    codes, sides = rounded.codes[index][rows].cpu(), rounded.sides[index][rows].cpu()
                    self._waiting.append((parameter, piece, codes, sides))
        if sum(codes.numel() for _, _, codes, _ in self._waiting) > _MOST_WAITING_BYTES:
            self.encode()


def stored_matrix(weights: WeightMap, pieces: Sequence[Piece], shape: tuple[int, int], expert: int | None) -> torch.Tensor:
    """Return a matrix exactly as its `pieces` store it, float32 (rows, columns); `expert`: its number in a stack."""
    out = np.empty(shape, np.float32)
    for piece in pieces:
        if expert is None or piece.index[0] == expert:
            place = at_least_1d(out[_within(piece)])
            tensor = weights.checkpoint.tensors[piece.key]
            for start, stop, rows in read_tensor_rows(tensor):
                place[start:stop] = float32_of(rows, tensor.dtype)
    return torch.from_numpy(out)


def _within(piece: Piece) -> slice:
    """Return the rows of its matrix that a piece has."""
    last = piece.index[-1] if piece.index else slice(None)
    return last if isinstance(last, slice) else slice(None)
