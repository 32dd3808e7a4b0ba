"""Odds ratio preference optimisation (Hong et al. 2024): fine-tuning on what was chosen, and a ratio of odds beside it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from headrace.losses.loss import Preference, difference
from headrace.terms.options.declared import option
from headrace.terms.options.option_kinds import Number


@dataclass(frozen=True, kw_only=True)
class Orpo(Preference):
    """Fine-tunes on chosen texts, prompts included as in TRL, and raises their odds over those of rejected ones."""

    name: ClassVar[str] = "orpo"
    takes_prompts: ClassVar[bool] = True

    beta: float = option(0.1, Number(0, above=True), row="weight of the odds ratio (lambda in the paper)")

    def of_pairs(self, sums: Tensor, reference: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return losses and rewards: beta times the mean over tokens."""
        means = sums / counts.clamp(min=1)
        log_odds = difference(means - torch.log(-torch.expm1(means)))
        return -self.beta * F.logsigmoid(log_odds), self.beta * means

    def beside(self, log_probs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the mean loss over the tokens of the chosen texts."""
        return -log_probs[0::2].sum() / batch["scored_mask"][0::2].sum().clamp(min=1)
