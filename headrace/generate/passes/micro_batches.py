"""The input and output of a generator: micro-batches of prompts, and their answers."""

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from headrace.generate.passes.opened import end_tokens


class Together(Protocol):
    """Rows that go through the model together."""

    @property
    def rows(self) -> Sized:
        """The rows."""


@dataclass(frozen=True, slots=True)
class SeatRows:
    """Rows of token ids that are generated together; `settings` are arguments of transformers' `generate`.

    `number` belongs to the caller. Random numbers begin at `seed`, as after `torch.manual_seed(seed)`. `passed` is that of a
    `Seat`; whoever gives it needs all positions of the prompt, so none may be left out because its keys are there already.
    With an `owner` it is one row, whose beginning is kept for rows of the same owner.
    """

    number: int
    rows: tuple[tuple[int, ...], ...]
    seed: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    passed: Callable[[torch.Tensor], None] | None = None
    owner: Hashable = None

    @property
    def length(self) -> int:
        """Tokens of the longest row."""
        return max(map(len, self.rows))


@dataclass(frozen=True, slots=True)
class Generated:
    """The result of a micro-batch: per row the new tokens, without padding; `raw` is what `generate` returned.

    `error` is what it raised instead, where errors are contained. `cached` tokens of its prompt were not read.
    """

    batch: SeatRows
    tokens: tuple[tuple[int, ...], ...]
    raw: Any
    error: Exception | None = None
    cached: int = 0


def kept_copies(settings: Mapping[str, Any]) -> int:
    """Return how many caches per row stay where compute is, because rows are exchanged or tokens taken back; else 0."""
    config = settings["generation_config"]
    copies = max(config.num_beams or 1, config.num_return_sequences or 1)
    taken_back = settings.get("assistant_model") is not None or bool(config.prompt_lookup_num_tokens)
    return copies if copies > 1 or taken_back else 0


def in_chunks(batch: SeatRows, chunk: int) -> Any:
    """Return the configuration of a micro-batch, with chunks of prompts (0: none) unless it has some of its own."""
    config = batch.settings["generation_config"]
    if chunk and batch.length > chunk and config.prefill_chunk_size is None and not kept_copies(batch.settings):
        config = copy.copy(config)
        config.prefill_chunk_size = chunk
    return config


def generated_of(batch: SeatRows, raw: Any, cached: int) -> Generated:
    """Return the result of a micro-batch whose `generate` returned or raised `raw`."""
    if isinstance(raw, Exception):
        return Generated(batch, (), None, raw)
    sequences = raw if isinstance(raw, torch.Tensor) else raw.sequences
    config = batch.settings["generation_config"]
    tokens = tuple(until_end(row, config) for row in sequences[:, batch.length :].tolist())
    return Generated(batch, tokens, raw, cached=cached)


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
