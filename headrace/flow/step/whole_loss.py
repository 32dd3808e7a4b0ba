"""A loss of the whole step: the head is passed twice, first for log-probabilities, then for the gradients that the loss gives.

Invariant: the loss is called once a step, with all rows in their order, so no split into micro-batches changes it.
"""

from collections.abc import Iterator, Mapping

import torch

from headrace.flow.step.step_state import StepState
from headrace.losses import Outcome, outcome_of
from headrace.model import IGNORED
from headrace.terms.errors import StepFailed


def spans_of(state: StepState, micro: int, hidden: torch.Tensor) -> Iterator[slice]:
    """Yield the chunks of positions of a micro-batch in which anything is trained."""
    positions = max(1, state.plan.batch.loss_chunk_tokens // hidden.shape[0])
    for start in range(0, hidden.shape[1], positions):
        span = slice(start, start + positions)
        if any(state.batch.trained_columns[micro][span]):
            yield span


def read_log_probs(state: StepState, micro: int, hidden: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities (b, T) of a micro-batch's targets, float32, 0 where there is none; without a graph."""
    batch, targets = state.batch.micro_batches[micro], state.batch.targets[micro]
    found = torch.zeros(targets.shape, dtype=torch.float32, device=hidden.device)
    for span in spans_of(state, micro, hidden):
        values = state.parts.chain.label_log_probs(batch.input_ids[:, span], hidden[:, span], targets[:, span])
        found[:, span] = torch.where(targets[:, span] != IGNORED, values, 0.0)
    return found


def take_loss(state: StepState) -> None:
    """Call the loss with the log-probabilities of all micro-batches; keep what it says, and their gradients."""
    micros = sorted(state.scored)
    joined = torch.cat([state.scored.pop(micro).cpu() for micro in micros]).requires_grad_()
    with torch.enable_grad():
        outcome = called(state, by_tokens(joined))
        scale = state.verdict.loss_scale.scale if state.verdict.loss_scale else 1.0
        if outcome.loss.dim() or not outcome.loss.requires_grad:
            raise StepFailed(
                f"loss: found a value of shape {tuple(outcome.loss.shape)}; return a scalar made of the log-probabilities"
            )
        (gradient,) = torch.autograd.grad(outcome.loss * scale, joined)
    state.outcome = Outcome(outcome.loss.detach(), outcome.metrics)
    rows = [targets.shape[0] for targets in state.batch.targets]
    state.log_prob_gradients = dict(zip(micros, torch.split(gradient, rows), strict=True))


def called(state: StepState, log_probs: torch.Tensor) -> Outcome:
    """Return what the run's loss makes of log-probabilities (rows, length)."""
    loss, whole = state.parts.token_loss, state.batch.whole
    assert loss is not None, "a plan with two passes of the head comes with a loss"
    return outcome_of(loss(log_probs, targets_mask(whole["labels"]), {**whole, "scored_mask": targets_mask(whole["scored"])}))


def by_tokens(by_positions: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each token where it stands, instead of at the position that predicts it."""
    return torch.cat([torch.zeros_like(by_positions[:, :1]), by_positions[:, :-1]], dim=1)


def targets_mask(labels: torch.Tensor) -> torch.Tensor:
    """Return which tokens (rows, length) are predicted and have a label."""
    mask = labels != IGNORED
    mask[:, 0] = False  # nothing predicts it
    return mask


def scored_labels(batch: Mapping[str, torch.Tensor], *, prompts: bool) -> torch.Tensor:
    """Return the labels (rows, length) whose log-probabilities a loss takes: of what is trained, or of all tokens."""
    if not prompts:
        return batch["labels"]
    counted = batch.get("token_mask", batch.get("attention_mask"))
    return batch["input_ids"] if counted is None else torch.where(counted != 0, batch["input_ids"], IGNORED)
