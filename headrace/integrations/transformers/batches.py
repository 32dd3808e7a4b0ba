"""Micro-batches of a Trainer as one batch of the engine: rows of one length, padded on the right.

Invariant: what is added is seen by no token, and trained by none.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from headrace.data.values.values import IGNORED
from headrace.flow.step.step_batch import KEYS
from headrace.terms.errors import DataError

Batch = Mapping[str, torch.Tensor]


def collated_tensors_of(batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a collated batch on the host, where the engine takes them.

    Raises:
        DataError: it has others than the engine takes, or no labels.
    """
    if unknown := sorted(name for name in batch if name not in KEYS):
        raise DataError(f"data_collator: its batches have {unknown}, and a step takes {', '.join(KEYS)}; leave the others out")
    if "labels" not in batch:
        raise DataError(
            "data_collator: its batches have no labels; leave data_collator out, or take DataCollatorForLanguageModeling with "
            "mlm=False"
        )
    return {name: torch.as_tensor(values).cpu() for name, values in batch.items()}


def joined_batches(batches: Sequence[Batch], pad_id: int) -> dict[str, torch.Tensor]:
    """Return the rows of all `batches`, padded to the longest. Masks are added where padding is."""
    length = max(batch["input_ids"].shape[1] for batch in batches)
    ragged = any(batch["input_ids"].shape[1] < length for batch in batches)
    names = {name for batch in batches for name in batch}
    if ragged and not names & {"attention_mask", "token_mask"}:
        names |= {"token_mask" if "position_ids" in names else "attention_mask"}
    return {name: torch.cat([_padded(batch, name, length, pad_id) for batch in batches]) for name in sorted(names)}


def slices(batch: Batch, rows: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield `batch` in pieces of at most so many rows, without those in which nothing is trained."""
    for start in range(0, len(batch["labels"]), rows):
        piece = {name: tensor[start : start + rows] for name, tensor in batch.items()}
        if (piece["labels"][:, 1:] != IGNORED).any():
            yield piece


def _padded(batch: Batch, name: str, length: int, pad_id: int) -> torch.Tensor:
    rows, given = batch["input_ids"].shape
    if name == "position_ids":  # padding counts as a sample of its own
        found = batch.get(name, torch.arange(given).expand(rows, given))
        return torch.cat([found, torch.arange(length - given).expand(rows, -1)], dim=1)
    fill = {"input_ids": pad_id, "labels": IGNORED}.get(name, 0)
    return pad(batch.get(name, torch.ones(rows, given, dtype=torch.int64)), (0, length - given), value=fill)
