"""Seats: each micro-batch of a generation is transformers' own `generate`, stopped where it wants a block of the model.

A seat is a thread whose code does not know that blocks are run elsewhere. One thread runs at a time: a seat's, or the one that
calls `turn`. The model's blocks have taps, as in training (`Taps`). All but the last note how the block is called. The last one
parks the thread until the hidden states after all blocks are there. So all that `generate` does around blocks (embedding,
masks, head, sampling, stopping, beams) is neither known nor repeated here.

A prompt in chunks may also stop once for all of them: its chunks then pass each block one after the other (`earlier`). How a
block is called depends on how many tokens its cache has. So until the last chunk is there, stand-ins say so (`borders.ahead`).

Work between two stops of the seat's own code can also run in its thread (`work`). So it can stop in the middle: within a block,
at an expert that is not in memory.

Invariant: no seat sees what another leaves in the model's modules (rotary tables that grew, recurrent states) or in torch's
random numbers.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import nn

from headrace.model.blocks.parking import ParkedThread
from headrace.model.blocks.taps import BlockCall, Handed, Kept, wanted_calls
from headrace.model.caches.borders import ahead
from headrace.model.caches.tiered_cache import cache_of
from headrace.terms.errors import ModelError


class OnItsWay(Protocol):
    """What passes a block at once: a chunk of a prompt, or a token of each row."""

    hidden: torch.Tensor | None

    @property
    def calls(self) -> Sequence[BlockCall]:
        """What each block is called with."""


@dataclass(slots=True)
class PromptPart:
    """A chunk of a prompt behind which others come."""

    hidden: torch.Tensor | None
    calls: Sequence[BlockCall]


class Seated(OnItsWay, Protocol):
    """What a pass takes through the blocks. Attributes and methods mean what they mean for a `Seat`."""

    done: bool

    @property
    def earlier(self) -> Sequence[PromptPart]:
        """Chunks that pass each block before `hidden` does."""

    def turn(self) -> None:
        """Run what lies between the blocks' passes."""

    def close(self) -> None:
        """End it where it is."""


def parts_of_prompt(seat: Seated) -> Sequence[OnItsWay]:
    """Return what passes each block for a seat, in this order."""
    return (*seat.earlier, seat)


def tokens_of_pass(seat: Seated) -> int:
    """Return how many tokens of a row a seat takes through the blocks."""
    return sum(part.hidden.shape[1] for part in parts_of_prompt(seat) if part.hidden is not None)


class _Own(threading.local):
    """The seat whose thread this is."""

    seat: "Seat | None" = None


class SeatTaps:
    """While entered, the blocks of a model park the seat in whose thread they are called.

    `tuple_length` as in `Taps`. Each seat's thread enters `context`, for what belongs to a thread, such as a stream or the way
    of computing products. `outside` are the modules that lie in no block; `takes` says which blocks use what others hand them.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        outside: Iterable[nn.Module],
        tuple_length: int | None,
        context: Callable[[], AbstractContextManager[object]],
        takes: Sequence[bool],
    ) -> None:
        self.blocks, self.outside, self.context, self.takes = tuple(blocks), tuple(outside), context, tuple(takes)
        self._tuple_length = tuple_length
        self._own = _Own()
        self._places = [Kept.places(block) for block in self.blocks]

    def __enter__(self) -> "SeatTaps":
        for index, block in enumerate(self.blocks):
            block.forward = self._tap(index)  # an instance attribute: hides the class's method
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for block in self.blocks:
            block.__dict__.pop("forward", None)

    def kept(self) -> list[Kept | None]:
        """Return what blocks keep for a seat that is new."""
        return [Kept(places) if places else None for places in self._places]

    def sit(self, seat: "Seat | None") -> None:
        """Note that this thread belongs to `seat`; None: for now it runs blocks itself."""
        self._own.seat = seat

    def _tap(self, index: int) -> Callable[..., Any]:
        own = type(self.blocks[index]).forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            seat = self._own.seat
            if seat is None:  # the thread runs the block itself
                return own(self.blocks[index], *args, **kwargs)
            hidden, *rest = args if args else (kwargs.pop("hidden_states"),)
            hands = tuple(Handed() for _ in range(1, self._tuple_length or 1))
            hidden = seat.note(index, hidden, BlockCall(tuple(rest), kwargs, hands=hands, kept=seat.kept[index]))
            return hidden if self._tuple_length is None else (hidden, *hands)

        return forward


class Seat:
    """One micro-batch: `run` is its `generate`, called in a thread of its own with random numbers that begin at `seed`.

    With `contain` an error of its own code between blocks ends it alone: it is `done`, and the error is its `result`. `passed`
    gets the hidden states behind all blocks, in the seat's thread. It does not stop before `run` has asked for all of
    `together` tokens of a row.

    Attributes:
        earlier: the chunks of its prompt that pass each block before `hidden`.
        calls: what each block is called with, while it is parked.
        hidden: the hidden states (rows, tokens, hidden) that go through the blocks; the code that runs the blocks replaces
            them.
        result: what `run` returned, once it is `done`.
        cached_tokens: tokens of its prompt that were there when it began; who seats it sets them.
        kept: what each block's modules keep for it from one pass to the next, None where they keep nothing.
    """

    def __init__(
        self,
        taps: SeatTaps,
        run: Callable[[], Any],
        seed: int,
        *,
        contain: bool = False,
        together: int = 0,
        passed: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        self.calls: list[BlockCall] = []
        self.earlier: list[PromptPart] = []
        self._together, self._layers = together, dict[Any, list[Any]]()
        self.hidden: torch.Tensor | None = None
        self.result: Any = None
        self.done, self.cached_tokens = False, 0
        self.kept = taps.kept()
        self._taps, self._run, self._contain, self._passed = taps, run, contain, passed
        self._work: Callable[[], None] | None = None
        self._random = _first_random_state(seed)
        self._modules = [(dict(vars(module)), dict(module._buffers)) for module in taps.outside]
        self._thread = ParkedThread(self._generate, "headrace seat")

    def turn(self) -> None:
        """Let the seat's own code run until it wants the blocks or is done. On all turns but the first, the blocks have been
        run.

        Raises:
            Whatever its code raises.
        """
        if self.done:
            return
        theirs, found = _random_state(), self._take_modules()
        _set_random_state(self._random)
        self._put_modules(self._modules)
        try:
            self._thread.go_on()
        finally:
            self._random, self._modules = _random_state(), self._take_modules()
            _set_random_state(theirs)
            self._put_modules(found)

    def work(self, what: Callable[[], None]) -> bool:
        """Run `what` in the thread of the seat, which is parked, until it is done or waits. Return whether it is done.

        Raises:
            Whatever it raises.
        """
        self._work = what
        return self.go_on()

    def go_on(self) -> bool:
        """Let waiting work go on; returns as `work` does."""
        self._thread.go_on()
        return self._work is None

    def wait(self) -> None:
        """Give way, within work, until `go_on`."""
        self._thread.park()

    def close(self) -> None:
        """End the seat where it is."""
        self._thread.close()

    def note(self, index: int, hidden: torch.Tensor, call: BlockCall) -> torch.Tensor:
        """Take what block `index` is called with, and park at the last one. Return what the block returns."""
        if index == 0:
            self.calls, self.hidden = [], hidden
        self.calls.append(call)
        if index < len(self._taps.blocks) - 1:
            return hidden
        if len(self.calls) != len(self._taps.blocks):
            raise ModelError(
                f"generation: the model called {len(self.calls)} of {len(self._taps.blocks)} blocks; a model that skips or "
                "repeats blocks cannot be run block by block"
            )
        self.calls = [*wanted_calls(self.calls, self._taps.takes)]
        assert self.hidden is not None, "the first block was called"
        self._together -= hidden.shape[1]
        if self._together > 0:
            return self._one_of_many(hidden)
        for cache, layers in self._layers.items():
            cache.layers = layers
        self._layers = {}
        self._thread.park()
        while self._work is not None:
            self._taps.sit(None)  # from here on this thread runs blocks
            try:
                self._work()
            finally:
                self._taps.sit(self)
            self._work = None
            self._thread.park()
        final, self.hidden, self.calls, self.earlier = self.hidden, None, [], []
        assert final is not None, "the blocks have run"
        if self._passed is not None:
            self._passed(final)
        return final

    def _one_of_many(self, hidden: torch.Tensor) -> torch.Tensor:
        """Note a chunk behind which others come, as if it had been read; nothing depends on what is returned."""
        assert self.hidden is not None, "the first block was called"
        self.earlier.append(PromptPart(self.hidden, self.calls))
        for cache in {id(found): found for call in self.calls if (found := cache_of(call)) is not None}.values():
            self._layers.setdefault(cache, cache.layers)
            cache.layers = [ahead(layer, hidden.shape[1]) for layer in cache.layers]
        return hidden

    def _generate(self) -> None:
        try:
            self._taps.sit(self)
            with self._taps.context(), torch.no_grad():
                self.result = self._run()
        except Exception as error:
            if not self._contain or self._work is not None:  # within blocks it is everybody's
                raise
            self.result = error
        finally:
            self.done = True
            self.calls, self.hidden = [], None

    def _take_modules(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        return [(dict(vars(module)), dict(module._buffers)) for module in self._taps.outside]

    def _put_modules(self, state: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> None:
        for module, (attributes, buffers) in zip(self._taps.outside, state, strict=True):
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)


def _first_random_state(seed: int) -> list[torch.Tensor]:
    """Return the state of torch's random numbers after `torch.manual_seed(seed)`."""
    before = _random_state()
    torch.manual_seed(seed)
    state = _random_state()
    _set_random_state(before)
    return state


def _random_state() -> list[torch.Tensor]:
    on_gpu: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if on_gpu else [])]


def _set_random_state(state: Sequence[torch.Tensor]) -> None:
    torch.set_rng_state(state[0])
    if state[1:]:
        torch.cuda.set_rng_state(state[1])
