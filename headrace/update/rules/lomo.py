"""LOMO (Lv et al. 2023, "Full Parameter Fine-tuning for Large Language Models with Limited Resources"), in fp32.

Gradient descent that keeps nothing: no momentum, no moments, and no gradient beyond its unit's update. Decay is decoupled, as
in the authors' code: `p <- p (1 - lr wd) - lr g`. There are two differences from that code. The weights here are the upper half
of an fp32 master, and the other half is all that is read and written besides; theirs round to 16 bits at each step, where most
small updates vanish. And one update follows all micro-batches of a step, not one each.

Where gradients are clipped to a global norm, their code takes two backward passes; here a step is run again with the clip
factor, if its norm turned out to need one (`RuleFigures.clips_by_rerun`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from headrace.terms.layout import planes_with
from headrace.terms.optimizer import Optimizer
from headrace.terms.rule_figures import RuleFigures
from headrace.update.loops import inlined
from headrace.update.rule import ElementRule, StepScalars
from headrace.update.tensors import States

# Bytes per element that torch's kernels read and write on a device, and the most that they allocate at once. Tests count both.
_DEVICE_TRAFFIC_BYTES = {"bfloat16": 152, "float32": 54, "float16": 66}
_TEMPORARY_BYTES = 26


@dataclass(frozen=True, kw_only=True)
class Lomo(Optimizer):
    """LOMO: gradient descent without states, 4 bytes per parameter with bfloat16 compute."""

    name: ClassVar[str] = "lomo"
    is_offered: ClassVar[bool] = True
    gives_up: ClassVar[str] = "gradient descent: no momentum, no rate of its own for each number; a clipped step takes two"


@inlined
def _element(p: Any, gradient: Any, states: Any, scalars: Any) -> Any:
    """Return the weight of one element after an update by `gradient`."""
    scale, decay, rate = scalars
    return p * decay - (gradient * scale) * rate, states


class LomoRule(ElementRule):
    """LOMO over the planes of one compute dtype: a pass moves 10 bytes per element with a 2-byte gradient, in 16-bit compute.

    Raises:
        ConfigError: there is no such compute dtype.
    """

    element = staticmethod(_element)

    def __init__(self, optimizer: Lomo, compute_dtype: str) -> None:
        super().__init__(
            RuleFigures(
                name="LOMO",
                planes=planes_with(compute_dtype, ()),
                flops_per_element=4,
                temporary_bytes=_TEMPORARY_BYTES,
                device_traffic_bytes=_DEVICE_TRAFFIC_BYTES[compute_dtype],
                clips_by_rerun=True,
            )
        )

    def scalars(self, step: StepScalars, weight_decay: float, learning_rate_scale: float) -> tuple[float, ...]:
        """Return scale, decay and rate, by the names in `_element`."""
        rate = step.learning_rate * learning_rate_scale
        return step.gradient_scale, 1.0 - rate * weight_decay, rate

    def on_tensors(
        self, p: Tensor, gradient: Tensor, states: Sequence[Tensor], scalars: tuple[float, ...]
    ) -> tuple[Tensor, States]:
        """Return the new fp32 weights: `_element` on tensors."""
        scale, decay, rate = scalars
        return p * decay - (gradient.to(torch.float32) * scale) * rate, ()
