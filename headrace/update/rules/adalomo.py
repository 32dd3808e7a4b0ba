"""AdaLomo (Lv et al. 2023, "AdaLomo: Low-memory Optimization with Adaptive Learning Rate"): Adafactor without momentum, fused
with backward. Each matrix's step is normalised by itself, so that no global norm is needed.

The constants are those of the authors' code: `beta2 = 1 - t^-0.8` (0 at the first update), 1e-30 added to squares, a step's
root-mean-square bounded by 1. Rates and decays are multiplied by the root-mean-square of the weights, at least 1e-3. Its
mistakes are not copied. Here states are kept with the run and resumed, parameters of more than two dimensions are stacks of
matrices, and small updates are not rounded away.
"""

from dataclasses import dataclass
from typing import ClassVar

from headrace.terms.options.declared import option
from headrace.terms.options.optimizer import Optimizer
from headrace.terms.options.option_kinds import Number
from headrace.update.rules.factored import FactoredRule, Factoring, weight_of_newest

_ADDED, _WEIGHT_FLOOR = 1e-30, 1e-3


@dataclass(frozen=True, kw_only=True)
class AdaLomo(Optimizer):
    """AdaLomo: 4 bytes per parameter with bfloat16 compute, and 4 bytes for each row and column of a matrix."""

    name: ClassVar[str] = "adalomo"
    is_offered: ClassVar[bool] = True
    gives_up: ClassVar[str] = "no momentum, second moments for rows and columns alone; rates are relative to weights (try 5e-4)"

    decay_rate: float = option(0.8, Number(0, 1), "How fast running means of squares lengthen: beta2 is 1 - t^-rate.")
    threshold: float = option(
        1.0, Number(above=True), "Most root-mean-square of a matrix's step; larger steps are scaled down to it."
    )


class AdaLomoRule(FactoredRule):
    """AdaLomo over the planes of one compute dtype.

    Raises:
        ConfigError: there is no such compute dtype.
    """

    def __init__(self, optimizer: AdaLomo, compute_dtype: str) -> None:
        factoring = Factoring(added=_ADDED, threshold=optimizer.threshold, weight_floor=_WEIGHT_FLOOR, decay_follows=True)
        super().__init__("AdaLomo", compute_dtype, factoring)
        self._optimizer = optimizer

    def newest_and_rate(self, update: int, rate: float) -> tuple[float, float]:
        """Return the weight of the newest squares, and the rate."""
        return weight_of_newest(update, -self._optimizer.decay_rate), rate
