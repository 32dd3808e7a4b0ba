"""A wire for tests: each row of a block's matrices has one trained number, which is added to all of the row.

It is the smallest wire with a trained family of its own: what a subspace of gradients does, with a projector of ones.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from headrace.terms.layout import ParameterSpec, UnitLayout, lay_out
from headrace.update.wire import Caught, Gradients


class RowWire:
    """Trains a number for each row of the matrices of blocks, and vectors of blocks as they are.

    `ends`: prologue and epilogue are trained in place, else frozen. `frozen`: blocks (1 and up) of which nothing is trained.
    `by_factors`: the gradient of a matrix that is used in a product is never made: the sum of dY^T X over the columns of X is
    taken of its factors, dY^T (X 1).
    """

    name = "rows"

    def __init__(self, *, ends: bool = True, frozen: tuple[int, ...] = (), by_factors: bool = False) -> None:
        self._ends, self._frozen, self._by_factors = ends, frozen, by_factors

    def trained(self, unit: int, layout: UnitLayout, *, is_block: bool) -> UnitLayout | None:
        """Return a number for each row of a block's matrices, all of its vectors."""
        if not is_block:
            return layout if self._ends else None
        if unit in self._frozen:
            return None
        groups = [(group.learning_rate_scale, group.weight_decay) for group in layout.groups]
        return lay_out(layout.name, [(spec.name, spec.shape[:1], groups[spec.group]) for spec in layout.parameters])

    @contextmanager
    def catch(self, unit: int, layout: UnitLayout, weights: Tensor, gradients: Gradients) -> Iterator[Caught]:
        """Sum each matrix's gradient over its columns."""

        def sink(spec: ParameterSpec, gradient: Tensor) -> None:
            gradients.add(spec.name, gradient.float().reshape(spec.shape[0], -1).sum(dim=1))

        if not self._by_factors:
            yield Caught(sink, lambda spec: True)
            return
        with _Factors(layout, weights, gradients):
            yield Caught(sink, lambda spec: len(spec.shape) == 1)

    def first_weights(self, unit: int, layout: UnitLayout, trained: UnitLayout, weights: Tensor) -> Tensor:
        """Return zero for each row, and vectors as they are."""
        first = torch.zeros(trained.num_elements)
        for spec, own in zip(layout.parameters, trained.parameters, strict=True):
            if len(spec.shape) == 1:
                first[own.offset : own.offset + own.num_elements] = _part(weights, spec).float()
        return first

    def complete(self, unit: int, layout: UnitLayout, slot: Tensor, trained: UnitLayout, weights: Tensor) -> None:
        """Add to each row its number, in float32; put vectors in."""
        for spec, own in zip(layout.parameters, trained.parameters, strict=True):
            numbers, place = _part(weights, own), _part(slot, spec)
            if len(spec.shape) == 1:
                place.copy_(numbers)
            else:
                matrix = place.view(spec.shape[0], -1)
                matrix.copy_(matrix.float() + numbers[:, None])

    def making_bytes(self, layout: UnitLayout) -> int:
        """Return the bytes of the largest matrix in float32, twice."""
        return 8 * max(spec.num_elements for spec in layout.parameters)


class _Factors(TorchFunctionMode):
    """Puts a product in place of `linear`, whose matrix is known by where it lies, that needs no gradient of the matrix."""

    def __init__(self, layout: UnitLayout, weights: Tensor, gradients: Gradients) -> None:
        super().__init__()
        start, width = weights.data_ptr(), weights.element_size()
        self._specs = {start + spec.offset * width: spec for spec in layout.parameters if len(spec.shape) == 2}
        self._gradients = gradients

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        spec = self._specs.get(args[1].data_ptr()) if function is F.linear and torch.is_grad_enabled() else None
        if spec is None:
            return function(*args, **(kwargs or {}))
        bias = args[2] if len(args) > 2 else None
        return _Product.apply(args[0], args[1], bias, spec.name, self._gradients)  # type: ignore[no-untyped-call]


class _Product(torch.autograd.Function):
    """`linear` that gives the gradient of each row of its matrix, summed over the columns, to `gradients`."""

    @staticmethod
    def forward(context: Any, inputs: Tensor, matrix: Tensor, bias: Tensor | None, name: str, gradients: Gradients) -> Tensor:
        context.save_for_backward(inputs, matrix)
        context.name, context.gradients, context.biased = name, gradients, bias is not None
        return F.linear(inputs, matrix, bias)

    @staticmethod
    def backward(context: Any, *given: Tensor) -> Any:
        (outputs,) = given
        inputs, matrix = context.saved_tensors
        rows = outputs.reshape(-1, outputs.shape[-1]).float()
        context.gradients.add(context.name, rows.T @ inputs.reshape(-1, inputs.shape[-1]).float().sum(dim=1))
        of_bias = rows.sum(dim=0).to(outputs.dtype) if context.biased else None
        return outputs @ matrix, None, of_bias, None, None


def _part(flat: Tensor, spec: ParameterSpec) -> Tensor:
    return flat[spec.offset : spec.offset + spec.num_elements]
