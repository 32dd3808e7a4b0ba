"""A batch as the user gives it: checked, and cut into micro-batches."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from headrace.model import IGNORED, Chain, MicroBatch, shift_labels
from headrace.terms.errors import DataError

KEYS = ("input_ids", "labels", "attention_mask", "position_ids", "token_mask")


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The micro-batches of a step, on the device that computes, with the targets (b, T) of each.

    `trained_columns` says, on the host, which columns of a micro-batch have labels: asking the device would make it wait.
    `whole` is all of it on the host, for a loss of the whole step: `labels` of what is trained, `scored` of what is asked for.
    The router's loss of a mixture is the mean over batches of `router_rows` rows; 0: all rows are one batch.
    """

    micro_batches: tuple[MicroBatch, ...] = ()
    targets: tuple[torch.Tensor, ...] = ()
    trained_columns: tuple[list[bool], ...] = ()
    trained_tokens: int = 0
    whole: Mapping[str, torch.Tensor] = field(default_factory=dict)
    router_rows: int = 0


def checked_batch(batch: Mapping[str, torch.Tensor], vocabulary: int, *, labelled: bool = True) -> dict[str, torch.Tensor]:
    """Return the batch as 64-bit integers in host memory; complain before anything runs. A GPU would only report an assertion.

    A batch that is not `labelled` gets labels that train nothing.

    Raises:
        DataError: keys are unknown or missing, shapes do not agree, the model has no embedding for a token, or no token is
            trained.
    """
    if unknown := set(batch) - set(KEYS):
        raise DataError(f"batch: unknown keys {sorted(unknown)}; known are {sorted(KEYS)}")
    if not labelled:
        if "labels" in batch or "input_ids" not in batch:
            raise DataError(f"batch: needs input_ids and no labels, found {sorted(batch)}")
        batch = {**batch, "labels": torch.full_like(batch["input_ids"], IGNORED)}
    if "input_ids" not in batch or "labels" not in batch:
        raise DataError(f"batch: needs input_ids and labels, found {sorted(batch)}")
    shape = batch["input_ids"].shape
    for name, tensor in batch.items():
        if tensor.shape != shape or tensor.dim() != 2 or tensor.is_floating_point():
            raise DataError(
                f"batch: {name} must be an integer tensor of (sequences, length) like input_ids {tuple(shape)}, "
                f"found {tensor.dtype} {tuple(tensor.shape)}"
            )
    checked = {name: tensor.to("cpu", torch.int64) for name, tensor in batch.items()}
    labels = checked["labels"]
    for name, tokens in (("input_ids", checked["input_ids"]), ("labels", labels[labels != IGNORED])):
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
            wrong = int(tokens.min()) if tokens.min() < 0 else int(tokens.max())
            besides = f", or {IGNORED} for labels that are not trained" if name == "labels" else ""
            raise DataError(f"batch: {name} has token {wrong}; the model has embeddings for 0 to {vocabulary - 1}{besides}")
    if labelled and not (labels[:, 1:] != IGNORED).any():
        raise DataError(f"batch: none of its {labels.numel()} labels is trained (all are {IGNORED}, or first in their row)")
    return checked


def check_apart(batch: Mapping[str, torch.Tensor], chain: Chain) -> None:
    """Refuse rows of several samples (their positions begin again) if the model would let samples see one another.

    Raises:
        DataError: there is such a row; the message says why the model does not keep its samples apart.
    """
    if "position_ids" not in batch or "attention_mask" in batch or chain.packs(batch["position_ids"].shape[1]):
        return
    if (batch["position_ids"][:, 1:] == 0).any():
        raise DataError(
            f"batch: position_ids begin again within a row of {batch['position_ids'].shape[1]} tokens, but the model does "
            f"not keep samples of one row apart: {chain.packing_reason}. Give each sample its own row"
        )


def step_batch(batch: Mapping[str, torch.Tensor], rows: int, device: torch.device) -> StepBatch:
    """Return a checked batch as micro-batches of up to `rows` sequences, on `device`."""
    parts = [
        {name: tensor[start : start + rows] for name, tensor in batch.items()} for start in range(0, len(batch["labels"]), rows)
    ]
    targets = [shift_labels(part["labels"]) for part in parts]
    return StepBatch(
        tuple(MicroBatch(**{name: tensor.to(device) for name, tensor in part.items()}) for part in parts),
        tuple(target.to(device) for target in targets),
        tuple((target != IGNORED).any(dim=0).tolist() for target in targets),
        sum(int((target != IGNORED).sum()) for target in targets),
    )


def filled_up(batch: dict[str, torch.Tensor], length: int, *, needs_mask: bool) -> dict[str, torch.Tensor]:
    """Return the checked batch with every row padded to `length` on the right. Padding is not trained, and trained tokens do
    not see it, because models are causal.

    `needs_mask`: the batch gets a mask, for losses that count every token.
    """
    rows, found = batch["input_ids"].shape
    if found >= length:
        return batch
    if needs_mask and "token_mask" not in batch:
        batch = batch | {"token_mask": batch.get("attention_mask", torch.ones_like(batch["input_ids"]))}
    more = length - found
    fillings = {name: torch.zeros(rows, more, dtype=torch.int64) for name in batch}
    fillings["labels"] += IGNORED
    fillings["position_ids"] = torch.arange(more).expand(rows, more)  # padding counts as a sample of its own
    return {name: torch.cat([tensor, fillings[name]], dim=1) for name, tensor in batch.items()}


def counting(batch: Mapping[str, torch.Tensor], rows: slice) -> dict[str, torch.Tensor]:
    """Return the batch with a mask by which losses that count every token count those of some `rows` alone."""
    if rows == slice(None):
        return dict(batch)
    counted = batch.get("token_mask", batch.get("attention_mask", torch.ones_like(batch["input_ids"])))
    mask = torch.zeros_like(counted)
    mask[rows] = counted[rows]
    return {**batch, "token_mask": mask}


def with_idle_rows(batch: Mapping[str, torch.Tensor], least: int) -> Mapping[str, torch.Tensor]:
    """Return the batch with at least so many rows: copies of its last one, without labels."""
    more = least - len(batch["input_ids"])
    if more <= 0:
        return batch
    idle = {name: tensor[-1:].repeat(more, 1) for name, tensor in batch.items()}
    idle["labels"] = torch.full_like(idle["input_ids"], IGNORED)
    return {name: torch.cat([tensor, idle[name]]) for name, tensor in batch.items()}
