"""Two rules that need more than one element at a time: one needs whole rows, one whole matrices. For tests, and as examples.

Both are SGD with momentum over a gradient that is scaled first. Each row is scaled to a root-mean-square of 1, or each matrix
to a norm of 1. Biases, norms and padding get plain SGD with momentum. `register` makes both rules known by name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from headrace.terms.options.declared import option
from headrace.terms.options.optimizer import Optimizer
from headrace.terms.options.option_kinds import Number
from headrace.terms.rule_figures import Grain, RuleFigures
from headrace.update.rules.rule import StepScalars
from headrace.update.rules.sgd import SGD, sgd_rule
from headrace.update.rules.table import RULES
from headrace.update.rules.tensor_rule import TensorRule, tree_sum
from headrace.update.rules.tensors import Scalars, Updated, root_of

_MOMENTUM = 0.9
# Bytes per element that torch's kernels read and write on a device (tests count them, and the temporaries).
_DEVICE_TRAFFIC_BYTES = {"bfloat16": 220, "float32": 122, "float16": 134}


@dataclass(frozen=True, kw_only=True)
class RowScaled(Optimizer):
    """SGD with momentum over gradients whose rows have a root-mean-square of 1."""

    name: ClassVar[str] = "row_scaled"
    floor: float = option(1e-30, Number(above=True), "What is added to the mean square, so that zero stays zero.")


@dataclass(frozen=True, kw_only=True)
class MatrixScaled(RowScaled):
    """SGD with momentum over gradients whose matrices have a norm of 1."""

    name: ClassVar[str] = "matrix_scaled"


class ScaledRule(TensorRule):
    """The rule of both: 18 bytes per element with a 2-byte gradient; it is the same on a device and on the host."""

    def __init__(self, optimizer: RowScaled, compute_dtype: str) -> None:
        alone = sgd_rule(SGD(momentum=_MOMENTUM), compute_dtype)
        by_matrix = isinstance(optimizer, MatrixScaled)
        figures = RuleFigures(
            name="matrix-scaled SGD" if by_matrix else "row-scaled SGD",
            planes=alone.planes,
            grain=Grain.MATRIX if by_matrix else Grain.ROWS,
            elementwise="embed",
            flops_per_element=12,
            core_rate=0.1,
            temporary_bytes=29,
            device_traffic_bytes=_DEVICE_TRAFFIC_BYTES[compute_dtype],
        )
        super().__init__(figures, alone)
        self._optimizer, self._by_matrix = optimizer, by_matrix

    def scalars(self, step: StepScalars, weight_decay: float, learning_rate_scale: float) -> Scalars:
        """Return scale, decay, momentum, rate and floor."""
        rate = step.learning_rate * learning_rate_scale
        return step.gradient_scale, weight_decay, _MOMENTUM, rate, self._optimizer.floor

    def on_items(self, p: Tensor, gradient: Tensor, states: Sequence[Tensor], scalars: Scalars) -> Updated:
        """Return the new weights and buffer."""
        (buffer,) = states
        scale, decay, momentum, rate, floor = scalars
        g = gradient * scale
        squares = tree_sum(g * g)
        if not self._by_matrix:
            squares = squares / torch.full_like(squares, g[0].numel())
        buffer = buffer * momentum + (g / root_of(squares + floor) + p * decay)
        return p - buffer * rate, (buffer,)


def register() -> None:
    """Make both rules known to `--optimizer`, in this process."""
    RULES.update({RowScaled: ScaledRule, MatrixScaled: ScaledRule})
