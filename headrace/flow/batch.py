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
