"""How tokens of a cache lie while their block does not run: block inputs of a prompt first, then keys and values (KVPR).

Keys and values of a prompt can be computed again from its block's input, which may have fewer bytes (Jiang et al. 2024,
arXiv 2411.17089). The block's own code does that: it runs up to the cache's `update`, and is stopped there. It runs on the very
rows and tokens of prefill's passes, so products have the same shapes and give the same bits. Generated tokens are never kept as
inputs: one product over several of them would have another shape.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from headrace.model.blocks.taps import BlockCall
from headrace.model.caches.tiered_cache import TieredLayer, cache_of
from headrace.terms.errors import ModelError
from headrace.terms.sizes import PAGE_BYTES, round_up

RunBlock = Callable[[torch.Tensor, BlockCall], object]


class _Taken(Exception):
    """A signal, not an error: the block has given its keys and values to the cache."""


class _Stop:
    """Takes keys and values, and stops the block there."""

    found: tuple[torch.Tensor, torch.Tensor] | None = None

    def take(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Elsewhere`."""
        self.found = keys, values
        raise _Taken


def keys_and_values(layer: TieredLayer, run: Callable[[], object]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `run`, which runs a block, gives to the block's `layer`; it is stopped there.

    Raises:
        ModelError: it gives nothing.
    """
    stop = _Stop()
    try:
        with layer.attended(stop):
            run()
    except _Taken:
        assert stop.found is not None, "it was taken"
        return stop.found
    raise ModelError("a block that is run again gives no keys and values to its cache")


def without_mask(call: BlockCall) -> BlockCall:
    """Return `call` without masks over all tokens: these are large, and attention alone uses them."""

    def kept(value: Any) -> Any:
        return None if isinstance(value, torch.Tensor) and value.dim() == 4 else value

    return BlockCall(tuple(map(kept, call.args)), {name: kept(value) for name, value in call.kwargs.items()})


def can_be_called_again(call: BlockCall) -> bool:
    """Return whether a block needs nothing of others, and keeps nothing in its modules."""
    return not (call.samples or call.gets or any(call.hands)) and (call.kept is None or call.kept.is_empty)


@dataclass(frozen=True, slots=True)
class _Input:
    """The input of one pass over a prompt, and how the block was called."""

    shape: torch.Size
    dtype: torch.dtype
    call: BlockCall

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class StoredLayer:
    """What is stored of one `layer` of a seat's cache. With `by_inputs`, inputs stand for keys and values of the prompt.

    A block that is to run needs memory where compute is. What is stored is brought to `start` there. `recompute` makes keys and
    values of inputs, and they end where stored ones begin. Inputs have fewer bytes. So what is made of one never reaches the
    next, and all of it takes hardly more memory than keys and values alone.
    """

    def __init__(self, layer: TieredLayer, *, by_inputs: bool = False) -> None:
        self.layer, self.start = layer, 0
        self._by_inputs = by_inputs
        self._inputs: list[_Input] = []

    @property
    def num_bytes(self) -> int:
        """Bytes that are stored of all tokens."""
        return self._bytes(self.layer.length)

    @property
    def bytes_before(self) -> int:
        """Bytes that were stored of the tokens before the last use."""
        return self._bytes(self.layer.before)

    @property
    def _input_tokens(self) -> int:
        return sum(each.shape[1] for each in self._inputs)

    @property
    def _input_bytes(self) -> int:
        return sum(each.num_bytes for each in self._inputs)

    def place(self) -> None:
        """Settle where in compute's memory begins what is stored: before it is brought there, for one use."""
        self.start = round_up(max(0, self._more_bytes), PAGE_BYTES)

    @contextmanager
    def used(self, memory: torch.Tensor, hidden: torch.Tensor, call: BlockCall) -> Iterator[None]:
        """While entered, the block can run on `hidden`, called as `call`. What is new is in `memory` (uint8) afterwards."""
        keeps, before = self._keeps(hidden, call), self.num_bytes
        with self.layer.lent(memory[self._first(keeps=keeps) :]):
            yield
        if keeps:
            place = memory[self.start + before : self.start + before + hidden.nbytes]
            place.view(hidden.dtype).view(hidden.shape).copy_(hidden)
            self._inputs.append(_Input(hidden.shape, hidden.dtype, without_mask(call)))

    def recompute(self, memory: torch.Tensor, hidden: torch.Tensor, call: BlockCall, run: RunBlock) -> None:
        """Make keys and values of the inputs in `memory`, where `used` with the same arguments looks for them.

        `run` runs the block on an input.

        Raises:
            ModelError: it gives no keys and values.
        """
        layer = self.layer
        into = memory[self._first(keeps=self._keeps(hidden, call)) :]
        length, layer.length = layer.length, 0
        copies: Iterable[torch.Tensor] = self._copies(memory[self.start :])
        for kept, given in zip(self._inputs, copies if self._more_bytes >= 0 else [*copies], strict=True):
            layer.append(into, *keys_and_values(layer, partial(run, given, kept.call)))
        layer.length = layer.before = length

    def _copies(self, stored: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield inputs. A copy lies where prefill's input lay, at the border of a cache line: products may depend on that."""
        at = 0
        for kept in self._inputs:
            yield stored[at : at + kept.num_bytes].view(kept.dtype).view(kept.shape).clone()
            at += kept.num_bytes

    @property
    def _more_bytes(self) -> int:
        """The bytes of keys and values beyond those of the inputs that stand for them; negative on some tiny instances."""
        return self._input_tokens * self.layer.token_bytes - self._input_bytes

    def _keeps(self, hidden: torch.Tensor, call: BlockCall) -> bool:
        """Return whether the pass that comes keeps its input: it is one over a prompt, and so were all before."""
        over_prompt = self._by_inputs and self.layer.length == self._input_tokens
        several = hidden.shape[1] > 1 or not self.layer.length
        cache = cache_of(call)  # which some models exchange for an empty one
        own = cache is not None and any(layer is self.layer for layer in cache.layers)
        return over_prompt and several and own and hidden.is_contiguous() and can_be_called_again(call)

    def _first(self, *, keeps: bool) -> int:
        """Return where in compute's memory keys and values begin: so that those which are stored lie behind those made."""
        return 0 if keeps else self.start - self._more_bytes

    def _bytes(self, tokens: int) -> int:
        """Return the bytes that are stored of the first tokens, up to the end of a pass."""
        count = self._input_tokens
        if tokens < count:
            return self._input_bytes // count * tokens
        return self._input_bytes + (tokens - count) * self.layer.token_bytes
