"""Rows of token ids of different lengths as tensors, and back."""

from collections.abc import Sequence
from typing import Any

import torch

from headrace.generate.passes.opened import end_tokens


def padded(rows: Sequence[Sequence[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask (rows, longest); shorter rows are padded on the left."""
    length = max(map(len, rows))
    ids = torch.full((len(rows), length), pad, dtype=torch.int64)
    mask = torch.zeros((len(rows), length), dtype=torch.int64)
    for number, row in enumerate(rows):
        ids[number, length - len(row) :] = torch.tensor(row)
        mask[number, length - len(row) :] = 1
    return ids, mask


def until_end(tokens: Sequence[int], config: Any) -> tuple[int, ...]:
    """Return the tokens up to and including the first that ends a row; padding behind it is left out."""
    ends = end_tokens(config)
    stop = next((place + 1 for place, token in enumerate(tokens) if token in ends), len(tokens))
    while config.stop_strings and stop and tokens[stop - 1] == config.pad_token_id and config.pad_token_id not in ends:
        stop -= 1
    return tuple(tokens[:stop])
