"""What a model costs, from shapes alone: no weight is read, nothing is computed.

The model's own code runs on fake tensors (shapes, dtypes and storages without memory). A dispatch mode adds up floating-point
operations and follows which storages are alive, so that the peak of live bytes of each operation of a step is known before
anything is allocated. What a library allocates inside one operator is not seen.
"""

import weakref
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from headrace.model.batch import MicroBatch
from headrace.model.chain import Chain
from headrace.model.products import is_narrow, multiplied_wide
from headrace.model.replay import REPLAYABLE, is_random, operator_name, with_log_sumexp
from headrace.model.skip import skippable
from headrace.spec.costs import ATTENTION, BlockCosts, ModelCosts, OperatorCosts
from headrace.spec.sizes import MIB, round_up

_aten = torch.ops.aten

_HUGE_PAGE_BYTES = 2 * MIB

# Chunks of positions for which the epilogue is tried: its peak is the larger of a part that grows and one that does not.
_LOSS_CHUNKS = (16, 64, 128, 256, 512, 1024, 2048)


class _Meter(TorchDispatchMode):
    """Floating-point operations, live bytes, and the replayable operators of what runs inside.

    `wide`: products of 16-bit numbers go by way of float32, and what that takes is measured as anything else.
    """

    def __init__(self, wide: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._wide, self._inside = wide, False
        self.flops = 0.0
        self.peak_bytes = self._live_bytes = 0
        self.operators: list[OperatorCosts] = []
        self._known: set[int] = set()
        self._huge_pages = _allocates_huge_pages()

    def exclude(self, *tensors: torch.Tensor) -> None:
        """Do not count storages that exist already."""
        self._known.update(tensor.untyped_storage()._cdata for tensor in tensors)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._wide and is_narrow(func, args):
            # Its pieces are followed for what they take; its operations are those of the product, however it is cut.
            self._inside = True
            with self:
                out = multiplied_wide(func, args, kwargs or {})
            self._inside = False
        else:
            # What may be kept is called as `Record` does it: with all that backward needs.
            out = _call(func, with_log_sumexp(func, args) if func in REPLAYABLE else args, kwargs or {})
        flops = 0.0 if self._inside else _flops(func, args, kwargs or {}, out)
        self.flops += flops
        outputs = [value for value in (out if isinstance(out, tuple | list) else (out,)) if isinstance(value, torch.Tensor)]
        for tensor in outputs:
            self._follow(tensor)
        if func in REPLAYABLE and not self._inside:
            num_bytes = sum(tensor.nbytes for tensor in outputs)
            cost = OperatorCosts(
                name=operator_name(func),
                flops=flops,
                output_bytes=num_bytes,
                random=is_random(func, args, kwargs or {}),
            )
            self.operators.append(cost)
        return out

    def _follow(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        num_bytes = _resident_bytes(storage.nbytes(), self._huge_pages)
        self._live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        weakref.finalize(storage, partial(self._forget, key, num_bytes))

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self._live_bytes -= num_bytes


def _allocates_huge_pages() -> bool:
    """Say whether torch's CPU allocator was told to use huge pages: then large storages begin on one."""
    with unset_fake_temporarily():
        return torch.empty(2 * _HUGE_PAGE_BYTES, dtype=torch.uint8).data_ptr() % _HUGE_PAGE_BYTES == 0


def _resident_bytes(num_bytes: int, huge_pages: bool) -> int:
    """Return what a storage of `num_bytes` takes: whole huge pages where the allocator uses them."""
    return round_up(num_bytes, _HUGE_PAGE_BYTES) if huge_pages and num_bytes >= _HUGE_PAGE_BYTES else num_bytes


def _call(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call an operator on fake tensors; the grouped product has a shape rule for bfloat16 alone, though it runs in others."""
    if func is not _aten._grouped_mm.default or args[0].dtype is torch.bfloat16:
        return func(*args, **kwargs)
    return func(args[0].bfloat16(), args[1].bfloat16(), *args[2:], **kwargs).to(args[0].dtype)


def _flops(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> float:
    """Return the floating-point operations of one call; attention on the CPU is counted as its two matrix products."""
    if func is _aten._scaled_dot_product_flash_attention_for_cpu.default:
        batch, heads, rows, width = args[0].shape
        return float(4 * batch * heads * rows * args[1].shape[-2] * width)
    if func is _aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        batch, heads, rows, width = args[1].shape
        return float(10 * batch * heads * rows * args[2].shape[-2] * width)
    count = flop_registry.get(func.overloadpacket)
    return float(count(*args, **kwargs, out_val=out)) if count is not None else 0.0


class _AttentionOfGpus(TorchFunctionMode):
    """Attention without its dropout, which makes no difference to what a GPU's kernels keep: a seed. The CPU has no kernel with
    dropout, so that all scores would be counted: 0.75 GiB a time for 96 heads and 2048 tokens.

    `dropped` tells afterwards whether there was some.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dropped = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            kwargs = {**(kwargs or {})}
            self.dropped |= bool(args[4] if args[4:] else kwargs.get("dropout_p", 0.0))
            args = args[:4] + (0.0,) * bool(args[4:]) + args[5:]
            if "dropout_p" in kwargs:
                kwargs["dropout_p"] = 0.0
        return func(*args, **(kwargs or {}))


def profile(chain: Chain, sequences: int, length: int, *, for_gpu: bool = False, other: ModelCosts | None = None) -> ModelCosts:
    """Return the costs of `chain` on micro-batches of `sequences` rows of `length` tokens. `for_gpu`: those on a GPU that
    need not be here. `other`: what this gave for micro-batches of another size; the epilogue's part is as there, for it works
    on chunks of positions, however many there are.

    Blocks whose layouts and calls are alike are run once, by the model's own code. Where the chain runs them by other code
    (`Chain.replayable` is false), no operator can be named, so none is listed; and gradients of a block's parameters may be
    there all at once, so all are counted.
    """
    attention = _AttentionOfGpus()
    with FakeTensorMode(allow_non_fake_inputs=True), chain.own_code(), attention if for_gpu else nullcontext():
        costs = _profile(chain, sequences, length, other)
    if not chain.replayable:
        return replace(costs, blocks=tuple(_not_replayable(block, chain.dtype.itemsize) for block in costs.blocks))
    # Outside, for this one really computes, on a tiny instance.
    kinds = {id(block): _random_attention(block) if attention.dropped else block for block in costs.blocks}
    found = {key: replace(block, skippable=skippable(chain.config, block.operators)) for key, block in kinds.items()}
    return replace(costs, blocks=tuple(found[id(block)] for block in costs.blocks))


class Profiles:
    """What `profile` returns for one chain, by the size of a micro-batch: made once each, and from one another."""

    def __init__(self, chain: Chain, *, for_gpu: bool = False) -> None:
        self._chain, self._for_gpu = chain, for_gpu
        self._costs: dict[tuple[int, int], ModelCosts] = {}

    def of(self, sequences: int, length: int) -> ModelCosts:
        """Return the costs on micro-batches of `sequences` rows of `length` tokens."""
        key = (sequences, length)
        if key not in self._costs:
            other = next(iter(self._costs.values()), None)
            self._costs[key] = profile(self._chain, sequences, length, for_gpu=self._for_gpu, other=other)
        return self._costs[key]


def _random_attention(block: BlockCosts) -> BlockCosts:
    operators = (replace(operator, random=operator.random or operator.name == ATTENTION) for operator in block.operators)
    return replace(block, operators=tuple(operators))


def _not_replayable(block: BlockCosts, bytes_per_element: int) -> BlockCosts:
    gradients_bytes = block.num_elements * bytes_per_element
    return replace(block, operators=(), backward_workspace_bytes=block.backward_workspace_bytes + gradients_bytes)


def _profile(chain: Chain, sequences: int, length: int, other: ModelCosts | None) -> ModelCosts:
    ids = torch.zeros((sequences, length), dtype=torch.int64, device=chain.device)
    batch = MicroBatch(ids, ids)
    flats = {
        unit: torch.zeros(chain.layouts[unit].num_elements, dtype=chain.dtype, device=chain.device)
        for unit in _residents(chain)
    }
    for unit, flat in flats.items():
        chain.bind(unit, flat, None)
    try:
        with torch.no_grad(), _Meter(chain.wide_products) as prologue:
            result = chain.prologue(batch)
        chain.release(0)
        chain.bind(0, flats[0], lambda parameter, gradient: None)
        with _Meter(chain.wide_products) as prologue_backward:
            again = chain.prologue(batch)
            if again.hidden.requires_grad:
                again.hidden.backward(torch.zeros_like(again.hidden))  # type: ignore[no-untyped-call]
        blocks = _profile_blocks(chain, result.hidden, result.calls)
        # Chunks larger than the micro-batch, but for one, say nothing.
        chunks = [tokens for index, tokens in enumerate(_LOSS_CHUNKS) if not index or _LOSS_CHUNKS[index - 1] < ids.numel()]
        known = dict(other.epilogue_workspace_bytes) if other else {}
        losses = {tokens: _profile_loss(chain, result.hidden, ids, tokens) for tokens in chunks if tokens not in known}
    finally:
        for unit in flats:
            chain.release(unit)
    epilogue = chain.layouts[-1] if chain.has_epilogue_unit else None
    return ModelCosts(
        name=type(chain.model).__name__,
        compute_dtype=chain.compute_dtype,
        sequences=sequences,
        length=length,
        hidden_size_bytes=result.hidden.shape[-1] * result.hidden.element_size(),
        prologue_elements=chain.layouts[0].num_elements,
        prologue_parameters=chain.layouts[0].num_parameters,
        epilogue_elements=epilogue.num_elements if epilogue else 0,
        epilogue_parameters=epilogue.num_parameters if epilogue else 0,
        tied=chain.tied,
        blocks=blocks,
        prologue_workspace_bytes=prologue.peak_bytes,
        prologue_backward_workspace_bytes=prologue_backward.peak_bytes,
        epilogue_workspace_bytes=tuple((tokens, known.get(tokens) or losses[tokens].peak_bytes) for tokens in chunks),
        epilogue_flops_per_token=other.epilogue_flops_per_token if other else losses[chunks[0]].flops / chunks[0] / 3,
        call_bytes=_call_bytes(result.calls),
        wide_products=chain.wide_products,
    )


def _residents(chain: Chain) -> tuple[int, ...]:
    return (0, chain.num_blocks + 1) if chain.has_epilogue_unit else (0,)


def _profile_blocks(chain: Chain, hidden: torch.Tensor, calls: tuple[Any, ...]) -> tuple[BlockCosts, ...]:
    known: dict[object, BlockCosts] = {}
    costs = []
    for index in range(chain.num_blocks):
        layout = chain.layouts[index + 1]
        call = calls[index]
        shapes = tuple((parameter.name.split(".")[-2:], parameter.shape) for parameter in layout.parameters)
        values = [*call.args, *(call.kwargs[name] for name in sorted(call.kwargs))]
        # Blocks of one shape that get the same objects do the same; masks of two kinds make two kinds of blocks.
        key = (str(shapes), tuple(value if isinstance(value, bool | int | str) else id(value) for value in values))
        if key not in known:
            known[key] = _profile_block(chain, index, hidden, call)
        costs.append(known[key])
    return tuple(costs)


def _profile_block(chain: Chain, index: int, hidden: torch.Tensor, call: Any) -> BlockCosts:
    layout = chain.layouts[index + 1]
    flat = torch.zeros(layout.num_elements, dtype=chain.dtype, device=chain.device)
    chain.bind(index + 1, flat, None)
    with torch.no_grad(), _Meter(chain.wide_products) as forward:
        chain.block(index, hidden, call)
    chain.release(index + 1)
    chain.bind(index + 1, flat, lambda parameter, gradient: None)
    try:
        leaf = hidden.detach().requires_grad_()
        with _Meter(chain.wide_products) as backward:
            out = chain.block(index, leaf, call)
            out.hidden.backward(torch.zeros_like(out.hidden))  # type: ignore[no-untyped-call]
            del out
    finally:
        chain.release(index + 1)
    return BlockCosts(
        num_elements=layout.num_elements,
        num_parameters=layout.num_parameters,
        forward_flops=forward.flops,
        forward_workspace_bytes=forward.peak_bytes,
        backward_workspace_bytes=backward.peak_bytes,
        operators=tuple(forward.operators),
        attention_flops=sum(operator.flops for operator in forward.operators if operator.name == ATTENTION),
    )


def _profile_loss(chain: Chain, hidden: torch.Tensor, ids: torch.Tensor, tokens: int) -> _Meter:
    """Run the epilogue on a chunk of `tokens` positions of one row, with gradients."""
    part = hidden.new_zeros((1, tokens, hidden.shape[-1])).requires_grad_()
    some = ids.new_zeros((1, tokens))
    for unit in _residents(chain):
        flat = torch.zeros(chain.layouts[unit].num_elements, dtype=chain.dtype, device=chain.device)
        chain.release(unit)
        chain.bind(unit, flat, lambda parameter, gradient: None)
    meter = _Meter(chain.wide_products)
    with meter:
        chain.loss_sum(some, part, some).backward()  # type: ignore[no-untyped-call]
    return meter


def _call_bytes(calls: tuple[Any, ...]) -> int:
    """Return the bytes of the distinct tensors that blocks are called with: masks, rotary tables, positions."""
    sizes: dict[int, int] = {}

    def visit(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
        elif isinstance(value, tuple | list):
            for item in value:
                visit(item)
        elif isinstance(value, dict):
            for item in value.values():
                visit(item)

    for call in calls:
        visit(call.args)
        visit(call.kwargs)
    return sum(sizes.values())
