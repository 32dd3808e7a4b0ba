"""A batch as the user gives it: checked, and cut into micro-batches."""

from collections.abc import Mapping

import torch

from headrace.model import MicroBatch
from headrace.spec.errors import DataError

_BATCH_KEYS = ("input_ids", "labels", "attention_mask", "position_ids")


def checked_batch(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the batch with what is missing filled in; complain about shapes before anything runs."""
    known = {"input_ids", "labels", "attention_mask", "position_ids"}
    if unknown := set(batch) - known:
        raise DataError(f"batch: unknown keys {sorted(unknown)}; known are {sorted(known)}")
    if "input_ids" not in batch or "labels" not in batch:
        raise DataError(f"batch: needs input_ids and labels, found {sorted(batch)}")
    shape = batch["input_ids"].shape
    for name, tensor in batch.items():
        if tensor.shape != shape or tensor.dim() != 2 or tensor.is_floating_point():
            raise DataError(
                f"batch: {name} must be an integer tensor of (sequences, length) like input_ids {tuple(shape)}, "
                f"found {tensor.dtype} {tuple(tensor.shape)}"
            )
    return {name: tensor.long() for name, tensor in batch.items()}


def split_batch(batch: dict[str, torch.Tensor], rows: int, device: torch.device) -> list[MicroBatch]:
    """Return micro-batches of up to `rows` sequences, on `device`."""
    count = batch["input_ids"].shape[0]
    return [
        MicroBatch(**{name: batch[name][start : start + rows].to(device) if name in batch else None for name in _BATCH_KEYS})  # type: ignore[arg-type]
        for start in range(0, count, rows)
    ]


def filled_up(batch: dict[str, torch.Tensor], length: int, *, needs_mask: bool) -> dict[str, torch.Tensor]:
    """Return the checked batch with every row filled up to `length` on the right: not trained, and not seen by what is.

    Models are causal, so what comes later changes nothing before it. With `needs_mask` what is filled in is masked besides,
    for losses that count every token; a row of several samples, told apart by positions alone, cannot have a mask and stays as
    it is then.
    """
    rows, found = batch["input_ids"].shape
    if found >= length or (needs_mask and "attention_mask" not in batch and "position_ids" in batch):
        return batch
    if needs_mask and "attention_mask" not in batch:
        batch = batch | {"attention_mask": torch.ones_like(batch["input_ids"])}
    more = length - found
    fillings = {name: torch.zeros(rows, more, dtype=torch.int64) for name in batch}
    fillings["labels"] -= 100
    fillings["position_ids"] = torch.arange(more).expand(rows, more)  # a sample of its own
    return {name: torch.cat([tensor, fillings[name].to(tensor.device)], dim=1) for name, tensor in batch.items()}
