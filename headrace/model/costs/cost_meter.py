"""Counts what runs inside: floating-point operations, live bytes, and the operators whose outputs may be kept.

It is for the model's own code on fake tensors (`cost_profile`). What a library allocates inside one operator is not seen.
"""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from headrace.model.blocks.replay import REPLAYABLE, is_random, operator_name, overwritten, tensors_in, with_log_sumexp
from headrace.model.kernels.products import is_16_bit_product, multiplied_wide
from headrace.terms.costs import OperatorCosts
from headrace.terms.sizes import MIB, round_up

_aten = torch.ops.aten

_HUGE_PAGE_BYTES = 2 * MIB


class CostMeter(TorchDispatchMode):
    """Floating-point operations, live bytes, and the replayable operators of what runs inside.

    `wide`: products of 16-bit numbers are computed by way of float32, and that is measured as anything else. `besides` are
    storages that are counted elsewhere. `huge_pages`: whether large storages begin on huge pages; None: as in this process.
    `by_values` tells whether something ran whose shapes follow from values: experts that look for their tokens. The worst case
    for memory is that one expert gets all tokens, and that is what is followed.
    """

    def __init__(self, wide: bool, besides: Iterable[torch.Tensor] = (), *, huge_pages: bool | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._wide, self._inside = wide, False
        self.flops = 0.0
        self.calls = 0  # of operators, views among them
        self.peak_bytes = self._live_bytes = 0
        self.operators: list[OperatorCosts] = []
        self.storages: list[int] = []  # the bytes of each storage that was made, in order
        self.events: list[int] = []  # in order: the number of a storage that was made, `~number` of one that was freed
        self._made_by: dict[int, int] = {}  # live storage -> ordinal of the operator that made it
        self.by_values = False
        self._places: set[int] = set()  # live storages of token places that code asked for
        self._whole: set[torch.Size] = set()  # shapes of masks for which all places were returned
        self._known = {tensor.untyped_storage()._cdata for tensor in besides}
        self._huge_pages = _allocates_huge_pages() if huge_pages is None else huge_pages

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        try:
            return self._run(func, args, kwargs)
        except Exception as error:
            if not getattr(error, "__notes__", None):
                error.add_note(str(func))  # says what ran when it failed
            raise

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Any:
        self.calls += func.namespace != "prim"  # what fake tensors ask for themselves
        if func is _aten.nonzero.default:
            out = self._places_of(args[0])
        elif func is _aten._local_scalar_dense.default and args[0].untyped_storage()._cdata in self._places:
            return 0  # one of the places: any number will do
        elif self._wide and is_16_bit_product(func, args):
            # The pieces are followed for their memory; the operations are those of the product, however it is cut.
            self._inside = True
            with self:
                out = multiplied_wide(func, args, kwargs or {})
            self._inside = False
        else:
            # An operator whose output may be kept is called as `Record` calls it: with all that backward needs.
            out = _call(func, with_log_sumexp(func, args) if func in REPLAYABLE else args, kwargs or {})
        flops = 0.0 if self._inside else _flops(func, args, kwargs or {}, out)
        self.flops += flops
        outputs = tensors_in(out)
        for tensor in outputs:
            self._follow(tensor)
        for tensor in overwritten(func, args, kwargs or {}):
            self._must_run(tensor)
        if func in REPLAYABLE and not self._inside:
            num_bytes = sum(tensor.nbytes for tensor in outputs)
            cost = OperatorCosts(
                name=operator_name(func),
                flops=flops,
                output_bytes=num_bytes,
                must_run=is_random(func, args, kwargs or {}),
            )
            for tensor in outputs:
                self._made_by[tensor.untyped_storage()._cdata] = len(self.operators)
            self.operators.append(cost)
        return out

    def _places_of(self, mask: torch.Tensor) -> torch.Tensor:
        """Return the most places that there may be: all of a mask, but one for each further mask of that shape."""
        self.by_values = True
        rows = 1 if mask.shape in self._whole else mask.numel()
        self._whole.add(mask.shape)
        places = mask.new_zeros((rows, mask.dim()), dtype=torch.int64)
        self._places.add(places.untyped_storage()._cdata)
        return places

    def _must_run(self, written: torch.Tensor) -> None:
        """Note that the output of an operator is written into afterwards, so that it cannot be kept (see `replay.Record`)."""
        ordinal = self._made_by.get(written.untyped_storage()._cdata)
        if ordinal is not None:
            self.operators[ordinal] = replace(self.operators[ordinal], must_run=True)

    def _follow(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        number = len(self.storages)
        self.storages.append(storage.nbytes())
        self.events.append(number)
        num_bytes = _resident_bytes(storage.nbytes(), self._huge_pages)
        self._live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        weakref.finalize(storage, partial(self._forget, key, number, num_bytes))

    def _forget(self, key: int, number: int, num_bytes: int) -> None:
        self._known.discard(key)
        self._made_by.pop(key, None)
        self.events.append(~number)
        self._live_bytes -= num_bytes

    @property
    def live_bytes(self) -> int:
        """The bytes that are live now."""
        return self._live_bytes

    @property
    def history(self) -> list[int]:
        """What was made and freed up to the last storage made: what is freed afterwards changes no peak."""
        last = self.events.index(len(self.storages) - 1) if self.storages else -1
        return self.events[: last + 1]

    def peak_bytes_of(self, storages: Sequence[int]) -> int:
        """Return the peak if the storages that were made had these bytes instead."""
        sizes = [_resident_bytes(num_bytes, self._huge_pages) for num_bytes in storages]
        live = peak = 0
        for event in self.events:
            live += sizes[event] if event >= 0 else -sizes[~event]
            peak = max(peak, live)
        return peak


def _allocates_huge_pages() -> bool:
    """Say whether torch's CPU allocator was told to use huge pages: then large storages begin on one."""
    with unset_fake_temporarily():
        return torch.empty(2 * _HUGE_PAGE_BYTES, dtype=torch.uint8).data_ptr() % _HUGE_PAGE_BYTES == 0


def _resident_bytes(num_bytes: int, huge_pages: bool) -> int:
    """Return the memory of a storage of `num_bytes`: whole huge pages where the allocator uses them."""
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
    if func is _aten._grouped_mm.default:  # torch counts none; each group has its own matrix
        left, right = args[:2]
        groups = left.shape[0] if left.dim() == right.dim() == 3 else 1
        return float(2 * groups * left.shape[-2] * left.shape[-1] * right.shape[-1])
    count = flop_registry.get(func.overloadpacket)
    return float(count(*args, **kwargs, out_val=out)) if count is not None else 0.0


class AttentionOfGpus(TorchFunctionMode):
    """Attention without its dropout. A GPU's kernels keep the same, except for a seed. The CPU has no kernel with dropout, so
    all scores would be counted: 0.75 GiB each time for 96 heads and 2048 tokens.

    `dropped` tells afterwards whether there was dropout.
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
