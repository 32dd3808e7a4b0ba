"""Attention of new tokens on the host, where keys and values lie, instead of sending these to the device.

A query and the result of attention are tiny beside the keys and values of all tokens. So if the link limits, host cores compute
attention (FlexGen, Sheng et al. 2023, section 5.2). The roofline of MoE-Lightning (Cao et al. 2025, section 4) says when. The
model's code is not changed: while a block is run its configuration names an attention function of ours, which is registered
with transformers' `AttentionInterface`. The block's cache hands out stand-ins for keys and values, and our function knows them.

In float32 the host calls the function that the block would have called, on the same numbers: on one processor the bits are the
same. Keys and values of 16 bits are read by a loop of our own, with other bits. Torch's takes up to eight times as long for one
token.
"""

import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from headrace.model.caches.tiered_cache import TieredLayer
from headrace.model.kernels.attention_loops import BFLOAT16, FLOAT16, FLOAT32, attend
from headrace.terms.costs import CARRIED_ALIGNMENT
from headrace.terms.errors import ModelError
from headrace.terms.sizes import round_up

NAME = "headrace_host"
_KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
# Arguments of attention that change what one token gets, and that the loop does not know.
_UNKNOWN = ("softcap", "position_bias", "cache")


class Use(Protocol):
    """One use of a block whose attention is not where the block is run."""

    def attend(self, asked: "AttentionCall", keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Return what attention makes of `asked` (rows, 1, heads, width); `keys` and `values` are what the cache gave."""


class _AttentionThread(threading.local):
    """The use of a block that this thread is in."""

    use: Use | None = None


_own = _AttentionThread()


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What a block asks of attention: a `query` (rows, heads, 1, width) and a mask. `function` is how it would have been
    computed for `module`; `arguments` are its other arguments.
    """

    query: torch.Tensor
    mask: torch.Tensor | None
    module: nn.Module
    function: Any
    arguments: Mapping[str, Any]

    def on(self, layer: TieredLayer, memory: torch.Tensor, *, loop: bool | None = None) -> torch.Tensor:
        """Return the result (rows, 1, heads, width of values) of attending to what `layer` has in `memory`, on the host.

        `loop`: whether by the loop of our own; None: where numbers have 16 bits.

        Raises:
            ModelError: the loop cannot do what is asked.
        """
        keys, values = layer.views(memory)
        if loop if loop is not None else keys.dtype is not torch.float32:
            return self._by_loop(layer, memory, keys, values)
        found: torch.Tensor = self.function(self.module, self.query, keys, values, self.mask, **self.arguments)[0]
        return found

    def _by_loop(self, layer: TieredLayer, memory: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        for name in _UNKNOWN:
            if self.arguments.get(name) is not None:
                raise ModelError(f"its attention is given {name}, which attention on the host does not know")
        scaling, sinks = self.arguments.get("scaling"), self.arguments.get("s_aux")
        rows, heads, _, width = self.query.shape
        query = self.query.float() * (width**-0.5 if scaling is None else scaling)
        found = attended(query, memory[: layer.num_bytes], keys, values, self.mask, sinks)
        return found.view(rows, 1, heads, -1).to(self.query.dtype)


def attended(
    query: torch.Tensor,
    memory: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention (rows, heads of keys, group, width of values), float32, by the compiled loop.

    `query` (rows, heads, 1, width) is float32 and scaled. `keys` and `values` (rows, heads of keys, tokens, width) are views of
    `memory` (uint8). A token's keys lie before its values, and tokens lie one after the other. `mask` (rows or 1, 1, 1, tokens)
    is true for visible tokens, or is added to scores. `sinks` has a score without a value for each head.

    Raises:
        ModelError: the mask is not the same for all heads.
    """
    rows, heads, tokens, width = keys.shape
    group = query.shape[1] // heads
    kind = _KINDS[keys.dtype]
    table = memory.view(torch.uint32 if kind == FLOAT32 else torch.uint16).view(tokens, -1).numpy()
    added = np.empty((rows, 0), np.float32)
    if mask is not None:
        if mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[2] != 1 or mask.shape[3] != tokens:
            raise ModelError(f"its attention is given a mask of shape {tuple(mask.shape)}")
        wide = torch.where(mask, 0.0, -math.inf) if mask.dtype is torch.bool else mask.float()
        added = wide.expand(rows, 1, 1, tokens).reshape(rows, tokens).numpy()
    free = (
        torch.full((heads, group), -math.inf, dtype=torch.float32)
        if sinks is None
        else sinks.float().reshape(heads, group).contiguous()
    )
    asked = query.reshape(rows, heads, group, width).contiguous().numpy()
    out = torch.empty(rows, heads, group, values.shape[3], dtype=torch.float32)
    given = (asked, table, rows * heads * width, kind, added, free.numpy(), out.numpy())
    threads = max(1, min(torch.get_num_threads(), rows * heads))
    bounds = [rows * heads * number // threads for number in range(threads + 1)]
    if threads == 1:
        attend(*given, *bounds)
    else:
        parts = [_pool(threads).submit(attend, *given, *both) for both in pairwise(bounds)]
        wait(parts)
        for part in parts:
            part.result()
    return out


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="headrace attention")


def _host_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Do what an attention function of transformers does: return (rows, 1, heads, width of values), and no weights."""
    assert _own.use is not None, "a block is run so within a use"
    name = _names[id(module.config)]
    function = ALL_ATTENTION_FUNCTIONS.get_interface(name, _eager(module))
    return _own.use.attend(AttentionCall(query, attention_mask, module, function, arguments), key, value), None


AttentionInterface.register(NAME, _host_attention)
_names: dict[int, str] = {}  # of configurations that name our function now: what they name otherwise


def _eager(module: nn.Module) -> Any:
    return getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)


@contextmanager
def named(block: nn.Module) -> Iterator[None]:
    """While entered, the attention of `block` asks our function. One block at a time, in one thread."""
    found: list[Any] = [getattr(module, "config", None) for module in block.modules()]
    configs = {id(config): config for config in found if hasattr(config, "_attn_implementation")}
    _names.update({number: config._attn_implementation for number, config in configs.items()})
    try:
        for config in configs.values():
            config._attn_implementation_internal = NAME
        yield
    finally:
        for number, config in configs.items():
            config._attn_implementation_internal = _names.pop(number)


@contextmanager
def using(use: Use) -> Iterator[None]:
    """While entered, `use` answers what blocks ask of attention in this thread."""
    _own.use = use
    try:
        yield
    finally:
        _own.use = None


class StandIns:
    """Takes a new token's keys and values, and gives stand-ins for those of all tokens."""

    def __init__(self, layer: TieredLayer) -> None:
        self._layer = layer
        self.new: tuple[torch.Tensor, torch.Tensor] | None = None
        self._given: tuple[torch.Tensor, ...] = ()

    def take(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Elsewhere`."""
        self.new, tokens = (keys, values), self._layer.length + keys.shape[2]
        key, value = (each.new_empty((*each.shape[:2], tokens, each.shape[3]), device="meta") for each in self.new)
        self._given = key, value
        return key, value

    def taken(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the new keys and values, if attention got the stand-ins.

        Raises:
            ModelError: it got something else.
        """
        if self.new is None or len(self._given) != 2 or keys is not self._given[0] or values is not self._given[1]:
            raise ModelError("its attention gets other keys and values than the cache has")
        return self.new


class Here(StandIns):
    """A use of a block that is run where the cache is in memory: attention reads it in place.

    `done` tells whether attention was asked.
    """

    def __init__(self, layer: TieredLayer, memory: torch.Tensor, *, loop: bool | None = None) -> None:
        super().__init__(layer)
        self.done = False
        self._memory, self._loop = memory, loop

    def attend(self, asked: AttentionCall, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """See `Use`."""
        self._layer.append(self._memory, *self.taken(keys, values))
        self.done = True
        return asked.on(self._layer, self._memory, loop=self._loop)


class Away(StandIns):
    """A use of a block that is run on a device, while the cache is in host memory.

    What the host needs goes into `carried` (uint8, on the device): query, new keys and values, mask; there the result comes
    back. In between the block `wait`s. `down_bytes` and `up_bytes` are those that are to be copied, once they are known.
    """

    def __init__(self, layer: TieredLayer, carried: torch.Tensor, wait: Callable[[], None]) -> None:
        super().__init__(layer)
        self.down_bytes = self.up_bytes = 0
        self._carried, self._wait = carried, wait
        self._asked: AttentionCall | None = None
        self._forms: list[tuple[torch.Size, torch.dtype]] = []
        self._result: tuple[torch.Size, torch.dtype] | None = None

    def attend(self, asked: AttentionCall, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """See `Use`."""
        parts = [asked.query, *self.taken(keys, values)]
        self._asked, sinks = asked, asked.arguments.get("s_aux")
        parts += [part for part in (asked.mask, sinks) if part is not None]
        self._forms = [(part.shape, part.dtype) for part in parts]
        for part, place in zip(parts, self._places(self._carried), strict=True):
            place.copy_(part)
        self._wait()
        assert self._result is not None, "the host has attended"
        return _as(self._carried, 0, *self._result)

    def on_host(self, carried: torch.Tensor, memory: torch.Tensor) -> None:
        """Attend to what is in `memory`, which gets the new keys and values; `carried` is the buffer's copy in host memory."""
        assert self._asked is not None, "the block waits"
        query, keys, values, *rest = self._places(carried)
        mask = rest.pop(0) if self._asked.mask is not None else None
        arguments = {name: value for name, value in self._asked.arguments.items() if not isinstance(value, torch.Tensor)}
        arguments |= {"s_aux": rest[0]} if rest else {}
        self._layer.append(memory, keys, values)
        found = replace(self._asked, query=query, mask=mask, arguments=arguments).on(self._layer, memory)
        self._result, self.up_bytes = (found.shape, found.dtype), found.nbytes
        _as(carried, 0, *self._result).copy_(found)

    def _places(self, carried: torch.Tensor) -> list[torch.Tensor]:
        found, start = [], 0
        for form in self._forms:
            found.append(_as(carried, start, *form))
            start = round_up(start + found[-1].nbytes, CARRIED_ALIGNMENT)
        self.down_bytes = start
        return found


def _as(carried: torch.Tensor, start: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in `carried`.

    Raises:
        ModelError: there is no room for it.
    """
    stop = start + shape.numel() * dtype.itemsize
    if stop > carried.numel():
        raise ModelError(f"generation: attention on the host is given {stop} bytes, {carried.numel()} are planned")
    return carried[start:stop].view(dtype).view(shape)


@contextmanager
def attending_here(block: nn.Module, layer: TieredLayer, memory: torch.Tensor, *, loop: bool | None = None) -> Iterator[None]:
    """While entered, `block` can be run on one token of each row; attention reads `layer`'s tokens in place, in `memory`.

    Raises:
        ModelError: at the end, if the block did not ask for attention in the way that it should.
    """
    here = Here(layer, memory, loop=loop)
    with named(block), using(here), layer.attended(here):
        yield
    if not here.done:
        raise ModelError("its attention does not go by way of transformers' AttentionInterface")


class Noting:
    """Computes attention as usual, and notes the bytes of queries and results."""

    def __init__(self) -> None:
        self.query_bytes = self.result_bytes = 0

    def attend(self, asked: AttentionCall, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """See `Use`."""
        found: torch.Tensor = asked.function(asked.module, asked.query, keys, values, asked.mask, **asked.arguments)[0]
        self.query_bytes += asked.query.nbytes
        self.result_bytes += found.nbytes
        return found
