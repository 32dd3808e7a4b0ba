"""A wire for tests: each row of a block's matrices has one trained number, which is added to the whole row.

It is the smallest wire with a trained family of its own, like a subspace of gradients whose projector consists of ones.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from headrace.terms.layout import ParameterSpec, UnitLayout, lay_out, part
from headrace.update.wires.factors import Factors
from headrace.update.wires.wire import Catching, UnitGradients, Wire


class RowWire(Wire):
    """Trains a number for each row of the matrices of blocks, and the vectors of blocks as they are.

    `ends`: prologue and epilogue are trained in place, else frozen. `frozen`: blocks (from 1) of which nothing is trained.
    `by_factors`: the gradient of a matrix in a product is never made. The sum of dY^T X over the columns of X is computed from
    its factors as dY^T (X 1).
    """

    name = "number-of-rows"

    def __init__(self, *, ends: bool = True, frozen: tuple[int, ...] = (), by_factors: bool = False) -> None:
        self._ends, self._frozen, self._by_factors = ends, frozen, by_factors

    def trained(self, unit: int, layout: UnitLayout, *, is_block: bool) -> UnitLayout | None:
        """Return a layout with a number for each row of a block's matrices, and all of its vectors."""
        if not is_block:
            return layout if self._ends else None
        if unit in self._frozen:
            return None
        groups = [(group.learning_rate_scale, group.weight_decay) for group in layout.groups]
        rows = [(spec.name, spec.shape[:1], groups[spec.group]) for spec in layout.parameters]
        return lay_out(layout.name, rows, kinds=layout.kinds)

    @contextmanager
    def catch(self, unit: int, layout: UnitLayout, weights: Tensor, gradients: UnitGradients) -> Iterator[Catching]:
        """Sum each matrix's gradient over its columns."""

        def sink(spec: ParameterSpec, gradient: Tensor) -> None:
            gradients.add(spec.name, gradient.float().reshape(spec.shape[0], -1).sum(dim=1))

        if not self._by_factors:
            yield Catching(sink, lambda spec: True)
            return

        def take(name: str, outputs: Tensor, inputs: Tensor) -> None:
            gradients.add(name, outputs.float().T @ inputs.float().sum(dim=1))

        with Factors(layout, weights, take, {spec.name for spec in layout.parameters}):
            yield Catching(sink, lambda spec: len(spec.shape) == 1)

    def complete(self, unit: int, layout: UnitLayout, slot: Tensor, trained: UnitLayout, weights: Tensor) -> None:
        """Add its number to each row, in float32; copy vectors in."""
        super().complete(unit, layout, slot, trained, weights)
        for spec, own in zip(layout.parameters, trained.parameters, strict=True):
            if len(spec.shape) > 1:
                matrix = part(slot, spec).view(spec.shape[0], -1)
                matrix.copy_(matrix.float() + part(weights, own)[:, None])

    def making_bytes(self, layout: UnitLayout) -> int:
        """Return the bytes of the largest matrix in float32, twice."""
        return 8 * max(spec.num_elements for spec in layout.parameters)
