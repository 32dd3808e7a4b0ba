"""What a prompt leaves in caches at the border of a chunk: copied when it is reached, and given to another prompt later.

Layers that grow with each token leave the chunk's own tokens. All others (windows, states of recurrent blocks and of
convolutions) leave all they hold, and so do modules that keep something. All of it lies on the host in copies.
"""

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

from headrace.codec.cache_codes import CacheCode
from headrace.model.blocks.taps import Kept
from headrace.model.caches.tiered_cache import StoredForm, TieredLayer, stored_form_of

_Host = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class BlockBorder:
    """One block's: the chunk's `tokens` (uint8) as they lie in this `form`, or else a layer's whole `state`. `modules` is what
    the block's modules keep.
    """

    form: StoredForm | None
    tokens: torch.Tensor | None
    state: dict[str, Any]
    modules: list[Any]


@dataclass(frozen=True, slots=True)
class ChunkBorder:
    """All blocks' at one border."""

    blocks: tuple[BlockBorder, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(
            tensor.nbytes for tensor in tensors_within([[each.tokens, each.state, each.modules] for each in self.blocks])
        )


def chunk_border_of(layer: Any, before: int, kept: Kept | None, memory: torch.Tensor | None = None) -> BlockBorder:
    """Return what a chunk leaves in a block, of whose cache `layer` is; `before` tokens lay before the chunk.

    `memory` has the tokens of a tiered layer. A block without a layer leaves what its modules keep.
    """
    modules = kept.copied(on_host) if kept is not None else []
    if isinstance(layer, TieredLayer):
        assert memory is not None, "a tiered layer has no tokens of its own"
        size = layer.form.token_bytes
        return BlockBorder(layer.form, on_host(memory[before * size : layer.length * size]), {}, modules)
    if type(layer) is DynamicLayer and layer.get_seq_length():
        new = layer.keys[:, :, before:], layer.values[:, :, before:]
        form = stored_form_of(new)
        tokens = torch.empty(new[0].shape[2] * form.token_bytes, dtype=torch.uint8, device=new[0].device)
        form.put(tokens, 0, new)
        return BlockBorder(form, tokens.cpu(), {}, modules)
    return BlockBorder(None, None, map_tensors(dict(vars(layer)), on_host) if layer is not None else {}, modules)


def cache_from(
    config: Any,
    borders: Sequence[ChunkBorder],
    device: torch.device,
    tiered: Collection[int] = (),
    code: CacheCode | None = None,
) -> Cache:
    """Return the cache of a model of `config` behind the last of consecutive borders.

    Blocks `tiered` (from 0) get layers without tokens, which lie as `tokens_between_borders` says.
    """
    cache = DynamicCache(config=config.get_text_config(decoder=True))
    for block, layer in enumerate(cache.layers):
        last = borders[-1].blocks[block]
        if last.form is None:
            vars(layer).update(map_tensors(last.state, lambda each: each.to(device, copy=True)))
            continue
        tokens, form = tokens_between_borders(borders, block), last.form
        count = tokens.numel() // form.token_bytes
        if block in tiered:
            cache.layers[block] = layer = TieredLayer(code)
            layer.take_form(form, device)
            layer.length = layer.before = count
        else:
            layer.keys, layer.values = form.read(tokens.to(device), count)
            layer.dtype, layer.device, layer.is_initialized = form.dtype, device, True
    return cache


def tokens_between_borders(borders: Sequence[ChunkBorder], block: int) -> torch.Tensor:
    """Return the tokens of a block (from 0) as they lie, uint8; none where its layer does not grow."""
    return torch.cat(
        [tokens for each in borders if (tokens := each.blocks[block].tokens) is not None] or [torch.empty(0, dtype=torch.uint8)]
    )


def ahead(layer: Any, tokens: int) -> Any:
    """Return a stand-in for a layer of a cache that says it has so many tokens more, and has none."""
    found = copy.copy(layer)
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        found.has_previous_state = dict.fromkeys(layer.has_previous_state, True)
    if isinstance(layer, TieredLayer):
        found.length += tokens
    elif isinstance(layer, DynamicLayer):
        whole = layer.get_seq_length() + tokens
        found.keys = found.values = torch.zeros((), dtype=torch.float32).expand(1, 1, whole, 1)
        found.is_initialized = True
        if hasattr(layer, "cumulative_length"):
            found.cumulative_length = whole
    return found


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory."""
    return tensor.to(_Host, copy=True)


def tensors_within(value: Any) -> list[torch.Tensor]:
    """Return all tensors in nested dictionaries, lists and tuples."""
    found: list[torch.Tensor] = []
    map_tensors(value, found.append)
    return found


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return `value` with each tensor in nested dictionaries, lists and tuples replaced by what `change` makes of it."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: map_tensors(inner, change) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(inner, change) for inner in value)
    return value
