"""The tensors that blocks are called with beside their hidden states, and their bytes."""

from collections.abc import Iterable
from typing import Any

import torch


def call_bytes(calls: tuple[Any, ...], rows: int) -> int:
    """Return the bytes of the distinct tensors that blocks are called with: masks, rotary tables, positions.

    A tensor that all `rows` of a micro-batch share counts once per row if rows are packed, because positions then differ. Pass
    1 if they cannot be packed. What a block hands to others counts for each of them, though some only pass it on.
    """
    handed = sum(hand.value.nbytes for call in calls for hand in call.hands if hand and isinstance(hand.value, torch.Tensor))
    sizes = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
        * (rows if tensor.dim() > 1 and tensor.shape[0] == 1 else 1)
        for tensor in tensors_of(calls)
    }
    return sum(sizes.values()) + handed


def tensors_of(calls: Iterable[Any]) -> list[torch.Tensor]:
    """Return all tensors that blocks are called with, in whatever tuples, lists and dictionaries."""
    found: list[torch.Tensor] = []

    def visit(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            for item in value:
                visit(item)
        elif isinstance(value, dict):
            for item in value.values():
                visit(item)

    for call in calls:
        visit(call.args)
        visit(call.kwargs)
    return found
