"""Which matrices of a block are coded, in which groups their inputs are added up, and of how many tokens.

No architecture is named here. A matrix is coded if a trial saw it multiply, if it is stored as a separate matrix, and if the
code can hold its width. Routers are left alone: matrices with one row for each expert, or with few rows.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from headrace.codec import Grid
from headrace.codec.targets import Target
from headrace.compress.room import groups_of_sums
from headrace.model import WeightMap
from headrace.model.chain.caught import Matrix
from headrace.model.directory.matching import Piece
from headrace.model.stored.safetensors_file import WEIGHT_DTYPES, StoredTensor
from headrace.terms.layout import ParameterSpec

_LEAST_ROWS = 8
_STORED = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
# Experts with many tokens are given at most so many times the mean (QMoE, section 3.2).
_MOST_OF_MEAN = 4


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


def most_tokens(coded: Sequence[Coded], seen: Mapping[Matrix, int], tokens: int, looked_at: int) -> dict[str, int]:
    """Return by parameter for how many tokens an expert's inputs are added up, of the `tokens` that count. So many rows were
    `seen` of as many tokens as were `looked_at`.
    """
    most = {}
    for parameter in coded:
        if parameter.experts > 1:
            experts_of_a_token = sum(seen.get(matrix, 0) for matrix in parameter.matrices()) / looked_at
            most[parameter.spec.name] = math.ceil(_MOST_OF_MEAN * tokens * experts_of_a_token / parameter.experts)
    return most
