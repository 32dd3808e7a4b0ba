"""Group relative policy optimisation (Shao et al. 2024): completions of one prompt are judged against one another."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from headrace.losses.loss import Loss, Outcome
from headrace.terms.errors import DataError
from headrace.terms.options.declared import option
from headrace.terms.options.option_kinds import OneOf, Whole

DAPO, GRPO, DR_GRPO = "dapo", "grpo", "dr_grpo"
GROUP, BATCH, NONE = "group", "batch", "none"
_TINY = 1e-4  # TRL's, beside a standard deviation


@dataclass(frozen=True, kw_only=True)
class Grpo(Loss):
    """Raises completions whose reward is above the mean of their prompt's, and lowers the others.

    Rows 0 to G-1 are completions of one prompt, the next G those of another. They were sampled from the very weights that are
    trained, so the ratio of probabilities is one, and clipping has nothing to do.
    """

    name: ClassVar[str] = "grpo"
    adds_router_loss: ClassVar[bool] = True
    FIGURES: ClassVar[tuple[str, ...]] = ("reward", "reward_std", "frac_reward_zero_std", "completions/mean_length")

    num_generations: int = option(8, Whole(2), row="completions of a prompt (G)")
    max_completion_length: int = option(256, Whole(), row="most tokens of a completion")
    loss_type: str = option(
        DAPO,
        OneOf((DAPO, GRPO, DR_GRPO)),
        row="the mean over tokens of a step (`dapo`), over tokens of each completion, then over completions (`grpo`), or with "
        "`max_completion_length` as the divisor (`dr_grpo`)",
    )
    scale_rewards: str = option(
        GROUP,
        OneOf((GROUP, BATCH, NONE)),
        row="divide by the standard deviation of the prompt's rewards, of the step's, or not",
    )

    def check(self, batch: Mapping[str, Tensor]) -> None:
        """Refuse a batch without rewards, or whose rows are no whole groups.

        Raises:
            DataError: the message says which.
        """
        rows = len(batch["input_ids"])
        if rows % self.num_generations:
            raise DataError(f"batch: {rows} rows, and grpo takes groups of num_generations={self.num_generations}")
        rewards = batch.get("rewards")
        if rewards is None or tuple(rewards.shape) != (rows,):
            raise DataError(f"batch: grpo needs rewards, one for each of {rows} rows")

    def advantages(self, rewards: Tensor) -> tuple[Tensor, Tensor]:
        """Return by how much each reward (rows,) exceeds its group's mean, scaled; and the standard deviations that scale.

        A completion that nothing judged has the reward NaN: it is left out of means and deviations, and its advantage is 0, as
        that of one that is alone.
        """
        groups = rewards.float().view(-1, self.num_generations)
        means, deviations = groups.mean(dim=1, keepdim=True), groups.std(dim=1, keepdim=True)
        for group in groups.isnan().any(dim=1).nonzero().flatten().tolist():
            known = groups[group][~groups[group].isnan()]
            means[group], deviations[group] = known.mean(), _deviation(known)
        if self.scale_rewards == BATCH:
            deviations = _deviation(_known(rewards))
        found = groups - means
        if self.scale_rewards != NONE:
            found = found / (deviations + _TINY)
        return found.flatten().nan_to_num(nan=0.0), deviations

    def __call__(self, log_probs: Tensor, completion_mask: Tensor, batch: Mapping[str, Tensor]) -> Outcome:
        """Return the loss of a step, and figures of rewards and completions under TRL's names."""
        rewards, mask = batch["rewards"].to(log_probs.device), completion_mask.to(log_probs)
        advantages, deviations = self.advantages(rewards)
        ratio = torch.exp(log_probs - log_probs.detach())
        losses, counts = -(ratio * advantages[:, None]) * mask, mask.sum(dim=1)
        if self.loss_type == GRPO:
            loss = (losses.sum(dim=1) / counts.clamp(min=1)).mean()
        elif self.loss_type == DR_GRPO:
            loss = losses.sum() / (len(losses) * self.max_completion_length)
        else:
            loss = losses.sum() / counts.sum().clamp(min=1)
        known = _known(rewards)
        found = (known.mean(), _deviation(known), (deviations == 0).float().mean(), counts.mean())
        return Outcome(loss, dict(zip(self.FIGURES, found, strict=True)))


def _known(rewards: Tensor) -> Tensor:
    return rewards.float()[~rewards.isnan()]


def _deviation(rewards: Tensor) -> Tensor:
    """Return the standard deviation of rewards; NaN of fewer than two."""
    return rewards.std() if len(rewards) > 1 else rewards.new_tensor(torch.nan)
