"""Stochastic gradient descent with momentum (Sutskever et al. 2013), as `torch.optim.SGD` defines it, in fp32.

Decay is added to the gradient. The buffer is the sum of gradients, in which each step multiplies the past by the momentum; with
`nesterov` the step looks one momentum ahead. Buffers start at zero, so the first one is the gradient, as in torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from headrace.terms.errors import ConfigError
from headrace.terms.layout import Plane, planes_with
from headrace.terms.options.declared import option
from headrace.terms.options.optimizer import Optimizer
from headrace.terms.options.option_kinds import Flag, Number
from headrace.terms.rule_figures import RuleFigures
from headrace.update.rules.loops import inlined
from headrace.update.rules.rule import ElementRule, StepScalars
from headrace.update.rules.tensors import Scalars, Updated

_BUFFER = Plane("momentum", "float32", 4)
# Bytes per element that torch's kernels read and write on a device, and the most that they allocate at once. Tests count both.
_DEVICE_TRAFFIC_BYTES = {"bfloat16": 196, "float32": 98, "float16": 110}
_NESTEROV_TRAFFIC_BYTES = 20
_PLAIN_TRAFFIC_BYTES = {"bfloat16": 164, "float32": 66, "float16": 78}
_TEMPORARY_BYTES = 26


@dataclass(frozen=True, kw_only=True)
class SGD(Optimizer):
    """Stochastic gradient descent with momentum, the rule of `torch.optim.SGD`: decay is added to the gradient.

    It has one fp32 state, the momentum buffer: 8 bytes per parameter with bfloat16 compute. Without momentum there is none, and
    the 4 bytes of the master are all.
    """

    name: ClassVar[str] = "sgd"
    gives_up: ClassVar[str] = "no rate of its own for each number: language models learn slowly, and rates are hard to find"

    momentum: float = option(
        0.9,
        Number(0, 1, below=True),
        row="share of the sum of gradients that stays at each step; 8 bytes per parameter, or 4 with `momentum=0`",
    )
    nesterov: bool = option(False, Flag(), "Look one momentum ahead.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and not self.momentum:
            raise ConfigError("nesterov: looks ahead by the momentum, which is 0; give a momentum, or leave nesterov out")


@inlined
def _element(p: Any, gradient: Any, states: Any, scalars: Any) -> Any:
    """Return weight and momentum buffer of one element after an update by `gradient`."""
    (buffer,) = states
    scale, decay, momentum, ahead, rate = scalars
    g = gradient * scale + p * decay
    buffer_new = buffer * momentum + g
    step = g + buffer_new * momentum if ahead != 0 else buffer_new
    return p - step * rate, (buffer_new,)


@inlined
def _element_without_momentum(p: Any, gradient: Any, states: Any, scalars: Any) -> Any:
    """Return the weight of one element after an update by `gradient`."""
    scale, decay, rate = scalars
    return p - (gradient * scale + p * decay) * rate, states


def sgd_rule(optimizer: SGD, compute_dtype: str) -> ElementRule:
    """Return SGD as `optimizer` describes it: with a momentum buffer, or without any state.

    Raises:
        ConfigError: there is no such compute dtype.
    """
    return (SGDRule if optimizer.momentum else PlainSGDRule)(optimizer, compute_dtype)


class PlainSGDRule(ElementRule):
    """SGD without momentum, which keeps nothing but the master of the weights."""

    element = staticmethod(_element_without_momentum)

    def __init__(self, optimizer: SGD, compute_dtype: str) -> None:
        super().__init__(
            RuleFigures(
                name="SGD without momentum",
                planes=planes_with(compute_dtype, ()),
                flops_per_element=5,
                temporary_bytes=_TEMPORARY_BYTES,
                device_traffic_bytes=_PLAIN_TRAFFIC_BYTES[compute_dtype],
            )
        )

    def scalars(self, step: StepScalars, weight_decay: float, learning_rate_scale: float) -> Scalars:
        """Return scale, decay and rate, by the names in `_element_without_momentum`."""
        return step.gradient_scale, weight_decay, step.learning_rate * learning_rate_scale

    def on_tensors(self, p: Tensor, gradient: Tensor, states: Sequence[Tensor], scalars: Scalars) -> Updated:
        """Return the new fp32 weights: `_element_without_momentum` on tensors."""
        scale, decay, rate = scalars
        return p - (gradient.to(torch.float32) * scale + p * decay) * rate, ()


class SGDRule(ElementRule):
    """SGD with momentum over the planes of one compute dtype: a pass moves 18 bytes per element with a 2-byte gradient, 16-bit
    compute.

    Raises:
        ConfigError: there is no such compute dtype.
    """

    element = staticmethod(_element)

    def __init__(self, optimizer: SGD, compute_dtype: str) -> None:
        planes = planes_with(compute_dtype, (_BUFFER,))
        ahead = _NESTEROV_TRAFFIC_BYTES if optimizer.nesterov else 0
        super().__init__(
            RuleFigures(
                name="SGD with Nesterov's momentum" if optimizer.nesterov else "SGD",
                planes=planes,
                flops_per_element=9,
                temporary_bytes=_TEMPORARY_BYTES,
                device_traffic_bytes=_DEVICE_TRAFFIC_BYTES[compute_dtype] + ahead,
            )
        )
        self._optimizer = optimizer

    def scalars(self, step: StepScalars, weight_decay: float, learning_rate_scale: float) -> Scalars:
        """Return scale, decay and so on, by the names in `_element`."""
        ahead = 1.0 if self._optimizer.nesterov else 0.0
        rate = step.learning_rate * learning_rate_scale
        return step.gradient_scale, weight_decay, self._optimizer.momentum, ahead, rate

    def on_tensors(self, p: Tensor, gradient: Tensor, states: Sequence[Tensor], scalars: Scalars) -> Updated:
        """Return the new fp32 weights and buffer: `_element` on tensors."""
        (buffer,) = states
        scale, decay, momentum, ahead, rate = scalars
        g = gradient.to(torch.float32) * scale + p * decay
        buffer = buffer * momentum + g
        step = g + buffer * momentum if ahead else buffer
        return p - step * rate, (buffer,)
