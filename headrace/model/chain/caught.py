"""The inputs of a block's matrices, caught at the products. The module that multiplies, and its name, do not matter.

A matrix is identified by where its weights lie. A parameter of two dimensions is one matrix; one of three (experts) has one in
each slice. Of the inputs X only the sum X^T X is kept, in float32. Tokens that do not count are left out of it. Experts get
some of the tokens only: their rows are those that were picked by indices most recently.
Invariant: what the block computes is not changed, until all that is wanted has been seen.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._C import _nn
from torch.overrides import TorchFunctionMode

from headrace.model.kernels.products import exact_in_narrow
from headrace.terms.errors import ModelError

_PRODUCTS = frozenset(
    {
        torch.matmul,
        torch.mm,
        torch.bmm,
        torch.Tensor.matmul,
        torch.Tensor.mm,
        torch.Tensor.bmm,
        torch.Tensor.__matmul__,
    }
)

# X^T X is symmetric: strips of so many rows are added up, each from its place on the diagonal on. Of 1536 columns that is three
# fifths of the work.
_STRIP = 256
# Inputs are filled up with rows of zeros to a multiple of this. Libraries keep machine code for each number of rows, a megabyte
# for a strip, and those of experts differ.
_ROWS = 256

Place = tuple[int, tuple[int, int]]


class Enough(Exception):
    """All inputs that are wanted of a micro-batch have been seen: what is left of its pass need not be computed."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix of a block: parameter `name` (as in the layouts), or its slice `expert`; (rows, columns) of `shape`."""

    name: str
    expert: int | None
    shape: tuple[int, int]


@dataclass(eq=False)
class Inputs:
    """What is known about the inputs of a matrix: X^T X (columns, columns) float32, and the number of tokens in it.

    `strips` has it from the diagonal on; below its square blocks there is anything.
    """

    strips: torch.Tensor
    tokens: int = 0

    def add(self, inputs: torch.Tensor) -> None:
        """Add up some `inputs` (tokens, columns)."""
        wide = inputs.new_zeros((-(-len(inputs) // _ROWS) * _ROWS, inputs.shape[1]), dtype=torch.float32)
        wide[: len(inputs)] = inputs
        with exact_in_narrow(inputs):
            for start in range(0, wide.shape[1], _STRIP):
                stop = start + _STRIP
                self.strips[start:stop, start:].addmm_(wide[:, start:stop].mT, wide[:, start:])
        self.tokens += len(inputs)

    @property
    def hessian(self) -> torch.Tensor:
        """The whole X^T X, which is completed in its place."""
        for start in range(_STRIP, len(self.strips), _STRIP):
            stop = start + _STRIP
            self.strips[start:stop, :start] = self.strips[:start, start:stop].mT
        return self.strips


@dataclass
class Caught:
    """The inputs of matrices, by matrix. In `unsorted` are matrices for which it was unknown which tokens count, so all did."""

    inputs: dict[Matrix, Inputs] = field(default_factory=dict)
    unsorted: set[Matrix] = field(default_factory=set)


def sum_operations(columns: int) -> float:
    """Return the operations that one token's inputs take in a sum."""
    return sum(2.0 * min(_STRIP, columns - start) * (columns - start) for start in range(0, columns, _STRIP))


def times_of_each_token(matrices: Collection[Matrix], seen: Mapping[Matrix, int], tokens: int) -> dict[Matrix, int]:
    """Return how often each of `matrices` multiplies every token, where so many rows were `seen` of so many `tokens`. It is
    empty where one multiplies some tokens only, as experts do.
    """
    if any(matrix.expert is not None or not seen.get(matrix) or seen[matrix] % tokens for matrix in matrices):
        return {}
    return {matrix: seen[matrix] // tokens for matrix in matrices}


def matrices_of(parameters: Mapping[str, nn.Parameter]) -> dict[Place, Matrix]:
    """Return the matrices among the bound `parameters` of a block, by where each begins and its shape."""
    found = {}
    for name, parameter in parameters.items():
        if parameter.dim() == 2:
            found[parameter.data_ptr(), _shape(parameter)] = Matrix(name, None, _shape(parameter))
        elif parameter.dim() == 3:
            for expert, part in enumerate(parameter.detach()):
                found[part.data_ptr(), _shape(part)] = Matrix(name, expert, _shape(part))
    return found


class CatchInputs(TorchFunctionMode):
    """While entered, adds up the inputs of those `matrices` (`matrices_of`) that are `wanted`, into `caught`.

    `begin` says which tokens of the next micro-batch count. A matrix that has its `most_tokens` gets no further ones. `times`
    says how often each of those that are wanted multiplies every token, if all do (`times_of_each_token`).

    Raises:
        Enough: each has multiplied every token of the micro-batch so often.
        ModelError: an input is not finite.
    """

    def __init__(
        self,
        matrices: Mapping[Place, Matrix],
        wanted: Collection[Matrix],
        most_tokens: Callable[[Matrix], int | None] = lambda matrix: None,
        times: Mapping[Matrix, int] | None = None,
    ) -> None:
        super().__init__()
        self.caught = Caught()
        self.seen: dict[Matrix, int] = {}  # how many rows each matrix has multiplied
        self._matrices, self.wanted, self._most_tokens = matrices, frozenset(wanted), most_tokens
        self._times = times or {}
        self._rows_left: dict[Matrix, int] = {}
        self._counts = torch.ones(0, dtype=torch.bool)
        self._picked: torch.Tensor | None = None
        # Several matrices often multiply the same tensor (queries, keys, values): they then share one sum.
        self._latest: tuple[torch.Tensor, Inputs] | None = None

    def of_rows(self, counts: torch.Tensor) -> "CatchInputs":
        """Return the same for one micro-batch, whose tokens count as `counts` says; what it catches is added here, too."""
        own = CatchInputs(self._matrices, self.wanted, self._most_tokens, self._times)
        own.caught, own.seen = self.caught, self.seen
        own.begin(counts)
        return own

    def begin(self, counts: torch.Tensor) -> None:
        """Take the next micro-batch: `counts` (b, T) bool, which of its tokens count."""
        self._counts, self._picked, self._latest = counts.flatten(), None, None
        self._rows_left = {matrix: times * counts.numel() for matrix, times in self._times.items()}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _nn.linear:
            weight = args[1] if len(args) > 1 else (kwargs or {})["weight"]
            if weight.dim() == 2:
                self._note_product(args[0] if args else (kwargs or {})["input"], weight)
        elif func in _PRODUCTS:
            self._note_transposed(*_operands(args, kwargs or {}))
        elif func in (torch.Tensor.__getitem__, torch.index_select, torch.Tensor.index_select):
            self._note_picked(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _note_product(self, inputs: torch.Tensor, weight: torch.Tensor) -> None:
        """Take `inputs` (..., columns) times the transpose of `weight` (rows, columns), if that is a matrix of the block."""
        matrix = self._matrices.get((weight.data_ptr(), _shape(weight)))
        if matrix is not None:
            rows = inputs.numel() // max(1, matrix.shape[1])
            self.seen[matrix] = self.seen.get(matrix, 0) + rows
            if matrix in self.wanted:
                self._add(matrix, inputs)
            if matrix in self._rows_left:
                self._rows_left[matrix] -= rows
                if all(left <= 0 for left in self._rows_left.values()):
                    raise Enough

    def _note_transposed(self, inputs: Any, other: Any) -> None:
        """Note a product with a matrix that was transposed before, or with a stack of such matrices.

        A matrix that is multiplied without being transposed has its inputs along its rows. Codes have groups along columns, so
        it is left out, and counts as not seen.
        """
        if not (isinstance(inputs, torch.Tensor) and isinstance(other, torch.Tensor)) or other.dim() not in (2, 3):
            return
        weight = other.detach().mT
        if not weight.is_contiguous() or inputs.dim() < 2:
            return
        if weight.dim() == 2:
            self._note_product(inputs, weight)
        elif (weight.data_ptr(), _shape(weight)) in self._matrices:
            for expert, part in enumerate(weight):
                self._note_product(inputs[expert] if inputs.dim() == 3 else inputs, part)

    def _note_picked(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Remember which tokens were picked, if the rows were picked among those of all tokens."""
        whole, index = args[0], args[1] if func is torch.Tensor.__getitem__ else kwargs.get("index", args[-1])
        index = index[0] if isinstance(index, tuple) and index else index
        picks = isinstance(index, torch.Tensor) and index.dtype == torch.int64 and index.dim() == 1
        if picks and whole.dim() == 2 and whole.shape[0] == self._counts.numel():
            self._picked = index

    def _add(self, matrix: Matrix, inputs: torch.Tensor) -> None:
        own = self.caught.inputs.get(matrix)
        if self._latest is not None and self._latest[0] is inputs and own in (None, self._latest[1]):
            self.caught.inputs[matrix] = self._latest[1]
            return
        flat = inputs.detach().reshape(-1, matrix.shape[1])
        chosen = self._choose(matrix, flat)
        if own is None:
            zeros = torch.zeros(matrix.shape[1], matrix.shape[1], device=flat.device, dtype=torch.float32)
            own = self.caught.inputs[matrix] = Inputs(zeros)
        most = self._most_tokens(matrix)
        if most is not None:
            chosen = chosen[: max(0, most - own.tokens)]
        own.add(chosen)
        self._latest = (inputs, own)
        if not bool(own.strips.diagonal().isfinite().all()):
            raise ModelError(
                f"{matrix.name}: an input of this matrix is not finite on the calibration data. The model overflows in this "
                "compute dtype, or its weights are damaged: try compute_dtype float32"
            )

    def _choose(self, matrix: Matrix, flat: torch.Tensor) -> torch.Tensor:
        """Return the rows of `flat` (rows, columns) that belong to tokens that count."""
        picked = self._picked
        if matrix.expert is not None and picked is not None and len(picked) == len(flat):
            return flat[self._counts[picked]]
        if len(flat) == self._counts.numel():
            return flat[self._counts]
        if picked is not None and len(picked) == len(flat):
            return flat[self._counts[picked]]
        self.caught.unsorted.add(matrix)
        return flat


def _operands(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    given = [*args, *kwargs.values()]
    return (given[0], given[1]) if len(given) > 1 else (None, None)


def _shape(tensor: torch.Tensor) -> tuple[int, int]:
    return int(tensor.shape[-2]), int(tensor.shape[-1])
