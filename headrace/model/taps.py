"""Taps: stand-ins for the blocks' `forward` that record calls and pass on, or replace, the hidden states.

With taps in place the model's own code runs only what lies before and after its blocks. Invariant: the module's forward is
restored on exit, whatever happens inside.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class BlockCall:
    """What the model passes to a block besides the hidden states: masks, rotary tables, positions.

    The tensors are the model's own objects, shared by all blocks that get the same one.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


class Reached(Exception):
    """A signal, not an error: the last tap was reached: everything before the blocks has run."""


class Taps:
    """While entered, the blocks compute nothing.

    With `inject=None` the calls are recorded and the last block raises `Reached`, so that nothing after the blocks runs. With a
    tensor of shape (b, T, hidden) the last block returns it, so that everything after the blocks runs on it.
    """

    def __init__(self, blocks: Sequence[nn.Module], returns_tuple: bool, inject: torch.Tensor | None = None) -> None:
        self.calls: list[BlockCall] = []
        self.hidden: torch.Tensor | None = None
        self._blocks = blocks
        self._returns_tuple = returns_tuple
        self._inject = inject

    def __enter__(self) -> "Taps":
        for index, block in enumerate(self._blocks):
            block.forward = self._tap(index)  # an instance attribute: hides the class's method
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        for block in self._blocks:
            del block.__dict__["forward"]
        return kind is not None and issubclass(kind, Reached)

    def _tap(self, index: int) -> Callable[..., Any]:
        last = index == len(self._blocks) - 1

        def forward(*args: Any, **kwargs: Any) -> Any:
            hidden, *rest = args if args else (kwargs.pop("hidden_states"),)
            if self._inject is None:
                if index == 0:
                    self.hidden = hidden
                self.calls.append(BlockCall(tuple(rest), kwargs))
                if last:
                    raise Reached
            elif last:
                hidden = self._inject
            return (hidden,) if self._returns_tuple else hidden

        return forward
