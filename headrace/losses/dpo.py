"""Direct preference optimisation (Rafailov et al. 2023), its hinge form (SLiC), and IPO (Azar et al. 2023)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from headrace.losses.loss import Preference, difference
from headrace.terms.errors import ConfigError
from headrace.terms.options.declared import option
from headrace.terms.options.option_kinds import Number, OneOf

SIGMOID, IPO, HINGE = "sigmoid", "ipo", "hinge"


@dataclass(frozen=True, kw_only=True)
class Dpo(Preference):
    """Raises the chosen completion over the rejected one, measured from where training began."""

    name: ClassVar[str] = "dpo"
    takes_reference: ClassVar[bool] = True
    adds_router_loss: ClassVar[bool] = True

    beta: float = option(0.1, Number(0, above=True), row="how far the model may move from the reference: less with more")
    loss_type: str = option(
        SIGMOID, OneOf((SIGMOID, IPO, HINGE)), row="`sigmoid`; `ipo` on means over tokens, as TRL has it; or `hinge`"
    )
    label_smoothing: float = option(
        0.0, Number(0, 0.5), row="share of pairs whose choice is taken to be wrong, for `sigmoid` (conservative DPO)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.label_smoothing and self.loss_type != SIGMOID:
            raise ConfigError(f"label_smoothing: {self.loss_type} has none; leave it out, or take loss_type={SIGMOID}")

    def of_pairs(self, sums: Tensor, reference: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return losses and rewards: beta times the gain over the reference."""
        gains = sums - reference
        margins = self.beta * difference(gains)
        if self.loss_type == HINGE:
            losses = torch.relu(1 - margins)
        elif self.loss_type == IPO:
            losses = (difference(gains / counts.clamp(min=1)) - 1 / (2 * self.beta)) ** 2
        else:
            losses = smoothed(margins, self.label_smoothing)
        return losses, self.beta * gains


def smoothed(margins: Tensor, label_smoothing: float) -> Tensor:
    """Return the logistic losses of margins, a share of them taken to be the wrong way round."""
    losses = -F.logsigmoid(margins)
    return losses * (1 - label_smoothing) - F.logsigmoid(-margins) * label_smoothing if label_smoothing else losses
