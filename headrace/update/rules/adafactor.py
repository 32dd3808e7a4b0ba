"""Adafactor (Shazeer & Stern 2018, algorithm 5 with decoupled decay), as `torch.optim.Adafactor` defines it, in fp32.

It has factored second moments and no momentum. The root-mean-square of a step is bounded. Its rate, `min(lr, 1/sqrt(t))`, is
multiplied by that of the weights. Two things differ from torch. Each matrix of a stack is treated by itself, with its own
scales. `eps1` has one value, fp32's epsilon, whatever the compute type.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from headrace.terms.options.declared import option
from headrace.terms.options.optimizer import Optimizer
from headrace.terms.options.option_kinds import Number
from headrace.update.rules.factored import FactoredRule, Factoring, weight_of_newest


@dataclass(frozen=True, kw_only=True)
class Adafactor(Optimizer):
    """Adafactor: 4 bytes per parameter with bfloat16 compute, and 4 bytes for each row and column of a matrix."""

    name: ClassVar[str] = "adafactor"
    gives_up: ClassVar[str] = "no momentum, second moments for rows and columns alone; rates are relative to weights (try 1e-2)"

    beta2_decay: float = option(-0.8, Number(-1, 0), "Running means of squares: the newest has the weight t to this power.")
    eps1: float = option(2.0**-23, Number(above=True), "The least mean of a row's moments; squared, the least moment.")
    eps2: float = option(1e-3, Number(above=True), "The least root-mean-square of weights by which a rate is multiplied.")
    d: float = option(1.0, Number(above=True), "Most root-mean-square of a matrix's step; larger steps are scaled down to it.")


class AdafactorRule(FactoredRule):
    """Adafactor over the planes of one compute dtype.

    Raises:
        ConfigError: there is no such compute dtype.
    """

    def __init__(self, optimizer: Adafactor, compute_dtype: str) -> None:
        factoring = Factoring(
            row_floor=optimizer.eps1,
            moment_floor=optimizer.eps1**2,
            threshold=optimizer.d,
            weight_floor=optimizer.eps2,
        )
        super().__init__("Adafactor", compute_dtype, factoring)
        self._optimizer = optimizer

    def newest_and_rate(self, update: int, rate: float) -> tuple[float, float]:
        """Return the weight of the newest squares, and the bounded rate."""
        return weight_of_newest(update, self._optimizer.beta2_decay), min(rate, 1.0 / math.sqrt(update))
