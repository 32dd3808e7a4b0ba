"""Taps stand in for the blocks' `forward`. They record calls, and pass on or replace the hidden states.

With taps in place the model's own code runs only what lies before and after its blocks. Invariant: the module's forward, also
that of other taps, is restored on exit, whatever happens inside.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from headrace.model.blocks.sample_groups import SampleGroup


class Handed:
    """What a block hands to later ones besides hidden states, such as which keys they attend to: its `value`, once it has run.

    The value stays for recompute, and has no gradient: it has no floating-point numbers. Until the block has run, and for
    blocks that do not use it, the object itself takes its place.
    """

    def __init__(self) -> None:
        self.value: Any = self


class Kept:
    """What modules keep in attributes from one call of a block to the next, for one of several callers: recurrent states."""

    def __init__(self, places: Sequence[tuple[nn.Module, str]]) -> None:
        self._places = places
        self._values = self._found()

    @staticmethod
    def places(block: nn.Module) -> list[tuple[nn.Module, str]]:
        """Return the attributes of a block's modules in which tensors may be kept."""
        return [
            (module, name)
            for module in block.modules()
            for name, value in vars(module).items()
            if not name.startswith("_") and (value is None or isinstance(value, torch.Tensor))
        ]

    @property
    def is_empty(self) -> bool:
        """Whether nothing is kept now."""
        return all(value is None for value in self._values)

    def copied(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
        """Return copies of what is kept now."""
        return [copy(value) if isinstance(value, torch.Tensor) else value for value in self._values]

    def take(self, values: Sequence[Any]) -> None:
        """Keep these from now on: what `copied` gave."""
        self._values = list(values)

    @contextmanager
    def at_hand(self) -> Iterator[None]:
        """While entered, the modules have what they keep for this caller; afterwards what they had before."""
        before = self._found()
        self._put(self._values)
        try:
            yield
        finally:
            self._values = self._found()
            self._put(before)

    def _found(self) -> list[Any]:
        return [getattr(module, name) for module, name in self._places]

    def _put(self, values: Sequence[Any]) -> None:
        for (module, name), value in zip(self._places, values, strict=True):
            setattr(module, name, value)


@dataclass(frozen=True, slots=True)
class BlockCall:
    """What the model passes to a block besides the hidden states: masks, rotary tables, positions.

    The tensors are the model's own objects, shared by all blocks that get the same one. With `samples` a block is called for
    each group of samples by itself, with what the model passes for these alone. Values that other blocks pass on are among the
    arguments as `Handed`. `hands` says where a block puts the further values that it returns, None for a value that nothing
    takes. `kept` is what the block's modules keep from this caller's last call, where they keep anything.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    samples: tuple[tuple[SampleGroup, "BlockCall"], ...] = ()
    hands: tuple[Handed | None, ...] = ()
    kept: "Kept | None" = None

    @property
    def gets(self) -> tuple[Handed, ...]:
        """What other blocks hand to this one."""
        return tuple(value for value in (*self.args, *self.kwargs.values()) if isinstance(value, Handed))

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with handed values in their places."""
        if not self.gets:
            return self.args, self.kwargs
        values = [value.value if isinstance(value, Handed) else value for value in (*self.args, *self.kwargs.values())]
        return tuple(values[: len(self.args)]), dict(zip(self.kwargs, values[len(self.args) :], strict=True))


class Reached(Exception):
    """A signal, not an error: the last tap was reached, so everything before the blocks has run."""


class _Answers(TorchFunctionMode):
    """Answers what the model's own code asks for around the blocks, where the answer changes nothing.

    Some models draw before each block whether to skip it, even at a rate of 0 (OPT before transformers 5.23); those with
    another rate are refused. The draw is answered with the number 1.0, above all rates, because while a step is planned tensors
    are fake, and could not be compared.

    `unasked` is for code whose results are dropped: each tensor counts as true, without asking the device. Masks are made after
    a look at the positions. A GPU's host would wait for that until all issued work is done, once for each chunk of the loss.
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


class Taps:
    """While entered, the blocks compute nothing.

    With `inject=None` the calls are recorded and the last block raises `Reached`, so that nothing after the blocks runs. If it
    gets a tensor of shape (b, T, hidden), the last block returns it, so that everything after the blocks runs on it. Code
    before them then computes nothing of use, and asks the device for no value. `tuple_length` is the number of values in the
    tuple that a block returns, hidden states first; None where it returns hidden states alone. The other values of the tuple
    are `Handed` objects. None could mean "nothing there" to blocks. A model may drop them, or pass them to other blocks.
    """

    def __init__(self, blocks: Sequence[nn.Module], tuple_length: int | None, inject: torch.Tensor | None = None) -> None:
        self.calls: list[BlockCall] = []
        self.hidden: torch.Tensor | None = None
        self._blocks = blocks
        self._tuple_length = tuple_length
        self._inject = inject
        self._answers = _Answers(unasked=inject is not None)

    def __enter__(self) -> "Taps":
        self._others = [block.__dict__.get("forward") for block in self._blocks]
        for index, block in enumerate(self._blocks):
            block.forward = self._tap(index)  # an instance attribute: hides the class's method
        self._answers.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        self._answers.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        for block, other in zip(self._blocks, self._others, strict=True):
            del block.__dict__["forward"]
            if other is not None:
                block.forward = other
        return kind is not None and issubclass(kind, Reached)

    def _tap(self, index: int) -> Callable[..., Any]:
        last = index == len(self._blocks) - 1

        def forward(*args: Any, **kwargs: Any) -> Any:
            hidden, *rest = args if args else (kwargs.pop("hidden_states"),)
            hands = tuple(Handed() for _ in range(1, self._tuple_length or 1))
            if self._inject is None:
                if index == 0:
                    self.hidden = hidden
                self.calls.append(BlockCall(tuple(rest), kwargs, hands=hands))
                if last:
                    raise Reached
            elif last:
                hidden = self._inject
                self._answers.unasked = False
            if self._tuple_length is None:
                return hidden
            return (hidden, *hands)

        return forward

    def wanted_calls(self, takes: Sequence[bool]) -> tuple[BlockCall, ...]:
        """Return the calls in order. See `wanted_calls`."""
        return wanted_calls(self.calls, takes)


def wanted_calls(calls: Sequence[BlockCall], takes: Sequence[bool]) -> tuple[BlockCall, ...]:
    """Return `calls` without places for handed values that no block gets and `takes`: they need not stay."""
    wanted = {id(value) for call, taken in zip(calls, takes, strict=True) if taken for value in call.gets}
    hands = [tuple(value if id(value) in wanted else None for value in call.hands) for call in calls]
    return tuple(replace(call, hands=kept if any(kept) else ()) for call, kept in zip(calls, hands, strict=True))
