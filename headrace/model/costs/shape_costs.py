"""A model's parts run on fake tensors: prologue, blocks and loss, each with the peak of live bytes and its operations."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch

from headrace.model.blocks.call_tensors import call_bytes, tensors_of
from headrace.model.blocks.chain_values import MicroBatch, PrologueResult
from headrace.model.blocks.on_shapes import either_answer, outline
from headrace.model.blocks.taps import Handed
from headrace.model.chain.chain import Chain
from headrace.model.costs.cost_meter import CostMeter
from headrace.model.costs.parted_costs import PartedOnShapes
from headrace.model.parts.head_rows import kept_tokens
from headrace.model.parts.stored_rows import rows_within
from headrace.terms.costs import ATTENTION, BlockCosts, ModelCosts

# Chunk sizes (positions) for which the epilogue is tried: its peak is the larger of a growing part and a constant one.
_LOSS_CHUNKS = (16, 64, 128, 256, 512, 1024, 2048)


def costs_on_shapes(
    chain: Chain, sequences: int, length: int, other: ModelCosts | None, *, on_gpu: bool, huge_pages: bool | None
) -> ModelCosts:
    """Measure what a profile has. Weights, hidden states and calls have rows of their own in a plan, and are no workspace.

    On a CPU they are counted all the same. A workspace that includes them was the measure for two shares: what libraries make
    of an operator's inputs (repacked weights), and what the C library keeps (docs/log/unplanned-memory).
    """

    def meter(*besides: torch.Tensor) -> CostMeter:
        return CostMeter(chain.wide_products, besides if on_gpu else (), huge_pages=huge_pages)

    batch = batch_on_shapes(chain, sequences, length, positions=chain.packs_by_masks)
    ids = batch.input_ids
    flats = {
        unit: torch.zeros(chain.layouts[unit].num_elements, dtype=chain.dtype, device=chain.device)
        for unit in _residents(chain)
    }
    for unit, flat in flats.items():
        chain.bind(unit, flat, None)
    try:
        result, prologue, prologue_backward = _profile_prologue(chain, batch, flats, meter)
        blocks, final = _profile_blocks(chain, result.hidden, result.calls, meter)
        # One chunk at least as large as the micro-batch is enough: larger ones would give the same.
        chunks = [tokens for index, tokens in enumerate(_LOSS_CHUNKS) if not index or _LOSS_CHUNKS[index - 1] < ids.numel()]
        known = dict(other.epilogue_workspace_bytes) if other else {}
        tried: dict[int, CostMeter] = {}

        def loss(tokens: int) -> CostMeter:
            return tried.setdefault(tokens, _profile_loss(chain, final, ids, tokens, meter))

        losses = peaks_of_chunks([tokens for tokens in chunks if tokens not in known], loss)
    finally:
        for unit in flats:
            chain.release(unit)
    epilogue = chain.layouts[-1] if chain.has_epilogue_unit else None
    return ModelCosts(
        name=type(chain.model).__name__,
        compute_dtype=chain.compute_dtype,
        sequences=sequences,
        length=length,
        # All residual streams count, where a token has several.
        hidden_size_bytes=result.hidden[0, 0].numel() * max(result.hidden.element_size(), final.element_size()),
        prologue_parameters=chain.layouts[0].num_parameters,
        epilogue_parameters=epilogue.num_parameters if epilogue else 0,
        tied=chain.tied,
        blocks=blocks,
        prologue_workspace_bytes=prologue.peak_bytes,
        prologue_backward_workspace_bytes=prologue_backward.peak_bytes,
        epilogue_workspace_bytes=tuple((tokens, known.get(tokens) or losses[tokens]) for tokens in chunks),
        epilogue_flops_per_token=other.epilogue_flops_per_token if other else tried[chunks[0]].flops / chunks[0] / 3,
        call_bytes=call_bytes(result.calls, sequences if chain.packs(length) else 1),
        wide_products=chain.wide_products,
        head_rows=chain.head_rows,
        kept_logit_tokens=kept_tokens(chain.vocabulary, chain.dtype.itemsize) if chain.head_rows else 0,
        by_samples=chain.runs_by_samples(length),
        by_exact_lengths=chain.groups_exactly(length),
    )


def batch_on_shapes(chain: Chain, sequences: int, length: int, *, positions: bool) -> MicroBatch:
    """Return rows (sequences, length) as the chain gets them, without values. `positions`: packed rows bring theirs.

    Rows of models that cannot pack are padded; a fake mask has no values, so it cannot show that it hides nothing. Rows that
    are run sample by sample may be padded, too; where they are not, they take less. Positions would say where samples begin.
    """
    ids = torch.zeros((sequences, length), dtype=torch.int64, device=chain.device)
    if not chain.packs(length) or chain.runs_by_samples(length):
        return MicroBatch(ids, ids, torch.ones_like(ids))
    places = torch.arange(length, device=chain.device).expand(sequences, length).contiguous() if positions else None
    return MicroBatch(ids, ids, None, places)


def _profile_prologue(
    chain: Chain, batch: MicroBatch, flats: Mapping[int, torch.Tensor], meter: Callable[..., CostMeter]
) -> tuple[PrologueResult, CostMeter, CostMeter]:
    """Return what the prologue gives, and its figures without a graph and with a backward; it stays bound to `flats`."""
    with torch.no_grad(), meter(*flats.values()) as prologue:
        result = either_answer(lambda: chain.prologue(batch), lambda start: start.calls)
    chain.release(0)
    chain.bind(0, flats[0], None if chain.adapters else lambda parameter, gradient: None)
    with meter(*flats.values()) as backward:
        again = either_answer(lambda: chain.prologue(batch), lambda start: start.calls)
        if again.hidden.requires_grad:
            again.hidden.backward(torch.zeros_like(again.hidden))  # type: ignore[no-untyped-call]
    return result, prologue, backward


def _residents(chain: Chain) -> tuple[int, ...]:
    return (0, chain.num_blocks + 1) if chain.has_epilogue_unit else (0,)


def _profile_blocks(
    chain: Chain, hidden: torch.Tensor, calls: tuple[Any, ...], meter: Callable[..., CostMeter]
) -> tuple[tuple[BlockCosts, ...], torch.Tensor]:
    """Return the costs of each block and the final hidden states: some models begin in bfloat16 and go on in float32."""
    known: dict[object, tuple[BlockCosts, torch.Tensor, tuple[Any, ...]]] = {}
    costs = []
    for index in range(chain.num_blocks):
        layout = chain.layouts[index + 1]
        call = calls[index]
        shapes = tuple((parameter.name.split(".")[-2:], parameter.shape) for parameter in layout.parameters)
        values = [*call.args, *(call.kwargs[name] for name in sorted(call.kwargs))]
        # Blocks of one shape that get the same objects cost the same; two kinds of masks make two kinds of blocks.
        key = (
            str(shapes),
            _adapted_shapes(chain, index + 1),
            tuple(rows.weight.shape for rows in rows_within(chain.runner.blocks[index])),
            hidden.dtype,
            tuple(_identity(value) for value in values),
            tuple(hand is not None for hand in call.hands),
        )
        if key not in known:
            left = _profile_block(chain, index, hidden, call, meter)
            known[key] = (*left, tuple(hand.value if hand else None for hand in call.hands))
        block, hidden, handed = known[key]
        for hand, value in zip(call.hands, handed, strict=True):
            if hand is not None:
                hand.value = value
        costs.append(block)
    return tuple(costs), hidden


def _identity(value: Any) -> object:
    if isinstance(value, Handed):
        return ("handed", str(outline(value.value)))
    return value if isinstance(value, bool | int | str) else id(value)


def _profile_block(
    chain: Chain, index: int, hidden: torch.Tensor, call: Any, meter: Callable[..., CostMeter]
) -> tuple[BlockCosts, torch.Tensor]:
    layout = chain.layouts[index + 1]
    flat = torch.zeros(layout.num_elements, dtype=chain.dtype, device=chain.device)
    chain.bind(index + 1, flat, None)
    beside = _bind_adapters(chain, index + 1, learns=False)
    given = (hand.value for hand in call.gets if isinstance(hand.value, torch.Tensor))
    parted = PartedOnShapes.of(chain, index)
    existing = (flat, *beside, hidden, *tensors_of((call,)), *given, *(parted.weights.values() if parted else ()))
    tables = rows_within(chain.runner.blocks[index])
    before = [rows.asked for rows in tables]
    with torch.no_grad(), meter(*existing) as forward, parted.measured_by(forward) if parted else nullcontext():
        left = chain.block(index, hidden, call).hidden
    asked = tuple(rows.asked - earlier for rows, earlier in zip(tables, before, strict=True))
    after = torch.zeros_like(left)  # a storage of its own: a view would keep the larger one alive
    del left
    chain.release(index + 1)
    chain.bind(index + 1, flat, None if chain.adapters else lambda parameter, gradient: None)
    existing = (*existing, *_bind_adapters(chain, index + 1, learns=True))
    try:
        leaf = hidden.detach().requires_grad_()
        with meter(*existing) as backward, parted.measured_by(backward) if parted else nullcontext():
            out = chain.block(index, leaf, call)
            recomputed = [operator.name for operator in backward.operators]
            gradient = torch.zeros_like(out.hidden)
            if parted is not None:
                parted.backward(out.hidden, gradient)
            out.hidden.backward(gradient)  # type: ignore[no-untyped-call]
            del out, gradient
    finally:
        chain.release(index + 1)
        if chain.adapters is not None:
            chain.adapters.release(index + 1)
    # Where values decide how many operators run, ordinals mean nothing.
    operators = [] if forward.by_values or parted else forward.operators
    if operators and [operator.name for operator in operators] != recomputed:
        # With a graph it takes another path, as attention with a trained bias does: ordinals differ there.
        operators = [replace(operator, must_run=True) for operator in operators]
    costs = BlockCosts(
        num_elements=layout.num_elements,
        num_parameters=layout.num_parameters,
        forward_flops=forward.flops + (parted.more_flops if parted else 0.0),
        forward_workspace_bytes=forward.peak_bytes,
        backward_workspace_bytes=backward.peak_bytes,
        operators=tuple(operators),
        attention_flops=sum(operator.flops for operator in forward.operators if operator.name == ATTENTION),
        waiting_bytes=parted.waiting_bytes if parted else (0, 0),
        waiting_alone_bytes=parted.waiting_alone_bytes if parted else 0,
        choices=parted.choices if parted else 0,
        asked_rows=asked,
    )
    return costs, after


def _adapted_shapes(chain: Chain, unit: int) -> str:
    layout = chain.adapters.layouts.get(unit) if chain.adapters is not None else None
    return str([(spec.name.split(".")[-3:], spec.shape) for spec in layout.parameters] if layout else None)


def _bind_adapters(chain: Chain, unit: int, *, learns: bool) -> tuple[torch.Tensor, ...]:
    """Bind the adapters of a unit, if it has some, to zeros; return these tensors."""
    if chain.adapters is None or unit not in chain.adapters.layouts:
        return ()
    layout = chain.adapters.layouts[unit]
    flat = torch.zeros(layout.num_elements, dtype=torch.float32, device=chain.device)
    chain.adapters.bind(unit, layout, flat, (lambda parameter, gradient: None) if learns else None)
    return (flat,)


def _profile_loss(
    chain: Chain, hidden: torch.Tensor, ids: torch.Tensor, tokens: int, meter: Callable[..., CostMeter]
) -> CostMeter:
    """Run the epilogue on a chunk of `tokens` positions of one row, with gradients."""
    try:
        return _profile_chunk(chain, hidden, ids, (1, tokens), meter)
    except RuntimeError:
        length = ids.shape[1]
        if tokens <= length:
            raise
        # A table of positions may end before so many tokens; no step has rows longer than those here.
        return _profile_chunk(chain, hidden, ids, (-(-tokens // length), length), meter)


def _profile_chunk(
    chain: Chain, hidden: torch.Tensor, ids: torch.Tensor, shape: tuple[int, int], meter: Callable[..., CostMeter]
) -> CostMeter:
    part = hidden.new_zeros((*shape, *hidden.shape[2:])).requires_grad_()
    some = ids.new_zeros(shape)
    flats = []
    for unit in _residents(chain):
        flat = torch.zeros(chain.layouts[unit].num_elements, dtype=chain.dtype, device=chain.device)
        flats.append(flat)
        chain.release(unit)
        sink = None if chain.adapters else lambda parameter, gradient: None
        chain.bind(unit, flat, sink, rows=lambda parameter, gradient, start: None)
        flats += _bind_adapters(chain, unit, learns=True)
    used = meter(*flats)
    try:
        with used:
            chain.loss_sum(some, part, some).backward()  # type: ignore[no-untyped-call]
    finally:
        if chain.adapters is not None:
            for unit in _residents(chain):
                chain.adapters.release(unit)
    return used


# Chunks that are run besides the first before it is known whether the others have to be run.
_TRIED = 3


def peaks_of_chunks(chunks: Sequence[int], run: Callable[[int], CostMeter]) -> dict[int, int]:
    """Return the peak of each of `chunks`, which are in rising order, after `run` on some or all of them.

    A run makes and frees tensors in some order, mostly the same for chunks of all sizes. Each tensor's size is a polynomial of
    second degree in the tokens of the chunk, because masks grow with the square. Then three runs give all sizes. Invariant: a
    peak is that of a run; or four runs had the same order, and three of them predicted all sizes of the fourth.
    """
    most = len(chunks) - 1
    tried = dict.fromkeys(chunks[most * part // _TRIED] for part in range(_TRIED + 1)) if chunks else {}
    found = {tokens: run(tokens) for tokens in tried}
    peaks = {}
    for tokens in chunks:
        peak_bytes = found[tokens].peak_bytes if tokens in found else _between(found, tokens)
        peaks[tokens] = run(tokens).peak_bytes if peak_bytes is None else peak_bytes
    return peaks


def _between(known: Mapping[int, CostMeter], tokens: int) -> int | None:
    """Return the peak on a chunk of `tokens` as predicted by the `known` runs, None if they do not predict it."""
    meters = list(known.values())
    if any(meter.history != meters[0].history for meter in meters):
        return None
    sizes = []
    for samples in zip(*(meter.storages for meter in meters), strict=True):
        *points, last = zip(known, samples, strict=True)
        size = _polynomial(points, tokens)
        if size.denominator != 1 or _polynomial(points, last[0]) != last[1]:
            return None
        sizes.append(int(size))
    return meters[0].peak_bytes_of(sizes)


def _polynomial(points: Sequence[tuple[int, int]], at: int) -> Fraction:
    """Return the value `at` of the polynomial of least degree through `points` (Lagrange's form)."""
    total = Fraction(0)
    for place, value in points:
        others = [other for other, _ in points if other != place]
        total += Fraction(value * math.prod(at - other for other in others), math.prod(place - other for other in others))
    return total
