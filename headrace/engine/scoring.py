"""What an engine says of rows without training on them, and how batches become a step's.

Invariant: nothing of the run changes, and what is said is of the newest weights.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from headrace.flow.step.step_batch import KEYS, StepBatch, check_apart, checked_batch, counting, filled_up, step_batch
from headrace.flow.step.step_state import StepState
from headrace.flow.step.whole_loss import by_tokens, called, scored_labels, targets_mask
from headrace.losses import Loss, TokenLoss
from headrace.machine.protocol import Machine
from headrace.model import IGNORED, Chain
from headrace.plan.value.plan import Plan
from headrace.terms.errors import DataError
from headrace.terms.events import Evaluation
from headrace.terms.options.options import Options


class Scoring:
    """The part of an engine that scores rows. `_token_loss` is a loss of the whole step, if the run has one.

    The router's loss of a mixture is the mean over batches of `router_rows` rows of a batch; 0: it is one batch.
    """

    router_rows: int = 0
    _has_all_rows: bool = True  # others have some, of batches that are not split further

    options: Options
    chain: Chain
    machine: Machine
    _token_loss: TokenLoss | None

    def _score(self, batch: dict[str, torch.Tensor]) -> tuple[StepBatch, StepState]:
        """Run a checked batch forward under the newest weights."""
        raise NotImplementedError

    def evaluate(self, batch: Mapping[str, torch.Tensor]) -> Evaluation:
        """Return the mean loss of a batch under the newest weights; nothing is changed. `batch` is as for `step`.

        The newest step is made durable first. A mixture's router has the part in it that is trained. Rows that compute
        otherwise where they are padded run by themselves, unless the loss is of a whole batch.

        Raises:
            DataError: as `step`.
            StepFailed: a lane failed; the last committed step is untouched.
        """
        checked = self._checked(batch)
        whole = self._token_loss or self.chain.collects_asides or not self._has_all_rows
        parts = [checked] if whole else list(_unpadded(checked, self.chain))
        found = [self._evaluated(part) for part in parts]
        tokens = sum(each.tokens for each in found)
        loss = found[0].loss if len(found) == 1 else sum(each.loss * each.tokens for each in found) / tokens
        return Evaluation(loss=loss, tokens=tokens, rows=len(checked["input_ids"]))

    def _evaluated(self, batch: dict[str, torch.Tensor]) -> Evaluation:
        data, state = self._score(batch)
        if data.whole:
            state.outcome = called(state, by_tokens(_joined(state.scored)))
        return Evaluation(loss=loss_of(state), tokens=data.trained_tokens, rows=len(batch["input_ids"]))

    def log_probs(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the log-probability of each row's trained tokens together (sequences,), float32, under the newest weights.

        Only for runs with a loss of the whole step. `batch` is as for `step`.

        Raises:
            DataError: as `step`.
            StepFailed: a lane failed; the last committed step is untouched.
        """
        assert self._token_loss is not None, "log-probabilities are read for a loss of the whole step"
        data, state = self._score(self._checked(batch, weighed=False))
        # Over the same columns as losses sum, so that both are the same bits where the weights are.
        return (by_tokens(_joined(state.scored)) * targets_mask(data.whole["labels"])).sum(dim=1)

    def next_logits(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the logits (sequences, vocabulary) of the token after each row, float32 on the host, under the newest weights.

        `batch` is as for `step`, without `labels`; shorter rows are padded on the left, and masked.

        Raises:
            DataError: as `step`.
            StepFailed: a lane failed; the last committed step is untouched.
        """
        _, state = self._score(self._checked(batch, labelled=False))
        return torch.cat([state.scored[micro].cpu() for micro in sorted(state.scored)])

    def _checked(
        self, batch: Mapping[str, torch.Tensor], *, labelled: bool = True, weighed: bool = True
    ) -> dict[str, torch.Tensor]:
        """Return the batch on the host; what only a loss of the whole step reads is left as it is. If the loss is `weighed`,
        it has to suit that.

        Raises:
            DataError: see `checked_batch`; or several samples share a row that the model does not keep apart, or a loss of the
                whole step cannot.
        """
        others = {name: tensor for name, tensor in batch.items() if name not in KEYS} if self._token_loss else {}
        own = {name: tensor for name, tensor in batch.items() if name not in others}
        checked = checked_batch(own, self.chain.vocabulary, labelled=labelled)
        check_apart(checked, self.chain)
        if self._token_loss and (positions := checked.get("position_ids")) is not None and (positions[:, 1:] == 0).any():
            raise DataError("batch: position_ids begin again within a row, and the loss takes one sample a row")
        if isinstance(self._token_loss, Loss) and labelled and weighed:
            self._token_loss.check(batch)
        return checked | others

    def _cut(self, batch: dict[str, torch.Tensor], rows: int, plan: Plan) -> StepBatch:
        """Return a checked batch as micro-batches of `rows`, filled up where blocks are compiled: one length is one graph."""
        own = {name: tensor for name, tensor in batch.items() if name in KEYS}
        if self.options.compile_blocks:
            own = filled_up(own, plan.batch.sequence_length, needs_mask=self.chain.collects_asides)
        if (loss := self._token_loss) is None:
            return replace(step_batch(own, rows, self.machine.device), router_rows=self.router_rows)
        scored = scored_labels(own, prompts=isinstance(loss, Loss) and loss.takes_prompts)
        if self.chain.collects_asides and isinstance(loss, Loss):
            own = counting(own, loss.routed)
        data = step_batch({**own, "labels": scored}, rows, self.machine.device)
        return replace(data, whole={**batch, **own, "scored": scored})


def loss_of(state: StepState) -> float:
    """Return the loss of a step: that of the whole, or the mean over trained tokens; and the router's part in it."""
    if state.outcome is not None:
        loss = float(state.outcome.loss)
    else:
        loss = float(state.loss_sum) / state.batch.trained_tokens if state.loss_sum is not None else math.nan
    return loss if state.asides.loss is None else loss + float(state.asides.loss)


def _unpadded(batch: dict[str, torch.Tensor], chain: Chain) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the rows of a checked batch by what may be padded together, without padding that all of a group have."""
    mask = batch.get("attention_mask")
    is_packed_or_left = mask is None or bool(mask.diff(dim=1).gt(0).any())
    lengths = [] if mask is None or is_packed_or_left else mask.sum(dim=1).tolist()
    groups = chain.padded_together(lengths)
    if len(groups) < 2:
        yield batch
        return
    for places in groups:
        part = {name: tensor[places, : max(lengths[place] for place in places)] for name, tensor in batch.items()}
        if (part["labels"][:, 1:] != IGNORED).any():
            yield part


def _joined(by_micro: Mapping[int, torch.Tensor]) -> torch.Tensor:
    return torch.cat([by_micro[micro].cpu() for micro in sorted(by_micro)])
