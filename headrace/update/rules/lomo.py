"""LOMO (Lv et al. 2023, "Full Parameter Fine-tuning for Large Language Models with Limited Resources"), in fp32.

Gradient descent that keeps nothing: no momentum, no moments, and no gradient beyond its unit's update. Decay is decoupled, as
in the authors' code: `p <- p (1 - lr wd) - lr g`. There are two differences from that code. The weights here are the upper half
of an fp32 master; only the other half is read and written besides. Theirs are rounded to 16 bits at each step, where most small
updates vanish. And one update follows all micro-batches of a step, not one each.

With `master=none` there is no other half here either. Weights are rounded at random without bias (`moments`), by the unit's
number, the update and the element's place. So a run that is resumed, or run again, gets the same bits.

If gradients are clipped to a global norm, their code takes two backward passes. Here a step runs again with the clip factor, if
its norm needed one (`RuleFigures.clips_by_rerun`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.machine.jit import compiled, full_width
from headrace.terms.errors import ConfigError
from headrace.terms.layout import planes_with
from headrace.terms.options.declared import option
from headrace.terms.options.optimizer import Optimizer
from headrace.terms.options.option_kinds import OneOf
from headrace.terms.rule_figures import RuleFigures
from headrace.update.rules.kernels import widened
from headrace.update.rules.loops import digest_of, inlined
from headrace.update.rules.moment_tensors import tensor_rounded_at_random
from headrace.update.rules.moments import rounded_at_random
from headrace.update.rules.rule import Chunk, ElementRule, StepScalars, Summing, noise_key
from headrace.update.rules.tensors import Noise, Scalars, Updated

# Bytes per element that torch's kernels read and write on a device, and the most that they allocate at once. Tests count both.
_DEVICE_TRAFFIC_BYTES = {"bfloat16": 152, "float32": 54, "float16": 66}
_TEMPORARY_BYTES = 26
_ROUNDED_TRAFFIC_BYTES, _ROUNDED_TEMPORARY_BYTES = 226, 26
_ROUNDED_CORE_RATE = 0.5


@dataclass(frozen=True, kw_only=True)
class Lomo(Optimizer):
    """LOMO: gradient descent without states, 4 bytes per parameter with bfloat16 compute."""

    name: ClassVar[str] = "lomo"
    is_offered: ClassVar[bool] = True
    gives_up: ClassVar[str] = (
        "gradient descent: no momentum, no rate of its own for each number; a clipped step takes the time of two"
    )

    master: str = option(
        "float32",
        OneOf(("float32", "none")),
        row="`none`: bfloat16 weights have no master, 2 bytes per parameter instead of 4; they are rounded at random",
    )


@inlined
def _element(p: Any, gradient: Any, states: Any, scalars: Any) -> Any:
    """Return the weight of one element after an update by `gradient`."""
    scale, decay, rate = scalars
    return p * decay - (gradient * scale) * rate, states


def lomo_rule(optimizer: Lomo, compute_dtype: str) -> ElementRule:
    """Return LOMO as `optimizer` says: with the whole master, or without what bfloat16 weights leave of it.

    Raises:
        ConfigError: there is no such compute dtype, or no such weights can be rounded at random.
    """
    if optimizer.master == "none" and compute_dtype == "float16":
        raise ConfigError(
            "optimizer: lomo: master=none can round bfloat16 weights at random, but not float16: use bfloat16, or lomo"
        )
    return (RoundedLomoRule if optimizer.master == "none" and compute_dtype == "bfloat16" else LomoRule)(
        optimizer, compute_dtype
    )


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

    def scalars(self, step: StepScalars, weight_decay: float, learning_rate_scale: float) -> Scalars:
        """Return scale, decay and rate, by the names in `_element`."""
        rate = step.learning_rate * learning_rate_scale
        return step.gradient_scale, 1.0 - rate * weight_decay, rate

    def on_tensors(self, p: Tensor, gradient: Tensor, states: Sequence[Tensor], scalars: Scalars) -> Updated:
        """Return the new fp32 weights: `_element` on tensors."""
        scale, decay, rate = scalars
        return p * decay - (gradient.to(torch.float32) * scale) * rate, ()


class RoundedLomoRule(LomoRule):
    """LOMO over bfloat16 weights alone, which each update rounds at random: 6 bytes per element with a 2-byte gradient."""

    def __init__(self, optimizer: Lomo, compute_dtype: str) -> None:
        super().__init__(optimizer, compute_dtype)
        figures = replace(
            self.figures,
            name="LOMO without a master",
            planes=replace(self.planes, states=()),
            core_rate=_ROUNDED_CORE_RATE,
            temporary_bytes=_ROUNDED_TEMPORARY_BYTES,
            device_traffic_bytes=_ROUNDED_TRAFFIC_BYTES,
        )
        ElementRule.__init__(self, figures)

    @property
    def sums(self) -> bool:
        """Whether checksums are taken on the way: they are not, the store takes them."""
        return False

    def apply(
        self,
        chunk: Chunk[NDArray[Any]],
        step: StepScalars,
        weight_decay: float,
        learning_rate_scale: float,
        summing: Summing | None = None,
    ) -> None:
        """Update a chunk in place: see `UpdateRule.apply`."""
        weight, gradient = chunk.weight, chunk.gradient
        self._check(weight, chunk.states, gradient)
        if summing is not None:
            self._check_sums((weight,))
        scalars = np.array(self.scalars(step, weight_decay, learning_rate_scale), np.float32)
        of_gradient = gradient.view("int16") if gradient.dtype.name == "float16" else gradient
        key = np.uint32(noise_key(step.update, chunk.unit))
        _rounding_loop()(of_gradient, scalars, chunk.first_element, key, weight)

    @torch.no_grad()
    def apply_to_tensors(
        self, chunk: Chunk[Tensor], step: StepScalars, weight_decay: float, learning_rate_scale: float
    ) -> None:
        """Update a chunk in place: see `UpdateRule.apply_to_tensors`."""
        weight, gradient = chunk.weight, chunk.gradient
        self._check_tensors(weight, chunk.states, gradient)
        scalars = np.array(self.scalars(step, weight_decay, learning_rate_scale), np.float32).tolist()
        p, _ = self.on_tensors(weight.view(torch.bfloat16).to(torch.float32), gradient, (), scalars)
        noise = Noise(noise_key(step.update, chunk.unit), chunk.first_element)
        weight.copy_(tensor_rounded_at_random(p, noise).view(weight.dtype))


@cache
def _rounding_loop() -> Callable[..., None]:
    """Return `loop(gradient, k, first, key, hi)`, which updates bfloat16 bits in place; `first` numbers the first element."""
    digest = digest_of(_element, rounded_at_random)

    @compiled
    def loop(gradient: Any, k: Any, first: Any, key: Any, hi: Any) -> None:
        full_width()
        _ = digest
        scalars = (k[0], k[1], k[2])
        for i in range(hi.size):
            p, _none = _element(widened(hi[i]), widened(gradient[i]), (), scalars)
            hi[i] = rounded_at_random(p, first + i, key)

    return loop
