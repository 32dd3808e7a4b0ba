"""Keys and values that live elsewhere while their block does not run: a layer of transformers' cache that borrows its past.

Layers of a seat's cache that grow with each token, and do nothing else (full attention, grouped queries, latents), are replaced
by `TieredLayer`. Before a block runs, its layer is *lent* memory that holds the past token by token: keys and values of all
rows of one token, then of the next. So new tokens lie behind old ones, and only the new ones have to be brought back. Attention
is given copies in the layout that `DynamicLayer` gets by its own concatenation, so it computes the same bits.

Or attention of a new token is computed where the past lies (`seats/host_attention.py`). Then nothing is copied, and the block
gets stand-ins for keys and values.

With a code (`codec.cache_codes`) tokens lie coded. Attention is given decoded ones of the past, and a pass's own tokens as they
are. So what a pass computes depends on the code and on the passes before it, and not on where caches lie.

Windows, states of recurrent blocks and other kinds of layers stay transformers' own, in memory.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from headrace.codec.cache_codes import CacheCode
from headrace.model.blocks.taps import BlockCall
from headrace.terms.errors import ModelError

Shape = tuple[int, ...]
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class StoredForm:
    """How one token lies: the keys of all rows, then the values. Shapes are (rows, heads, dimension)."""

    dtype: torch.dtype
    key: Shape
    value: Shape

    @property
    def code_name(self) -> str:
        """The name of its code; "" without one."""
        return ""

    @property
    def token_bytes(self) -> int:
        """Bytes of a token."""
        return (prod(self.key) + prod(self.value)) * self.dtype.itemsize

    def views(self, lent: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values (rows, heads, tokens, dimension) of the first `tokens` tokens in `lent`, a uint8 tensor."""
        table = lent[: tokens * self.token_bytes].view(self.dtype).view(tokens, -1)
        parts = torch.split(table, [prod(self.key), prod(self.value)], dim=1)
        keys, values = (part.view(tokens, *shape) for part, shape in zip(parts, (self.key, self.value), strict=True))
        return keys.permute(1, 2, 0, 3), values.permute(1, 2, 0, 3)

    def put(self, lent: torch.Tensor, before: int, new: Pair) -> None:
        """Put the keys and values of new tokens behind the first `before` ones."""
        for place, each in zip(self.views(lent, before + new[0].shape[2]), new, strict=True):
            place[:, :, before:] = each

    def read(self, lent: torch.Tensor, tokens: int) -> Pair:
        """Return copies of the keys and values of the first `tokens` tokens."""
        keys, values = (each.clone(memory_format=torch.contiguous_format) for each in self.views(lent, tokens))
        return keys, values

    def with_new(self, lent: torch.Tensor, before: int, new: Pair) -> Pair:
        """Return what attention gets: keys and values of all tokens, once new ones have been `put` there."""
        return self.read(lent, before + new[0].shape[2])


@dataclass(frozen=True, slots=True)
class _CodedForm(StoredForm):
    """How one token lies coded: the keys of a row after those of another, then the values."""

    code: CacheCode

    @property
    def code_name(self) -> str:
        return self.code.name

    @property
    def token_bytes(self) -> int:
        return sum(self._line_bytes)

    @property
    def _line_bytes(self) -> tuple[int, int]:
        keys, values = (rows * self.code.coded_bytes(heads * width) for rows, heads, width in (self.key, self.value))
        return keys, values

    def views(self, lent: torch.Tensor, tokens: int) -> Pair:
        raise AssertionError("coded tokens are read as copies alone")

    def put(self, lent: torch.Tensor, before: int, new: Pair) -> None:
        for line, each in zip(self._lines(lent, before, before + new[0].shape[2]), new, strict=True):
            self.code.encode(each, line)

    def read(self, lent: torch.Tensor, tokens: int) -> Pair:
        return self._decoded(lent, tokens, tokens)

    def with_new(self, lent: torch.Tensor, before: int, new: Pair) -> Pair:
        found = self._decoded(lent, before, before + new[0].shape[2])
        for every, each in zip(found, new, strict=True):
            every[:, :, before:] = each
        return found

    def _decoded(self, lent: torch.Tensor, tokens: int, of: int) -> Pair:
        """Return keys and values with room for `of` tokens; the first `tokens` are decoded."""
        rows_of = ((*shape[:2], of, shape[2]) for shape in (self.key, self.value))
        keys, values = (torch.empty(shape, dtype=self.dtype, device=lent.device) for shape in rows_of)
        for line, into in zip(self._lines(lent, 0, tokens), (keys, values), strict=True):
            self.code.decode(line, into)
        return keys, values

    def _lines(self, lent: torch.Tensor, start: int, stop: int) -> Sequence[torch.Tensor]:
        """Return the coded keys and the coded values of these tokens (tokens, bytes)."""
        table = lent[start * self.token_bytes : stop * self.token_bytes].view(stop - start, self.token_bytes)
        return torch.split(table, list(self._line_bytes), dim=1)


def stored_form_of(pair: Pair, code: CacheCode | None = None) -> StoredForm:
    """Return how tokens with such keys and values (rows, heads, tokens, dimension) lie."""
    keys, values = ((rows, heads, width) for rows, heads, _, width in (each.shape for each in pair))
    return form_in(pair[0].dtype, keys, values, code)


def form_in(dtype: torch.dtype, key: Shape, value: Shape, code: CacheCode | None) -> StoredForm:
    """Return how a token lies in a code, or as it is."""
    return _CodedForm(dtype, key, value, code) if code else StoredForm(dtype, key, value)


class Elsewhere(Protocol):
    """Computes attention of a new token where the past lies, which is not where the block is run."""

    def take(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the new token's keys and values; return what stands for those of all tokens."""


class TieredLayer(DynamicLayer):  # type: ignore[misc]
    """A layer without tensors of its own. `length` is how many tokens it has, `before` how many it had before the last use.

    With a `code` they lie coded.
    """

    def __init__(self, code: CacheCode | None = None) -> None:
        super().__init__()
        self.code = code
        self.length = self.before = 0
        self._form: StoredForm | None = None
        self._lent: torch.Tensor | None = None
        self._elsewhere: Elsewhere | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all its tokens."""
        return self.length * self.token_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of a token; 0 before the first."""
        return self._form.token_bytes if self._form is not None else 0

    @contextmanager
    def lent(self, memory: torch.Tensor) -> Iterator[None]:
        """While entered, the layer can be used. `memory` (uint8, where compute is) holds its tokens, and takes the new ones."""
        self._lent, self.before = memory, self.length
        try:
            yield
        finally:
            self._lent = None

    @contextmanager
    def together(self) -> Iterator[None]:
        """While entered, uses follow one another; afterwards they count as one."""
        before = self.length
        try:
            yield
        finally:
            self.before = before

    @contextmanager
    def attended(self, elsewhere: Elsewhere) -> Iterator[None]:
        """While entered, `elsewhere` takes what is new."""
        self._elsewhere = elsewhere
        try:
            yield
        finally:
            self._elsewhere = None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Take keys and values (rows, heads, new tokens, dimension) and return those of all tokens.

        Raises:
            ModelError: there is no room for them.
        """
        if self._elsewhere is not None:
            return self._elsewhere.take(key_states, value_states)
        assert self._lent is not None, "a block is run with its cache at hand"
        return self.taken(self._lent, key_states, value_states)

    def taken(self, memory: torch.Tensor, key_states: torch.Tensor, value_states: torch.Tensor) -> Pair:
        """Do as `append`, and return what attention gets: keys and values of all tokens."""
        self.append(memory, key_states, value_states)
        return self.form.with_new(memory, self.before, (key_states, value_states))

    def append(self, memory: torch.Tensor, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Put new keys and values (rows, heads, new tokens, dimension) behind the others in `memory`.

        Raises:
            ModelError: there is no room for them.
        """
        if self._form is None:
            self.take_form(stored_form_of((key_states, value_states), self.code), key_states.device)
        self.before, self.length = self.length, self.length + key_states.shape[-2]
        if self.num_bytes > memory.numel():
            raise ModelError(
                f"generation: {self.length} tokens of a block's keys and values take {self.num_bytes} bytes, "
                f"{memory.numel()} are planned; a row grew longer than planned"
            )
        self.form.put(memory, self.before, (key_states, value_states))

    def take_form(self, form: StoredForm, device: torch.device) -> None:
        """Settle how its tokens lie."""
        self._form, self.dtype, self.device, self.is_initialized = form, form.dtype, device, True

    @property
    def form(self) -> StoredForm:
        """How its tokens lie; it has some."""
        assert self._form is not None, "it has tokens"
        return self._form

    def views(self, memory: torch.Tensor) -> Pair:
        """Return its keys and values (rows, heads, tokens, dimension) in `memory`, without copying them."""
        return self.form.views(memory, self.length)

    def read(self, memory: torch.Tensor) -> Pair:
        """Return copies of its keys and values as the next pass gets them."""
        return self.form.read(memory, self.length)

    def get_seq_length(self) -> int:
        """Return how many tokens it has."""
        return self.length

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse: tokens that have been moved away are not taken back."""
        raise ModelError("generation: tokens are taken back from a cache that is not in memory")

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Refuse: rows that have been moved away are not exchanged."""
        raise ModelError("generation: rows are exchanged in a cache that is not in memory")

    batch_repeat_interleave = batch_select_indices = reorder_cache


def can_be_tiered(layer: Any) -> bool:
    """Return whether a layer of a cache grows with each token and does nothing else."""
    return type(layer) in (DynamicLayer, TieredLayer)


def tier_layers(calls: Sequence[BlockCall], blocks: Sequence[int], code: CacheCode | None = None) -> dict[int, TieredLayer]:
    """Put tiered layers into the cache with which blocks are called, which is still empty; return them by block (from 0).

    `blocks` are the blocks to do this for. Those that are called without a layer, or with one of another kind, keep theirs.
    Layers that are tiered already are returned, too.
    """
    found = {}
    for block in blocks:
        cache = cache_of(calls[block])
        if cache is not None and block < len(cache.layers) and can_be_tiered(layer := cache.layers[block]):
            found[block] = cache.layers[block] = layer if isinstance(layer, TieredLayer) else TieredLayer(code)
    return found


def token_bytes_of(layer: DynamicLayer, code: CacheCode) -> int:
    """Return the bytes of a token of all rows that code gives, of a layer like this, which has tokens."""
    return sum(each.shape[0] * code.coded_bytes(each.shape[1] * each.shape[3]) for each in (layer.keys, layer.values))


def cache_of(call: BlockCall) -> Any:
    """Return the cache with which a block is called, None where there is none."""
    return next((value for value in (*call.args, *call.kwargs.values()) if isinstance(value, Cache)), None)
