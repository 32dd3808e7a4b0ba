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
from torch.overrides import TorchFunctionMode

from headrace.terms.errors import ModelError


@dataclass(frozen=True, slots=True)
class Sample:
    """Where a sample lies in a micro-batch: positions `start` to `stop` of a row."""

    row: int
    start: int
    stop: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sample's part (1, stop - start, ...) of a tensor (b, T, ...), without a copy."""
        return tensor[self.row : self.row + 1, self.start : self.stop]


@dataclass(frozen=True, slots=True)
class BlockCall:
    """What the model passes to a block besides the hidden states: masks, rotary tables, positions.

    The tensors are the model's own objects, shared by all blocks that get the same one. With `samples`, in the order of their
    rows, a block is called for each of these by itself, with what the model passes for it alone.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    samples: tuple[tuple[Sample, "BlockCall"], ...] = ()


class Reached(Exception):
    """A signal, not an error: the last tap was reached: everything before the blocks has run."""


class _Answers(TorchFunctionMode):
    """Answers what the model's own code asks for around the blocks, where the answer changes nothing.

    Some models draw before each block whether to skip it, at a rate of 0, too (OPT before transformers 5.23); those with
    another rate are refused. The draw is 1.0, above all rates, and a number: when a step is planned tensors are fake, and
    could not be compared.

    While `unasked`, for code whose results are dropped, whoever asks whether a tensor is true is told that it is, and the
    device is not asked. Masks are made after a look at the positions, which on a GPU would stop the host until all that was
    issued is done: once for each chunk of the loss.
    """

    def __init__(self, *, unasked: bool) -> None:
        super().__init__()
        self.unasked = unasked

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.rand and args in (([],), ((),)):
            return 1.0
        if self.unasked and func is torch.Tensor.__bool__:
            return True
        return func(*args, **(kwargs or {}))


# Stands for what a block returns besides hidden states. Not None, which blocks that get it may take for "nothing there".
_NOT_COMPUTED = object()


class Taps:
    """While entered, the blocks compute nothing.

    With `inject=None` the calls are recorded and the last block raises `Reached`, so that nothing after the blocks runs. With a
    tensor of shape (b, T, hidden) the last block returns it, so that everything after the blocks runs on it; what lies before
    them computes nothing of use then, and asks the device for no value. `tuple_length` is the number of values in the tuple
    that a block returns, hidden states first; None where it returns them alone. What else is in it is not computed: a model may
    drop it.

    Raises:
        ModelError: a block gets what another one returns besides hidden states.
    """

    def __init__(self, blocks: Sequence[nn.Module], tuple_length: int | None, inject: torch.Tensor | None = None) -> None:
        self.calls: list[BlockCall] = []
        self.hidden: torch.Tensor | None = None
        self._blocks = blocks
        self._tuple_length = tuple_length
        self._inject = inject
        self._answers = _Answers(unasked=inject is not None)

    def __enter__(self) -> "Taps":
        for index, block in enumerate(self._blocks):
            block.forward = self._tap(index)  # an instance attribute: hides the class's method
        self._answers.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        self._answers.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        for block in self._blocks:
            del block.__dict__["forward"]
        return kind is not None and issubclass(kind, Reached)

    def _tap(self, index: int) -> Callable[..., Any]:
        last = index == len(self._blocks) - 1

        def forward(*args: Any, **kwargs: Any) -> Any:
            hidden, *rest = args if args else (kwargs.pop("hidden_states"),)
            if any(value is _NOT_COMPUTED for value in (*rest, *kwargs.values())):
                name = type(self._blocks[index]).__name__
                raise ModelError(f"{name}: cannot be run block by block: blocks hand one another more than hidden states")
            if self._inject is None:
                if index == 0:
                    self.hidden = hidden
                self.calls.append(BlockCall(tuple(rest), kwargs))
                if last:
                    raise Reached
            elif last:
                hidden = self._inject
                self._answers.unasked = False
            if self._tuple_length is None:
                return hidden
            return (hidden, *[_NOT_COMPUTED] * (self._tuple_length - 1))

        return forward
