"""Find out by trying whether prompts of an architecture can be kept, and continued, with the bits of prompts that are read.

Invariant: nothing is kept of an architecture whose tiny instance gave other bits with a kept beginning than alone.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from headrace.model.caches.border_bytes import border_from, bytes_of_border
from headrace.model.caches.borders import BlockBorder, ChunkBorder, cache_from, chunk_border_of
from headrace.model.caches.tiered_cache import cache_of
from headrace.model.parts.runner import Runner
from headrace.model.seats.generation_check import GREEDY, generated, only_row, ready_to_generate, seat_taps
from headrace.model.seats.seats import Seat, SeatTaps, parts_of_prompt
from headrace.model.trials.trial import Found, tried, unless_alike, why_other

_CHUNK, _LENGTH = 4, 14  # which exceeds all counts of tokens before the last chunk
# How many chunks each of three prompts has in common with the first, which is kept.
_COMMON = (0, 1, 3)
_WAY = {**GREEDY, "prefill_chunk_size": _CHUNK}


@tried
def why_not_prefixed(runner: Runner) -> str:
    """Return why beginnings of prompts of an architecture are not kept; "" if they may be.

    Chunks that pass each block one after the other, and kept ones that are written, read and continued, must give the bits of
    `generate` alone.
    """
    ready_to_generate(runner.model)
    generator = torch.Generator().manual_seed(2)
    high = runner.model.get_input_embeddings().weight.shape[0]
    prompts = list(torch.randint(3, high, (len(_COMMON), 1, _LENGTH), generator=generator))
    for prompt, common in zip(prompts, _COMMON, strict=True):
        prompt[:, : common * _CHUNK] = prompts[0][:, : common * _CHUNK]
    return why_other(
        lambda: [only_row(runner.model, _rows(prompt), _WAY, 0) for prompt in prompts],
        partial(_continued, runner, prompts),
        unless_alike("its bits differ behind a beginning that was kept"),
        own_fails="its own generate raises {}",
        fails="its code raises {} with a beginning that was kept",
    )


def _rows(prompt: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}


@torch.no_grad()
def _continued(runner: Runner, prompts: Sequence[torch.Tensor]) -> list[Found]:
    """Return what the prompts give, each with what it has in common with the first."""
    found, kept = list[Found](), list[ChunkBorder]()
    with seat_taps(runner, torch.no_grad) as taps:
        for prompt, common in zip(prompts, _COMMON, strict=True):
            result, borders = _one(runner, taps, prompt, kept[:common])
            found.append(result)
            kept = kept or [border_from(bytes_of_border(border)) for border in borders]
    return found


def _one(runner: Runner, taps: SeatTaps, prompt: torch.Tensor, kept: Sequence[ChunkBorder]) -> tuple[Found, list[ChunkBorder]]:
    """Return what one prompt behind `kept` gives, and the borders of the chunks that it reads."""
    way: dict[str, Any] = {**_WAY}
    if kept:
        way["past_key_values"] = cache_from(runner.model.config, kept, prompt.device)
    run = partial(generated, runner.model, _rows(prompt), way)
    seat = Seat(taps, run, 0, together=_LENGTH - len(kept) * _CHUNK)
    for own, block in zip(seat.kept, kept[-1].blocks if kept else (), strict=False):
        if own is not None:
            own.take(block.modules)
    try:
        seat.turn()
        new: list[list[BlockBorder]] = [[] for _ in seat.earlier]
        while not seat.done:
            for index in range(len(runner.blocks)):
                for number, part in enumerate(parts_of_prompt(seat)):
                    assert part.hidden is not None, "it is parked"
                    call = part.calls[index]
                    part.hidden = runner.block(index, part.hidden, call).hidden
                    if number < len(seat.earlier):
                        cache = cache_of(call)
                        layer = cache.layers[index] if cache is not None and index < len(cache.layers) else None
                        new[number].append(chunk_border_of(layer, (len(kept) + number) * _CHUNK, call.kept))
            seat.turn()
    finally:
        seat.close()
    return seat.result, [ChunkBorder(tuple(blocks)) for blocks in new]
