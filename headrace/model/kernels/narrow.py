"""Narrow products: up to four rows of bfloat16 are multiplied by a loop of our own, which reads weights as fast as it can.

Torch's own products of few rows read weights at a half to two thirds of that rate (docs/log/narrow-rows.md). The loop runs in
the very team of threads that torch uses, which still spin from its last operator: another team would wait for them.

Invariant: whether a product is narrow follows from shape and dtype alone, and its bits from its numbers alone: not from where
weights lie, nor from the number of threads. They differ from those of torch, which adds up in another order.
"""

import ctypes
from collections.abc import Mapping
from contextlib import nullcontext
from functools import cache
from types import MethodWrapperType, TracebackType
from typing import Any, Self

import torch
from numba import types
from torch.overrides import TorchFunctionMode

from headrace.machine.jit import callback
from headrace.machine.team import run_in_team, torch_team
from headrace.model.kernels.narrow_loops import NUM_WORDS, multiply
from headrace.model.kernels.own_linear import OwnLinear
from headrace.model.kernels.products import WideProducts
from headrace.model.stored.operand import CodedOperand

NARROW_ROWS = 4
# One longer row has no room in the nearest cache beside weights, and torch's product is faster.
_LONGEST_ALONE = 2048
# A core takes so many weights at a time, at least: waking another one takes as long as a few thousand.
_LEAST_WEIGHTS = 1 << 16
_PARTS_OF_A_THREAD = 4
# What blocks call most, and what multiplies no matrices.
_WITHOUT_PRODUCTS = {
    *(torch.nn.functional.silu, torch.nn.functional.gelu, torch.cat, torch.rsqrt),
    *(
        getattr(torch.Tensor, name)
        for name in ("__getitem__", "add", "contiguous", "detach", "expand", "float", "mean", "mul", "neg", "numel", "pow")
    ),
    *(getattr(torch.Tensor, name) for name in ("reshape", "sub", "to", "transpose", "unsqueeze", "view")),
}
_Words = ctypes.c_int64 * NUM_WORDS


class NarrowProducts(OwnLinear):
    """While entered, `linear` of up to four rows of bfloat16 on the CPU is computed by the loop. Gradients are not.

    With `wide` other products are computed as while `WideProducts` is entered.
    """

    def __init__(self, *, wide: bool = False) -> None:
        self._others = _WideWhereNeeded() if wide else nullcontext()

    def take(self, inputs: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        """See `OwnLinear.take`."""
        return multiplied(inputs, weights, bias) if is_narrow(inputs, weights, bias) else None

    def __enter__(self) -> Self:
        super().__enter__()
        self._others.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._others.__exit__(kind, error, trace)
        super().__exit__(kind, error, trace)


class _WideWhereNeeded(TorchFunctionMode):
    """`WideProducts`, which send each operator through Python, for those functions alone that may multiply matrices: they would
    take as long as small products.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _WITHOUT_PRODUCTS or type(func) is MethodWrapperType:  # such as a tensor's shape
            return func(*args, **(kwargs or {}))
        if CodedOperand in types and (few := CodedOperand.few(func, args, kwargs or {})) is not None:
            return few
        with WideProducts():
            return func(*args, **(kwargs or {}))


def is_narrow(inputs: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Return whether `linear` with these arguments is a narrow product."""
    return (
        inputs.dtype is weights.dtype is torch.bfloat16
        and weights.dim() == 2
        and 0 < inputs.numel() <= NARROW_ROWS * weights.shape[1]
        and inputs.shape[-1] == weights.shape[1]
        and (inputs.numel() > weights.shape[1] or weights.shape[1] <= _LONGEST_ALONE)
        and weights.shape[1] % 2 == 0
        and weights.is_contiguous()
        and type(inputs) is torch.Tensor
        and inputs.device.type == weights.device.type == "cpu"
        and (bias is None or (bias.dtype is torch.bfloat16 and bias.is_contiguous()))
        and not torch.is_grad_enabled()
    )


def multiplied(inputs: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return `linear` of arguments that are narrow."""
    outputs, length = weights.shape
    inputs, out = inputs.contiguous(), torch.empty((*inputs.shape[:-1], outputs), dtype=torch.bfloat16)
    threads = torch.get_num_threads()
    step = max(outputs // (threads * _PARTS_OF_A_THREAD), -(-_LEAST_WEIGHTS // length), 1)
    words = _Words(
        inputs.data_ptr(),
        weights.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        inputs.numel() // length,
        outputs,
        length,
        step,
    )
    run_in_team(_loop(), words, -(-outputs // step))
    return out


@cache
def has_kernel() -> bool:
    """Return whether the loop was measured to be faster than torch here: on x86 with AVX2, where it has torch's team."""
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") and torch_team() is not None


@cache
def _loop() -> Any:
    return callback(multiply, types.CPointer(types.int64))
