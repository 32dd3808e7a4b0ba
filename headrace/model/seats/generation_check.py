"""Find out by trying whether an architecture generates block by block what its own `generate` generates.

Invariant: no architecture is used whose tiny instance gave other bits than transformers' own loop.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from headrace.model.blocks.find_blocks import check_architecture
from headrace.model.blocks.taps import BlockCall
from headrace.model.caches.stored_layer import StoredLayer
from headrace.model.caches.tiered_cache import tier_layers
from headrace.model.kernels.narrow import NarrowProducts
from headrace.model.parts.runner import Runner, left_as_found
from headrace.model.seats.host_attention import attending_here
from headrace.model.seats.seats import Seat, SeatTaps
from headrace.model.trials.trial import Found, furthest, tried, why_other
from headrace.terms.errors import ModelError

_NEW_TOKENS = 4
# Tokens of the prompts and how many of them are padding; the long one exceeds all counts of tokens before it is whole.
_LENGTHS, _LONG = ((11, 4), (9, 2)), (14, 4)
# Large enough for the keys and values of a tiny instance's block.
_LENT_BYTES = 1 << 20
_SEEDS = (3, 4)
# Logits of tiny instances are about 2; rounding in float32 made them differ by 7e-7 at most (27 architectures).
_CHUNKS_DIFFER = 1e-4
GREEDY: Mapping[str, Any] = {"do_sample": False}
_SAMPLED: Mapping[str, Any] = {"do_sample": True, "temperature": 0.8, "top_p": 0.9}
_CHUNKED: Mapping[str, Any] = {**GREEDY, "prefill_chunk_size": 4}
# The name of tokens in what is found, beside those of logits.
_TOKENS = "tokens"


def check_generation(config: Any) -> None:
    """Generate with two interleaved micro-batches of padded rows on a tiny instance, greedily and sampled, block by block.

    Raises:
        ModelError: tokens or logits differ from `generate`'s own in any bit, or the model cannot be run so; the message says
            why.
    """
    check_architecture(config)
    if reason := _why_other_tokens(config):
        raise ModelError(f"{type(config).__name__}: cannot generate block by block: {reason}")


def why_not_tiered(config: Any) -> str:
    """Return why keys and values of this architecture have to stay in memory; "" if they need not.

    The check is the one above, but keys and values leave memory between two uses of a block, and come back as bytes.
    """
    return _why_other_tokens(config, tiered=True)


def why_not_attended(config: Any) -> str:
    """Return why attention of this architecture is not computed on the host; "" if it may be.

    Where the host calls the same function, a tiny instance must give the bits of its own `generate`. The host's own loop rounds
    otherwise, so there the logits must be about the same.
    """
    return _why_other_tokens(config, tiered=True, attended="same") or _why_other_tokens(config, tiered=True, attended="loop")


def why_not_narrow(config: Any) -> str:
    """Return why products of few rows are not computed by the loop of our own in this architecture; "" if they may be.

    A tiny instance in bfloat16 must give the bits of its own `generate`, both with that loop.
    """
    return _why_other_tokens(config, narrow=True)


def why_not_recomputed(config: Any) -> str:
    """Return why prompts of this architecture are not kept as inputs of its blocks; "" if they may be.

    The check is that of `why_not_tiered`, with keys and values of prompts made again for each use, of whole prompts and chunks.
    """
    return _why_other_tokens(config, tiered=True, by_inputs=True, chunked=not why_not_chunked(config))


@tried
def why_not_chunked(runner: Runner) -> str:
    """Return why prompts of an architecture are not taken in chunks; "" if they may be.

    transformers' own loop over chunks must give the logits of whole prompts, but for rounding: products have other shapes.
    """
    ready_to_generate(runner.model)
    rows = _micro_batches(runner, [_LONG])[0]

    def differing(whole: Found, chunked: Found) -> str:
        differs = max(furthest(one, chunked[name]) for name, one in whole.items() if name != _TOKENS)
        return f"its logits then differ by {differs:.2g}" if differs > _CHUNKS_DIFFER else ""

    whole, chunked = ((lambda way=way: [only_row(runner.model, rows, way, 0)]) for way in (GREEDY, _CHUNKED))
    return why_other(whole, chunked, differing, fails="its own generate raises {} then")


def ready_to_generate(model: Any) -> None:
    """Prepare a model of transformers for generating: evaluation, with a cache, experts one by one.

    Without this, `generate` on a GPU would change how experts are computed for the whole model, and so for all seats.
    """
    model.eval()
    model.config.use_cache = True
    with contextlib.suppress(ValueError):  # the model has no experts, or computes them in its own way
        model.set_experts_implementation("eager")


def seat_taps(runner: Runner, context: Any) -> SeatTaps:
    """Return the taps of a runner's blocks."""
    return SeatTaps(runner.blocks, runner.outside, runner.tuple_length, context, runner.takes)


@tried
def _why_other_tokens(
    runner: Runner,
    *,
    tiered: bool = False,
    attended: str = "",
    by_inputs: bool = False,
    narrow: bool = False,
    chunked: bool = False,
) -> str:
    ready_to_generate(runner.model)
    arithmetic: Callable[[], Any] = contextlib.nullcontext
    if narrow:
        arithmetic = NarrowProducts
        for parameter in runner.model.parameters():  # buffers are float32 in models of bfloat16, too
            parameter.data = parameter.data.bfloat16()

    def own(way: Mapping[str, Any]) -> list[Found]:
        with arithmetic():
            return [only_row(runner.model, rows, way, seed) for rows, seed in zip(_micro_batches(runner), _SEEDS, strict=True)]

    def ours(way: Mapping[str, Any]) -> list[Found]:
        return _block_by_block(runner, way, tiered, attended, by_inputs, arithmetic)

    def differing(expected: Found, found: Found) -> str:
        if not torch.equal(expected[_TOKENS], found[_TOKENS]):
            return "tokens differ from those of its own generate"
        for name, logits in expected.items():
            differs = furthest(logits, found[name])
            if differs > _CHUNKS_DIFFER if attended == "loop" else not torch.equal(logits, found[name]):
                return f"logits differ from those of its own generate by {differs:.2g}"
        return ""

    words = {
        "own_fails": "its own generate raises {}",
        "fails": "its code raises {} there and not in its own generate",
    }
    ways = (GREEDY, _SAMPLED, *([_CHUNKED] if chunked else []))
    return next(filter(None, (why_other(partial(own, way), partial(ours, way), differing, **words) for way in ways)), "")


def _micro_batches(runner: Runner, lengths: Sequence[tuple[int, int]] = _LENGTHS) -> list[dict[str, torch.Tensor]]:
    """Return micro-batches of two rows each, the second row padded on its left: `lengths` and paddings."""
    generator = torch.Generator().manual_seed(2)
    high = runner.model.get_input_embeddings().weight.shape[0]
    batches = []
    for length, padding in lengths:
        ids = torch.randint(3, high, (2, length), generator=generator)
        mask = torch.ones_like(ids)
        ids[1, :padding], mask[1, :padding] = 0, 0
        batches.append({"input_ids": ids, "attention_mask": mask})
    return batches


def generated(model: Any, rows: Mapping[str, torch.Tensor], way: Mapping[str, Any]) -> Found:
    """Return the tokens and the logits of each new one that a model's own `generate` gives in a `way`."""
    asked = {"max_new_tokens": _NEW_TOKENS, "pad_token_id": 0, "eos_token_id": None, "use_cache": True}
    out = model.generate(**rows, **asked, return_dict_in_generate=True, output_logits=True, **way)
    return {_TOKENS: out.sequences, **{f"logits {place}": logits for place, logits in enumerate(out.logits)}}


def only_row(model: Any, rows: Mapping[str, torch.Tensor], way: Mapping[str, Any], seed: int) -> Found:
    """Return what a fresh model generates by itself: rotary tables that grow stay large until a short row comes."""
    with torch.random.fork_rng(devices=[]), left_as_found(model.modules()):
        torch.manual_seed(seed)
        return generated(model, rows, way)


def _block_by_block(
    runner: Runner, way: Mapping[str, Any], tiered: bool, attended: str, by_inputs: bool, arithmetic: Callable[[], Any]
) -> list[Found]:
    with seat_taps(runner, arithmetic) as taps, torch.no_grad(), arithmetic():
        seats = [
            Seat(taps, partial(generated, runner.model, rows, way), seed)
            for rows, seed in zip(_micro_batches(runner), _SEEDS, strict=True)
        ]
        try:
            for seat in seats:
                seat.turn()
            caches = {seat: _BytesAlone(seat, runner, attended, by_inputs) for seat in seats} if tiered else {}
            while live := [seat for seat in seats if not seat.done]:
                for index in range(len(runner.blocks)):
                    for seat in live:
                        assert seat.hidden is not None, "it is parked"
                        with (
                            caches[seat].at_hand(index, seat.hidden, seat.calls[index]) if tiered else contextlib.nullcontext()
                        ):
                            seat.hidden = runner.block(index, seat.hidden, seat.calls[index]).hidden
                for seat in live:
                    seat.turn()
        finally:
            for seat in seats:
                seat.close()
    return [seat.result for seat in seats]


class _BytesAlone:
    """The caches of a seat's blocks as bytes; only those of the block that is run are in memory.

    `attended`: how new tokens are attended to there, by the "same" function as ever or by the "loop" of the host; "": as ever.
    With `by_inputs` bytes of a prompt are inputs of the blocks.
    """

    def __init__(self, seat: Seat, runner: Runner, attended: str, by_inputs: bool) -> None:
        self._runner, self._attended = runner, attended
        layers = tier_layers(seat.calls, range(len(seat.calls)))
        self._layers = {block: StoredLayer(layer, by_inputs=by_inputs) for block, layer in layers.items()}
        self._kept = dict.fromkeys(self._layers, b"")

    @contextlib.contextmanager
    def at_hand(self, block: int, hidden: torch.Tensor, call: BlockCall) -> Iterator[None]:
        if block not in self._layers:
            yield
            return
        stored, memory = self._layers[block], torch.full((_LENT_BYTES,), 255, dtype=torch.uint8)
        stored.place()
        past = bytearray(self._kept[block])
        if past:
            memory[stored.start :][: len(past)] = torch.frombuffer(past, dtype=torch.uint8)
        stored.recompute(memory, hidden, call, lambda given, again: self._runner.block(block, given, again))
        if self._attended and past:
            use = attending_here(self._runner.blocks[block], stored.layer, memory, loop=self._attended == "loop")
        else:
            use = stored.used(memory, hidden, call)
        with use:
            yield
        new = memory[stored.start :][stored.bytes_before : stored.num_bytes].numpy().tobytes()
        self._kept[block] = self._kept[block] + new
