"""AdamW (Loshchilov & Hutter 2019, algorithm 2), as `torch.optim.AdamW` defines it, in fp32.

The three forms of the rule stand one below the other: its scalars, an element in a compiled loop, tensors. Every operation is
rounded once, so the last two give the same bits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from headrace.terms.layout import PlaneSet, planes_with
from headrace.terms.options.declared import option
from headrace.terms.options.optimizer import Optimizer
from headrace.terms.options.option_kinds import Number, OneOf
from headrace.terms.rule_figures import RuleFigures
from headrace.update.rules.loops import inlined
from headrace.update.rules.moment_planes import MOMENT_PLANES, MOMENTS, OTHER_NAMES
from headrace.update.rules.moments import MOMENT_CODES
from headrace.update.rules.rule import ElementRule, StepScalars
from headrace.update.rules.tensors import Scalars, Updated, root_of

# By kind of moments: the most bytes per element alive at once on a device beside the planes, and the rate of a core relative to
# float32 moments. Smaller moments move fewer bytes, but encoding them takes arithmetic.
_TEMPORARY_BYTES = {"float32": 36, "bfloat16": 48, "int8": 76}
_CORE_RATES = {"float32": 1.0, "bfloat16": 0.32, "int8": 0.14}
_DEVICE_TRAFFIC_BYTES = {"bfloat16": 316, "float32": 218, "float16": 230}
_FLOPS_PER_ELEMENT = 15


@dataclass(frozen=True, kw_only=True)
class AdamW(Optimizer):
    """AdamW with decoupled weight decay, the rule of `torch.optim.AdamW`; it is exact with float32 moments only."""

    name: ClassVar[str] = "adamw"

    beta1: float = option(0.9, Number(0, 1, below=True), "Decay of the first moment.")
    beta2: float = option(0.95, Number(0, 1, below=True), "Decay of the second moment.")
    eps: float = option(1e-8, Number(above=True), "Number added to the root of the second moment.")
    moments: str = option(
        "float32",
        OneOf(MOMENTS, OTHER_NAMES),
        row="how moments are kept: `bfloat16` or `int8` (in blocks of 256) take 8 or 6 bytes per parameter instead of 12. "
        "They are rounded at random, so it is not exact AdamW",
    )

    def smaller(self) -> tuple[str, Optimizer] | None:
        """Return AdamW with 8-bit moments, if it has larger ones."""
        if self.moments == "int8":
            return None
        bits = {"float32": 32, "bfloat16": 16}[self.moments]
        return f"moments of 8 bits instead of {bits} (rounded at random: not exact AdamW)", replace(self, moments="int8")


def adamw_planes(compute_dtype: str, moments: str = "float32") -> PlaneSet:
    """Return AdamW's planes of a compute dtype: 12 bytes per parameter for bfloat16 with float32 moments.

    Raises:
        ConfigError: there is no such compute dtype.
    """
    return planes_with(compute_dtype, MOMENT_PLANES[moments])


@inlined
def _element(p: Any, gradient: Any, states: Any, scalars: Any) -> Any:
    """Return weight and moments of one element after an update by `gradient`."""
    m, v = states
    scale, decay, toward, moment, keep, gain, rate, correction, eps = scalars
    g = gradient * scale
    m_new = (g if toward != 0 else m) + (g - m) * moment
    v_new = v * keep + (g * gain) * g
    return p * decay - (m_new * rate) / (np.sqrt(v_new) * correction + eps), (m_new, v_new)


class AdamWRule(ElementRule):
    """AdamW over the planes of one compute dtype, with moments kept as `optimizer` says.

    Moments of fewer than 32 bits take part in the update unrounded, and are then rounded at random, without bias.

    Cost: one pass; bfloat16 and float32 planes move 26 bytes per element with a 2-byte gradient, float16 planes 28. Checksums
    make the pass longer by a quarter (AMD) to more than half (Cascade Lake); a pass of their own would take twice that
    (bench/kernel.py).

    Raises:
        ConfigError: there is no such compute dtype.
    """

    element = staticmethod(_element)

    def __init__(self, optimizer: AdamW, compute_dtype: str) -> None:
        moments = optimizer.moments
        figures = RuleFigures(
            name="AdamW" if moments == "float32" else f"AdamW with {moments} moments",
            planes=adamw_planes(compute_dtype, moments),
            flops_per_element=_FLOPS_PER_ELEMENT,
            core_rate=_CORE_RATES[moments],
            temporary_bytes=_TEMPORARY_BYTES[moments],
            # A chunk goes to the device plane by plane, and smaller moments may share numbers within blocks.
            device_traffic_bytes=_DEVICE_TRAFFIC_BYTES[compute_dtype] if moments == "float32" else None,
        )
        super().__init__(figures, MOMENT_CODES[moments])
        self._optimizer = optimizer

    def scalars(self, step: StepScalars, weight_decay: float, learning_rate_scale: float) -> Scalars:
        """Return scale, decay and so on, by the names in `_element`.

        The first moment is interpolated from its nearer end, as `torch.lerp` does: with `beta1 = 0` it is the gradient itself.
        Torch divides by `sqrt(1 - beta2^step)`; the loop multiplies by its inverse. That saves a division, and torch on a GPU
        divides by a scalar in the same way.
        """
        beta1, beta2 = self._optimizer.beta1, self._optimizer.beta2
        learning_rate = step.learning_rate * learning_rate_scale
        toward = 1.0 - beta1
        near = toward < 0.5
        return (
            step.gradient_scale,
            1.0 - learning_rate * weight_decay,
            0.0 if near else 1.0,
            toward if near else -beta1,
            beta2,
            1.0 - beta2,
            learning_rate / (1.0 - beta1**step.update),
            1.0 / math.sqrt(1.0 - beta2**step.update),
            self._optimizer.eps,
        )

    def on_tensors(self, p: Tensor, gradient: Tensor, states: Sequence[Tensor], scalars: Scalars) -> Updated:
        """Return the new fp32 weights and moments: `_element` on tensors."""
        m, v = states
        scale, decay, toward, moment, keep, gain, rate, correction, eps = scalars
        g = gradient.to(torch.float32) * scale
        m = (g if toward else m) + (g - m) * moment
        v = v * keep + (g * gain) * g
        return p * decay - (m * rate) / (root_of(v) * correction + eps), (m, v)
