"""Kahneman-Tversky optimisation (Ethayarajh et al. 2024): completions that are desirable or not, without pairs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from headrace.losses.loss import Loss, Outcome, refuse_odd_rows
from headrace.terms.errors import DataError
from headrace.terms.options.declared import option
from headrace.terms.options.option_kinds import Number


@dataclass(frozen=True, kw_only=True)
class Kto(Loss):
    """Raises desirable completions over where training began, and lowers others, both against how far the model has moved.

    Rows 0, 2, ... are completions; rows 1, 3, ... have the same prompts and others' completions. These say how far the model
    has moved (KL), and have no gradient.
    """

    name: ClassVar[str] = "kto"
    takes_reference: ClassVar[bool] = True
    adds_router_loss: ClassVar[bool] = True
    routed: ClassVar[slice] = slice(0, None, 2)  # the others have no gradient

    beta: float = option(0.1, Number(0, above=True), row="how far the model may move from the reference: less with more")
    desirable_weight: float = option(1.0, Number(0), row="weight of desirable completions")
    undesirable_weight: float = option(1.0, Number(0), row="weight of the others")

    def check(self, batch: Mapping[str, Tensor]) -> None:
        """Refuse a batch whose rows are not two and two, or that does not say which are desirable.

        Raises:
            DataError: the message says which.
        """
        refuse_odd_rows(self.name, batch, "completion, another's completion, ...")
        super().check(batch)
        rows = len(batch["input_ids"])
        if tuple(batch.get("desirable", torch.empty(0, dtype=torch.float32)).shape) != (rows,):
            raise DataError(f"batch: kto needs desirable, true or false for each of {rows} rows; its columns have a label")

    def __call__(self, log_probs: Tensor, completion_mask: Tensor, batch: Mapping[str, Tensor]) -> Outcome:
        """Return the mean loss over completions."""
        sums = (log_probs * completion_mask).sum(dim=1)
        gains = sums - batch["reference_log_probs"].to(sums)
        moved = gains[1::2].detach().mean().clamp(min=0)
        desirable = batch["desirable"][0::2].to(sums.device).bool()
        surprise = torch.where(desirable, gains[0::2] - moved, moved - gains[0::2])
        weights = torch.where(desirable, self.desirable_weight, self.undesirable_weight)
        losses = weights * (1 - torch.sigmoid(self.beta * surprise))
        return Outcome(
            losses.mean(), {"kl": moved} | _figures(self.beta * gains[0::2].detach(), sums[0::2].detach(), desirable)
        )


def _figures(rewards: Tensor, sums: Tensor, desirable: Tensor) -> dict[str, Tensor]:
    """Return means over each kind of completion; a step may lack one."""
    found: dict[str, Tensor] = {}
    for name, rows in (("chosen", desirable), ("rejected", ~desirable)):
        if rows.any():
            found |= {f"rewards/{name}": rewards[rows].mean(), f"logps/{name}": sums[rows].mean()}
    if len(found) == 4:
        found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
    return found
