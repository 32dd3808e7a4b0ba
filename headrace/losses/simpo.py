"""Simple preference optimisation (Meng et al. 2024): means over tokens, and no reference."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from headrace.losses.dpo import smoothed
from headrace.losses.loss import Preference, difference
from headrace.terms.options.declared import option
from headrace.terms.options.option_kinds import Number


@dataclass(frozen=True, kw_only=True)
class Simpo(Preference):
    """Raises the chosen completion's mean log-probability over the rejected one's, by a margin."""

    name: ClassVar[str] = "simpo"

    beta: float = option(2.0, Number(0, above=True), row="scale of mean log-probabilities")
    gamma: float = option(0.5, Number(0), row="the margin that is asked for")

    def of_pairs(self, sums: Tensor, reference: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return losses and rewards: beta times the mean over tokens."""
        rewards = self.beta * sums / counts.clamp(min=1)
        return smoothed(difference(rewards) - self.gamma, 0.0), rewards
