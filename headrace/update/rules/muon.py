"""Muon (Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks") for the matrices of blocks, AdamW for
all else. That is embeddings, heads, norms, biases, and filters of one row or column.

    m <- m + (1 - momentum) (g - m);   u = g + momentum (m - g)   (Nesterov; else u = m)
    W <- W (1 - lr wd) - lr 0.2 sqrt(max(rows, columns)) NS(u)

NS brings the singular values of a matrix near 1. It takes five steps of Newton-Schulz, `X <- a X + (b G + c G G) X` with
`G = X X^T` and the published coefficients. The factor of the rate gives a step the root-mean-square of an AdamW step
(Liu et al. 2025, "Muon is scalable for LLM training", section 2.2). So one rate serves both. It is the same for a transposed
matrix, as NS itself is. It is `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`.

Operands of the products are rounded to bfloat16 and added up in float32, as published. A CPU multiplies them as float32
numbers, to the same roundings. Only the order of sums differs between two devices, so a run has its bits on one machine.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from headrace.terms.errors import ConfigError
from headrace.terms.layout import ItemRange, Plane, planes_with
from headrace.terms.options.declared import option
from headrace.terms.options.optimizer import Optimizer
from headrace.terms.options.option_kinds import Flag, Number
from headrace.terms.rule_figures import Grain, RuleFigures
from headrace.update.rules.adamw import AdamW, AdamWRule
from headrace.update.rules.rule import ElementRule, StepScalars
from headrace.update.rules.tensor_rule import TensorRule, tree_sum
from headrace.update.rules.tensors import Scalars, Updated, root_of, update_tensors

_STATES = (Plane("m", "float32", 4), Plane("v", "float32", 4, of="alone"))
_A, _B, _C = 3.4445, -4.7750, 2.0315
_STEPS = 5
_LEAST_NORM = 1e-7
_STEP_SIZE = 0.2  # the root-mean-square of AdamW's steps
# Parameters of units that are no blocks.
_ELEMENTWISE = r"^(prologue|epilogue)/"
# Per element: what torch's kernels read and write for matrices half as long again as wide, with float32 products (bfloat16:
# about two thirds). And the most that is allocated at once, by AdamW; Muon takes 26. Tests count.
_DEVICE_TRAFFIC_BYTES = {"bfloat16": 614, "float32": 516, "float16": 528}
_TEMPORARY_BYTES = 36
_FLOPS_PER_ELEMENT = 12
# Rate of a core in the passes beside the products, which are one operation each, as a share of the default rule's.
_CORE_RATE = 0.1


@dataclass(frozen=True, kw_only=True)
class Muon(Optimizer):
    """Muon: 8 bytes per parameter of blocks' matrices with bfloat16 compute, and 12 of all others."""

    name: ClassVar[str] = "muon"
    is_offered: ClassVar[bool] = True
    gives_up: ClassVar[str] = (
        "no second moments for matrices of blocks; steps are made orthogonal, which takes 20 to 30 operations for each "
        "number of a matrix's shorter side"
    )

    momentum: float = option(
        0.95,
        Number(0, 1, below=True),
        row="share of the momentum of blocks' matrices that stays in an update; 8 bytes per parameter",
    )
    nesterov: bool = option(True, Flag(), "Look one momentum ahead.")
    beta1: float = option(0.9, Number(0, 1, below=True), "Decay of the first moment of all else, which AdamW updates.")
    beta2: float = option(0.95, Number(0, 1, below=True), "Decay of the second moment of all else.")
    eps: float = option(1e-8, Number(above=True), "Number added to the root of the second moment of all else.")


class _AdamWOfTheRest(AdamWRule):
    """AdamW over Muon's planes: first moments lie where matrices have their momentum; no matrix has second moments."""

    def __init__(self, optimizer: Muon, compute_dtype: str) -> None:
        super().__init__(AdamW(beta1=optimizer.beta1, beta2=optimizer.beta2, eps=optimizer.eps), compute_dtype)
        ElementRule.__init__(self, replace(self.figures, planes=planes_with(compute_dtype, _STATES)))


class MuonRule(TensorRule):
    """Muon over the planes of one compute dtype.

    Cost beside one pass over the planes: five times 4 s^2 l + 2 s^3 operations for a matrix of sides s <= l.

    Raises:
        ConfigError: there is no such compute dtype.
    """

    def __init__(self, optimizer: Muon, compute_dtype: str) -> None:
        alone = _AdamWOfTheRest(optimizer, compute_dtype)
        figures = RuleFigures(
            name="Muon",
            planes=alone.planes,
            grain=Grain.MATRIX,
            elementwise=_ELEMENTWISE,
            only_matrices=True,
            flops_per_element=_FLOPS_PER_ELEMENT,
            gram_products=_STEPS,
            core_rate=_CORE_RATE,
            temporary_bytes=_TEMPORARY_BYTES,
            device_traffic_bytes=_DEVICE_TRAFFIC_BYTES[compute_dtype],
        )
        super().__init__(figures, alone)
        self._optimizer = optimizer

    def scalars(self, step: StepScalars, weight_decay: float, learning_rate_scale: float) -> Scalars:
        """Return scale of the gradient, decay, share of a gradient that enters the momentum, share looked ahead, and rate."""
        rate, momentum = step.learning_rate * learning_rate_scale, self._optimizer.momentum
        ahead = momentum if self._optimizer.nesterov else 1.0
        return step.gradient_scale, 1.0 - rate * weight_decay, 1.0 - momentum, ahead, rate

    def on_items(self, p: Tensor, gradient: Tensor, states: Sequence[Tensor], scalars: Scalars) -> Updated:  # pragma: no cover
        """Not used: `apply_to_items` takes one matrix after the other, its weights last, to take less memory."""
        raise ConfigError("Muon: has no form on several matrices at once")

    @torch.no_grad()
    def apply_to_items(
        self, weight: Tensor, states: tuple[Tensor, ...], gradient: Tensor, step: StepScalars, items: ItemRange
    ) -> None:
        """Update the matrices of `items` in place, one after the other: see `TensorRule.apply_to_items`."""
        self.refuse_parts(weight, items)
        shape = (-1, items.rows, items.columns)
        own = [state.view(shape) for state in states if state.numel()]  # no matrix has second moments
        *scalars, rate = self.scalars(step, items.weight_decay, items.learning_rate_scale)
        size = _STEP_SIZE * math.sqrt(max(items.rows, items.columns))
        scale, decay, toward, ahead, rate = np.array([*scalars, rate * size], np.float32).tolist()
        for p, g, *rest, m in zip(weight.view(shape), gradient.view(shape), *own, strict=True):
            moved = orthogonal(_looking_ahead(m, g.to(torch.float32) * scale, toward, ahead)).to(torch.float32).mul_(rate)
            new_weight, new_rest = update_tensors(p, rest, _step_by(moved, decay))
            p.copy_(new_weight)
            for state, new in zip(rest, new_rest, strict=True):
                state.copy_(new)


def _step_by(moved: Tensor, decay: float) -> Callable[[Tensor, Sequence[Tensor]], Updated]:
    """Return the update `p decay - moved` of a master `p`, for `update_tensors`."""
    return lambda p, _: (p * decay - moved, ())


def _looking_ahead(m: Tensor, g: Tensor, toward: float, ahead: float) -> Tensor:
    """Move the momentum `m` towards the gradient `g`, in place; return the matrix that is to be made orthogonal."""
    m += (g - m) * toward
    return g + (m - g) * ahead if ahead != 1.0 else m


def orthogonal(u: Tensor) -> Tensor:
    """Return `u` (rows, columns), float32, with its singular values brought near 1: 0.7 to 1.2, unless they are tiny.

    The result's numbers are rounded to bfloat16; its dtype is bfloat16, on a CPU float32.
    """
    kind = torch.float32 if u.device.type == "cpu" else torch.bfloat16

    def rounded(values: Tensor) -> Tensor:
        return values if values.dtype == torch.bfloat16 else values.copy_(values.to(torch.bfloat16))

    x = u.to(torch.bfloat16).to(torch.float32)
    norm = root_of(tree_sum((x * x).unsqueeze(0)).view(1)).to(torch.bfloat16).to(torch.float32)
    x = rounded((x / norm.clamp(min=_LEAST_NORM).expand_as(x)).to(kind))
    x = x.mT if u.shape[0] > u.shape[1] else x
    for _ in range(_STEPS):
        gram = rounded(x @ x.mT)
        step = rounded(torch.addmm(gram, gram, gram, beta=_B, alpha=_C))
        del gram
        x = rounded(torch.addmm(x, step, x, beta=_A))
    return x.mT if u.shape[0] > u.shape[1] else x
