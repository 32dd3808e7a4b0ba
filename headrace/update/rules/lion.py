"""Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", program 1), in fp32.

A step is the sign of an interpolation of momentum and gradient, so every element moves by the rate. Rates have to be 3 to 10
times smaller than AdamW's, and decays larger by as much. The momentum is interpolated after the step, with a decay of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from headrace.terms.layout import Plane, planes_with
from headrace.terms.options.declared import option
from headrace.terms.options.optimizer import Optimizer
from headrace.terms.options.option_kinds import Number
from headrace.terms.rule_figures import RuleFigures
from headrace.update.rules.loops import inlined
from headrace.update.rules.rule import ElementRule, StepScalars
from headrace.update.rules.tensors import Scalars, Updated

_MOMENTUM = Plane("momentum", "float32", 4)
# Bytes per element that torch's kernels read and write on a device, and the most that they allocate at once. Tests count both.
_DEVICE_TRAFFIC_BYTES = {"bfloat16": 252, "float32": 154, "float16": 166}
_TEMPORARY_BYTES = 32


@dataclass(frozen=True, kw_only=True)
class Lion(Optimizer):
    """Lion with decoupled weight decay: one fp32 state, 8 bytes per parameter with bfloat16 compute."""

    name: ClassVar[str] = "lion"
    is_offered: ClassVar[bool] = True
    gives_up: ClassVar[str] = (
        "every number moves by the same rate, whatever its gradient's size; rates must be 3 to 10 times smaller"
    )

    beta1: float = option(0.9, Number(0, 1, below=True), "Weight of the momentum in the sum whose sign is the step.")
    beta2: float = option(
        0.99,
        Number(0, 1, below=True),
        row="share of the momentum that stays in an update; 8 bytes per parameter. Rates must be 3 to 10 times smaller",
    )


@inlined
def _element(p: Any, gradient: Any, states: Any, scalars: Any) -> Any:
    """Return weight and momentum of one element after an update by `gradient`."""
    (m,) = states
    scale, decay, near, toward, keep, gain, rate = scalars
    g = gradient * scale
    ahead = m * near + g * toward
    kept = p * decay
    p_new = kept - rate if ahead > 0 else (kept + rate if ahead < 0 else kept)
    return p_new, (m * keep + g * gain,)


class LionRule(ElementRule):
    """Lion over the planes of one compute dtype: a pass moves 18 bytes per element with a 2-byte gradient, in 16-bit compute.

    Raises:
        ConfigError: there is no such compute dtype.
    """

    element = staticmethod(_element)

    def __init__(self, optimizer: Lion, compute_dtype: str) -> None:
        super().__init__(
            RuleFigures(
                name="Lion",
                planes=planes_with(compute_dtype, (_MOMENTUM,)),
                flops_per_element=10,
                temporary_bytes=_TEMPORARY_BYTES,
                device_traffic_bytes=_DEVICE_TRAFFIC_BYTES[compute_dtype],
            )
        )
        self._optimizer = optimizer

    def scalars(self, step: StepScalars, weight_decay: float, learning_rate_scale: float) -> Scalars:
        """Return scale, decay and so on, by the names in `_element`."""
        beta1, beta2 = self._optimizer.beta1, self._optimizer.beta2
        rate = step.learning_rate * learning_rate_scale
        return step.gradient_scale, 1.0 - rate * weight_decay, beta1, 1.0 - beta1, beta2, 1.0 - beta2, rate

    def on_tensors(self, p: Tensor, gradient: Tensor, states: Sequence[Tensor], scalars: Scalars) -> Updated:
        """Return the new fp32 weights and momentum: `_element` on tensors."""
        (m,) = states
        scale, decay, near, toward, keep, gain, rate = scalars
        g = gradient.to(torch.float32) * scale
        # A product with -1, 0 or 1 is exact, and NaN has no sign, as in `_element`. A temporary that is no longer needed is
        # freed before the next one is made.
        ahead = m * near + g * toward
        sign = (ahead > 0).to(torch.float32) - (ahead < 0).to(torch.float32)
        del ahead
        p = p * decay - sign * rate
        del sign
        return p, (m * keep + g * gain,)
