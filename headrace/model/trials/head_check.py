"""A trial of the head by ranges of its rows: a tiny instance gives with some rows at a time what it gives with all."""

import torch

from headrace.model.blocks.chain_values import IGNORED, shift_labels
from headrace.model.parts.runner import Runner
from headrace.model.trials.block_major import RELATIVE_TOLERANCE
from headrace.model.trials.instance import tiny_samples
from headrace.model.trials.trial import Found, gradients_of, unless_alike, why_other

# Rows of a range: no divisor of the tiny vocabulary, so that the last range is smaller.
_ROWS = 40


def takes_head_by_rows(runner: Runner) -> bool:
    """Return whether each logit of a tiny instance follows from its own row of the head, and all gradients likewise.

    It does not where the model does more with logits than to change each by itself.
    """
    sample = tiny_samples(runner.model)[0]
    targets = shift_labels(sample.labels)
    with torch.no_grad():
        hidden = runner.prologue(sample).hidden
    wanted = torch.linspace(-1.0, 1.0, targets.numel(), dtype=torch.float32).view(targets.shape) * (targets != IGNORED)

    def found(rows: int) -> list[Found]:
        runner.head_rows, leaf = rows, hidden.detach().requires_grad_()
        try:
            log_probs = runner.label_log_probs(sample.input_ids, leaf, targets)
            log_probs.backward(wanted)  # type: ignore[no-untyped-call]
        finally:
            runner.head_rows, gradients = 0, gradients_of(runner.model)
        assert leaf.grad is not None
        return [{"": torch.where(targets != IGNORED, log_probs.detach(), 0.0), " ": leaf.grad, **gradients}]

    whole = found(0)
    return not why_other(lambda: whole, lambda: found(_ROWS), unless_alike("logits differ", RELATIVE_TOLERANCE))
