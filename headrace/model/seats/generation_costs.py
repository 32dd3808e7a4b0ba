"""What generation costs: a seat's first pass and the next, from shapes alone, and the bytes of its cache.

As in `cost_profile`, the model's own code runs on fake tensors. Caches are transformers' own, whatever a block keeps in them:
keys and values, latents, windows, states.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DynamicCache

from headrace.codec.cache_codes import CacheCode
from headrace.model.blocks.call_tensors import call_bytes, tensors_of
from headrace.model.blocks.on_shapes import either_answer
from headrace.model.blocks.taps import BlockCall, Kept, Taps
from headrace.model.caches.borders import tensors_within
from headrace.model.caches.stored_layer import can_be_called_again, keys_and_values, without_mask
from headrace.model.caches.tiered_cache import TieredLayer, can_be_tiered, tier_layers, token_bytes_of
from headrace.model.chain.chain import Chain
from headrace.model.costs.cost_meter import CostMeter
from headrace.model.parts.banks import chosen_among, find_experts
from headrace.model.parts.runner import left_as_found
from headrace.model.parts.stored_rows import rows_within
from headrace.model.seats.host_attention import Noting, named, using
from headrace.terms.collector import without_collection
from headrace.terms.costs import CALLS_OF_EXPERT, CodedCaches, GenerationCosts, PassCosts, RecomputeCosts, touched
from headrace.terms.embedding_rows import BlockRows
from headrace.terms.errors import refusing

# How many float32 copies of a step's logits processors, sorting and sampling make (counted in transformers 5.23).
_COPIES_OF_LOGITS = 8


@without_collection()
def generation_costs(
    chain: Chain, rows: int, prompt_length: int, chunk: int = 0, code: CacheCode | None = None
) -> GenerationCosts:
    """Return the costs of a seat of `rows` prompts of `prompt_length` tokens, taken in chunks of `chunk` (0: all at once).

    With a `code` caches are coded that may be. The chain must be ready to generate.

    Raises:
        ModelError: the model's code asks for values, which fake tensors do not have.
    """
    with (
        refusing(f"{type(chain.model).__name__}: a generation cannot be planned: it fails on shapes alone"),
        experts_at_once(chain.model),
        noted_choices(chain) as choices,
        left_as_found(chain.model.modules()),
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.no_grad(),
        ends_bound(chain),
    ):
        found = _costs(chain, rows, prompt_length, chunk if chunk < prompt_length else 0, code)
        found = replace(found, choices=max(choices, default=0), widens=chain.wide_products)
        first, following = _looped(found.first, chain, found, found.first_tokens), _looped(found.next, chain, found, 1)
        return replace(found, first=first, next=following)


def _looped(costs: PassCosts, chain: Chain, found: GenerationCosts, tokens: int) -> PassCosts:
    """Return the costs of a pass over so many tokens of a row with the calls of the loop over experts that they want."""
    blocks = find_experts(chain.model, chain.runner.blocks)
    wanted = [
        touched(block.num_experts, found.choices, found.rows * tokens) if block and found.choices else 0 for block in blocks
    ]
    calls = zip(costs.calls, wanted, strict=True)
    return replace(costs, calls=tuple(called + round(CALLS_OF_EXPERT * experts) for called, experts in calls))


@contextmanager
def noted_choices(chain: Chain) -> Iterator[list[int]]:
    """While entered, note to how many experts a token is sent, each time that a module of experts is called."""
    choices: list[int] = []

    def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        chosen = chosen_among((*args, *kwargs.values()))
        choices.extend([] if chosen is None else [chosen.shape[-1]])

    hooks = [
        experts.module.register_forward_pre_hook(note, with_kwargs=True)
        for experts in find_experts(chain.model, chain.runner.blocks)
        if experts is not None
    ]
    try:
        yield choices
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def experts_at_once(model: Any) -> Iterator[None]:
    """While entered, compute experts as grouped products: as many operations, but one by one they would ask for values."""
    before = model.get_experts_implementation()
    changes = True
    try:
        model.set_experts_implementation("grouped_mm")
    except ValueError:  # it has none, or computes them in its own way
        changes = False
    try:
        yield
    finally:
        if changes:
            model.set_experts_implementation(before)


@contextmanager
def ends_bound(chain: Chain) -> Iterator[None]:
    """Bind embedding, norm and head to zero weights in this context."""
    ends = (0, chain.num_blocks + 1) if chain.has_epilogue_unit else (0,)
    for unit in ends:
        chain.bind(unit, torch.zeros(chain.layouts[unit].num_elements, dtype=chain.dtype, device=chain.device), None)
    try:
        yield
    finally:
        for unit in ends:
            chain.release(unit)


def _costs(chain: Chain, rows: int, prompt_length: int, chunk: int, code: CacheCode | None) -> GenerationCosts:
    cache = DynamicCache(config=chain.model.config.get_text_config(decoder=True))
    if chunk:  # the last chunk costs most: it sees all that came before
        _pass(chain, cache, rows, prompt_length - chunk, prompt_length - chunk)
    first = _pass(chain, cache, rows, chunk or prompt_length, prompt_length)
    after_first = _bytes_by_block(chain, cache)
    following = _pass(chain, cache, rows, 1, prompt_length + 1)
    after_next = _bytes_by_block(chain, cache)
    tiered = tuple(
        index < len(cache.layers) and can_be_tiered(cache.layers[index]) and after_first[index] > 0
        for index in range(chain.num_blocks)
    )
    token_bytes = tuple(max(0, then - now) for now, then in zip(after_first, after_next, strict=True))
    head = chain.model.get_output_embeddings().weight
    found = GenerationCosts(
        rows=rows,
        prompt_length=prompt_length,
        prefill_chunk=chunk,
        first=first,
        next=following,
        cache_bytes=tuple(after_first),
        cache_token_bytes=token_bytes,
        head_flops=2.0 * rows * head.numel(),
        head_bytes=rows * head.shape[0] * 4 * _COPIES_OF_LOGITS,
        tiered=tiered,
    )
    if code is not None:
        return _coded(found, cache.layers, code)
    again = _recomputing(chain, rows, first, prompt_length, chunk or prompt_length, tiered, after_first)
    return replace(found, recomputing=again)


def _coded(costs: GenerationCosts, layers: Sequence[Any], code: CacheCode) -> GenerationCosts:
    """Return `costs` with the bytes of coded caches, where these may lie elsewhere: they keep tokens and nothing else."""
    own = [token_bytes_of(layers[block], code) if may else 0 for block, may in enumerate(costs.tiered)]
    decoded = tuple(size if may else 0 for size, may in zip(costs.cache_token_bytes, costs.tiered, strict=True))
    return replace(
        costs,
        cache_bytes=tuple(costs.prompt_length * each or size for each, size in zip(own, costs.cache_bytes, strict=True)),
        cache_token_bytes=tuple(each or size for each, size in zip(own, costs.cache_token_bytes, strict=True)),
        coded=CodedCaches(name=code.name, decoded_bytes=decoded),
    )


def _recomputing(
    chain: Chain,
    rows: int,
    first: PassCosts,
    prompt_length: int,
    tokens: int,
    tiered: Sequence[bool],
    cache_bytes: Sequence[int],
) -> RecomputeCosts | None:
    """Return what making keys and values of a prompt from blocks' inputs takes; None where inputs are not smaller.

    None, too, if a block cannot be run again by itself. A pass takes `tokens` tokens of a row.
    """
    input_bytes = first.hidden_bytes * prompt_length // tokens
    blocks = [block for block, may in enumerate(tiered) if may and input_bytes < cache_bytes[block]]
    if not blocks:
        return None
    cache = DynamicCache(config=chain.model.config.get_text_config(decoder=True))
    hidden, calls = _called(chain, cache, rows, tokens, tokens)
    if hidden.nbytes > first.hidden_bytes or not all(map(can_be_called_again, calls)):
        return None
    again, layers = [*map(without_mask, calls)], tier_layers(calls, blocks)
    known = dict[object, tuple[float, int]]()
    found = [(0.0, 0)] * chain.num_blocks
    for block, layer in layers.items():
        kind = _kind(chain, cache, block, calls[block])
        if kind not in known:
            known[kind] = _up_to_cache(chain, block, hidden, again[block], layer)
        found[block] = known[kind]
    passes = -(-prompt_length // tokens)
    return RecomputeCosts(
        flops=tuple(passes * flops for flops, _ in found),
        calls=tuple(passes * called for _, called in found),
        input_bytes=input_bytes,
        call_bytes=passes * call_bytes(tuple(again), 1),
    )


def _up_to_cache(chain: Chain, index: int, hidden: torch.Tensor, call: BlockCall, layer: TieredLayer) -> tuple[float, int]:
    """Return the operations, and the calls of operators, of a block that is stopped when it gives keys and values."""
    with _bound(chain, index) as flat:
        meter = CostMeter(chain.wide_products, (flat, hidden, *tensors_of((call,))))
        with meter:
            keys_and_values(layer, lambda: chain.block(index, hidden, call))
    return meter.flops, meter.calls


def _pass(chain: Chain, cache: Any, rows: int, tokens: int, seen: int) -> PassCosts:
    """Run the blocks over `tokens` new tokens of rows of `seen` tokens."""
    return block_costs(chain, cache, *_called(chain, cache, rows, tokens, seen))[0]


def _called(chain: Chain, cache: Any, rows: int, tokens: int, seen: int) -> tuple[torch.Tensor, Sequence[BlockCall]]:
    """Return the input of the first block for such a pass, and what blocks are called with."""
    runner = chain.runner
    ids = torch.zeros((rows, tokens), dtype=torch.int64, device=chain.device)
    mask = torch.ones((rows, seen), dtype=torch.int64, device=chain.device)
    positions = torch.arange(seen - tokens, seen, device=chain.device).expand(rows, tokens)
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "past_key_values": cache, "use_cache": True}
    accepted = chain.model.forward.__code__.co_varnames
    if "position_ids" in accepted:
        inputs["position_ids"] = positions

    def before_blocks() -> Taps:
        with left_as_found(runner.outside), Taps(runner.blocks, runner.tuple_length) as taps:
            chain.model(**inputs)
        return taps

    taps = either_answer(before_blocks, lambda taps: taps.calls)
    assert taps.hidden is not None, "the first block is called"
    return taps.hidden, taps.wanted_calls(runner.takes)


def block_costs(chain: Chain, cache: Any, hidden: torch.Tensor, calls: Sequence[BlockCall]) -> tuple[PassCosts, torch.Tensor]:
    """Return the costs of running all blocks on `hidden`, called as `calls` say, and the final hidden states (zeros)."""
    flops, called, workspace, noted, tables = [], [], 0, list[Noting](), list[BlockRows]()
    known: dict[object, tuple[CostMeter, torch.Tensor, Noting, list[int]]] = {}
    for index, call in enumerate(calls):
        kind = _kind(chain, cache, index, call)
        if kind not in known:
            known[kind] = _block(chain, index, hidden, call)
        else:
            _fill_alike(chain, cache, index, next(i for i in range(index) if _kind(chain, cache, i, calls[i]) == kind))
        meter, hidden, noting, asked = known[kind]
        for stands, ids in zip(rows_within(chain.runner.blocks[index]), asked, strict=True):
            tables.append(BlockRows(unit=index + 1, table=stands.figures, ids=ids))
        noted.append(noting)
        flops.append(meter.flops)
        called.append(meter.calls)
        workspace = max(workspace, meter.peak_bytes)
    return PassCosts(
        flops=tuple(flops),
        workspace_bytes=workspace,
        call_bytes=call_bytes(tuple(calls), 1),
        hidden_bytes=hidden.nbytes,
        calls=tuple(called),
        query_bytes=tuple(noting.query_bytes for noting in noted),
        result_bytes=tuple(noting.result_bytes for noting in noted),
        tables=tuple(tables),
    ), hidden


def _block(
    chain: Chain, index: int, hidden: torch.Tensor, call: BlockCall
) -> tuple[CostMeter, torch.Tensor, Noting, list[int]]:
    """Return what a block costs, its output (zeros), its attention, and how many rows it asks for of each table."""
    tables = rows_within(chain.runner.blocks[index])
    before = [rows.asked for rows in tables]
    with _bound(chain, index) as flat:
        meter = CostMeter(chain.wide_products, (flat, hidden, *tensors_of((call,))))
        with named(chain.runner.blocks[index]), using(noting := Noting()), meter:
            out = chain.block(index, hidden, call).hidden
    return meter, torch.zeros_like(out), noting, [rows.asked - earlier for rows, earlier in zip(tables, before, strict=True)]


@contextmanager
def _bound(chain: Chain, index: int) -> Iterator[torch.Tensor]:
    """While entered, a block is bound to weights of zero, which are returned."""
    flat = torch.zeros(chain.layouts[index + 1].num_elements, dtype=chain.dtype, device=chain.device)
    chain.bind(index + 1, flat, None, as_loaded=True)
    try:
        yield flat
    finally:
        chain.release(index + 1)


def _kind(chain: Chain, cache: Any, index: int, call: BlockCall) -> object:
    """Return a key that is equal for blocks that cost the same."""
    layout = chain.layouts[index + 1]
    beside = chain.adapters.layouts.get(index + 1) if chain.adapters is not None else None
    parameters = (*layout.parameters, *(beside.parameters if beside is not None else ()))
    shapes = [(parameter.name.split(".")[-2:], parameter.shape) for parameter in parameters]
    shapes += [([], tuple(rows.weight.shape)) for rows in rows_within(chain.runner.blocks[index])]
    values = [*call.args, *(call.kwargs[name] for name in sorted(call.kwargs))]
    layer = type(cache.layers[index]).__name__ if index < len(cache.layers) else ""
    return str(shapes), layer, tuple(value if isinstance(value, bool | int | str) else id(value) for value in values)


def _fill_alike(chain: Chain, cache: Any, index: int, other: int) -> None:
    """Put into the cache of block `index`, which was not run, and into its modules, what block `other` left in its own."""
    own, theirs = (Kept.places(chain.runner.blocks[block]) for block in (index, other))
    for (module, name), (like, _) in zip(own, theirs, strict=False):
        setattr(module, name, getattr(like, name, None))
    if index < len(cache.layers) and other < len(cache.layers):
        cache.layers[index].__dict__.update(cache.layers[other].__dict__)


def _bytes_by_block(chain: Chain, cache: Any) -> list[int]:
    layers = [sum(tensor.nbytes for tensor in tensors_within(vars(layer))) for layer in cache.layers]
    layers += [0] * (chain.num_blocks - len(layers))
    places = [[getattr(module, name) for module, name in Kept.places(block)] for block in chain.runner.blocks]
    return [own + sum(each.nbytes for each in tensors_within(kept)) for own, kept in zip(layers, places, strict=False)]
