"""The contract of a loss of a whole step, and what losses of pairs share.

Invariant: a loss sees all rows of a step at once, so how they are split into micro-batches changes nothing.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from headrace.terms.errors import DataError
from headrace.terms.options.named import Named


class Outcome(NamedTuple):
    """A loss (float32 scalar with a graph to the log-probabilities), and figures for metrics.jsonl."""

    loss: Tensor
    metrics: Mapping[str, Tensor]


TokenLoss = Callable[[Tensor, Tensor, Mapping[str, Tensor]], Outcome | Tensor]
"""A loss of a step's rows: `loss(log_probs, completion_mask, batch)`.

`log_probs` (rows, length) are float32: the log-probability of each token given those before it, 0 where none was asked for, so
in column 0. `completion_mask` (rows, length) is true for tokens that are trained. `batch` has what the caller gave to
`Engine.step`, and `scored_mask` (rows, length), true where a log-probability was asked for. Everything is on the host.
"""


@dataclass(frozen=True, kw_only=True)
class Loss(Named):
    """A loss with a name and settings. `takes_reference`: it needs the log-probabilities that the model had where training
    began; `takes_prompts`: those of prompts, too. `adds_router_loss`: a mixture's router has a part in it wherever its
    configuration has a coefficient, as in TRL; of the rows `routed`.
    """

    takes_reference: ClassVar[bool] = False
    takes_prompts: ClassVar[bool] = False
    adds_router_loss: ClassVar[bool] = False
    routed: ClassVar[slice] = slice(None)

    def check(self, batch: Mapping[str, Tensor]) -> None:
        """Refuse a batch that is not what the loss takes, before anything runs.

        Raises:
            DataError: the message says what is missing.
        """
        rows = len(batch["input_ids"])
        if self.takes_reference and tuple(batch.get("reference_log_probs", torch.empty(0, dtype=torch.float32)).shape) != (
            rows,
        ):
            raise DataError(f"batch: {self.name} needs reference_log_probs, one for each of {rows} rows (Engine.log_probs)")

    @abstractmethod
    def __call__(self, log_probs: Tensor, completion_mask: Tensor, batch: Mapping[str, Tensor]) -> Outcome:
        """Return the loss of a step; see `TokenLoss`."""


@dataclass(frozen=True, kw_only=True)
class Preference(Loss):
    """A loss of pairs: rows 0, 2, ... were chosen over rows 1, 3, ... The loss is the mean over pairs."""

    def check(self, batch: Mapping[str, Tensor]) -> None:
        """Refuse a batch whose rows are no pairs, or that lacks the reference's log-probabilities.

        Raises:
            DataError: the message says which.
        """
        refuse_odd_rows(self.name, batch, "chosen, rejected, chosen, ...")
        super().check(batch)

    def __call__(self, log_probs: Tensor, completion_mask: Tensor, batch: Mapping[str, Tensor]) -> Outcome:
        """Return the loss of a step of pairs."""
        sums = (log_probs * completion_mask).sum(dim=1)
        reference = batch["reference_log_probs"].to(sums) if self.takes_reference else torch.zeros_like(sums)
        losses, rewards = self.of_pairs(sums, reference, completion_mask.sum(dim=1))
        (chosen, rejected), (of_chosen, of_rejected) = _pairs(rewards.detach()), _pairs(sums.detach())
        metrics = {
            "rewards/chosen": chosen.mean(),
            "rewards/rejected": rejected.mean(),
            "rewards/margins": (chosen - rejected).mean(),
            "rewards/accuracies": (chosen > rejected).float().mean(),
            "logps/chosen": of_chosen.mean(),
            "logps/rejected": of_rejected.mean(),
        }
        return Outcome(losses.mean() + self.beside(log_probs, batch), metrics)

    @abstractmethod
    def of_pairs(self, sums: Tensor, reference: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the losses (pairs,) and the rewards (rows,) of rows.

        `sums` (rows,) are log-probabilities of whole completions of `counts` tokens, `reference` those where training began.
        """

    def beside(self, log_probs: Tensor, batch: Mapping[str, Tensor]) -> Tensor | float:
        """Return what is added to the mean over pairs."""
        return 0.0


def refuse_odd_rows(name: str, batch: Mapping[str, Tensor], order: str) -> None:
    """Refuse a batch of the loss `name` whose rows are not two and two.

    Raises:
        DataError: their number is odd.
    """
    if (rows := len(batch["input_ids"])) % 2:
        raise DataError(f"batch: {rows} rows, and {name} takes pairs: give {order}")


def _pairs(rows: Tensor) -> tuple[Tensor, Tensor]:
    return rows[0::2], rows[1::2]


def difference(rows: Tensor) -> Tensor:
    """Return by how much each chosen row (pairs,) exceeds the rejected one."""
    chosen, rejected = _pairs(rows)
    return chosen - rejected


def outcome_of(found: Outcome | Tensor) -> Outcome:
    """Return what a `TokenLoss` returned as an outcome: a loss alone has no figures."""
    return found if isinstance(found, Outcome) else Outcome(found, {})
