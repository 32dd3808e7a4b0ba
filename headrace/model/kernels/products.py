"""Matrix products of 16-bit numbers in float32, on processors that have no instructions for them.

There torch's own products take three times as long as products in float32 (bfloat16), up to sixty times (float16). So operands
are widened, multiplied and added in float32, and the result is rounded once, as such instructions would do. Everything between
products stays in 16 bits: hidden states, what is kept for backward, gradients.

Products of one to three rows of bfloat16 are the exception. If weights are stored as (outputs, inputs), torch's own products
take less time than widening would, and round once, too. If weights are stored the other way, they take forty times as long.

Invariant: how a product is computed, and the pieces into which it is cut, follow from shape and layout alone. So the same
shapes give the same bits.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.machine.cpu import CpuMachine
from headrace.terms.costs import FEW_ROWS
from headrace.terms.sizes import MIB

_aten = torch.ops.aten
_NARROW = (torch.bfloat16, torch.float16)
# So much of an operand or a result is converted to float32 at once: it fits into the caches, and takes little memory.
_PIECE_BYTES = 8 * MIB
_WIDE_BYTES = 4

Product = Callable[..., Any]

# torch has one setting for all threads of a process: who exchanges it, puts it back before another one does.
_precision = threading.Lock()


@contextlib.contextmanager
def exact_in_narrow(came: torch.Tensor) -> Iterator[None]:
    """Within, float32 products of operands that were widened from `came` use instructions for bfloat16, where it is that.

    Nothing is lost: such a number is the same in both, and sums are float32 in either case; only their order differs.
    """
    if came.dtype is not torch.bfloat16 or came.device.type != "cpu" or not CpuMachine().multiplies("bfloat16"):
        yield
        return
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    with _precision:
        before = matmul.fp32_precision
        matmul.fp32_precision = "bf16"
        try:
            yield
        finally:
            matmul.fp32_precision = before


class WideProducts(TorchDispatchMode):
    """While entered, products of bfloat16 or float16 are computed in float32. Enter it before modes that record operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return multiplied_wide(func, args, kwargs or {}) if is_16_bit_product(func, args) else func(*args, **(kwargs or {}))


def is_16_bit_product(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether this call of an operator is a product of 16-bit numbers on the CPU that is to be computed in float32."""
    if func not in _PRODUCTS or (func is _aten.mm.default and _has_few_rows(*args)):
        return False
    first = next(value for value in args if isinstance(value, torch.Tensor))
    return first.dtype in _NARROW and first.device.type == "cpu"


def multiplied_wide(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what `func` would return, computed by way of float32, for a call that `is_16_bit_product`."""
    return _PRODUCTS[func](*args, **kwargs)


def _mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return _multiplied(left, right, lambda part, columns: part)


def _has_few_rows(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether a product has few rows, and weights that are stored as (outputs, inputs)."""
    rows, inner = left.shape
    stored = right.stride() == (1, inner) and inner > 1
    return stored and 0 < rows <= FEW_ROWS and left.dtype is torch.bfloat16 and left.is_contiguous()


def _addmm(bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
    whole = bias.expand(left.shape[0], right.shape[1])

    def finish(part: torch.Tensor, place: tuple[slice, slice]) -> torch.Tensor:
        return (part if alpha == 1 else part.mul_(alpha)).add_(whole[place], alpha=beta)

    return _multiplied(left, right, finish)


def _multiplied(
    left: torch.Tensor, right: torch.Tensor, finish: Callable[[torch.Tensor, tuple[slice, slice]], torch.Tensor]
) -> torch.Tensor:
    """Return `left @ right`, cut along its longest side; `finish` gets each part of the result in float32, and its place."""
    (rows, inner), columns = left.shape, right.shape[1]
    out = left.new_empty((rows, columns))
    every = slice(None)
    if inner >= max(rows, columns):
        total = out.new_zeros(out.shape, dtype=torch.float32)
        for part in _pieces(inner, max(rows, columns)):
            total.addmm_(left[:, part].float(), right[part].float())
        out.copy_(finish(total, (every, every)))
    elif columns >= rows:
        wide_left = left.float()
        for part in _pieces(columns, max(rows, inner)):
            out[:, part] = finish(torch.mm(wide_left, right[:, part].float()), (every, part))
    else:
        wide_right = right.float()
        for part in _pieces(rows, max(inner, columns)):
            out[part] = finish(torch.mm(left[part].float(), wide_right), (part, every))
    return out


def _bmm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    out = left.new_empty((*left.shape[:2], right.shape[2]))
    one = max(left[0].numel(), right[0].numel(), out[0].numel()) if left.shape[0] else 0
    for part in _pieces(left.shape[0], one):
        out[part] = torch.bmm(left[part].float(), right[part].float())
    return out


def _grouped_mm(
    left: torch.Tensor,
    right: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return products of experts. If one operand has a matrix for each group, `offs` cuts the other; else it cuts both."""
    if offs is None or bias is not None or out_dtype not in (None, left.dtype):
        plain: torch.Tensor = _aten._grouped_mm.default(left, right, offs, bias, out_dtype)
        return plain
    if right.dim() == 3:
        out = left.new_zeros((left.shape[0], right.shape[2]))
        for group, rows in enumerate(_groups(offs, left.shape[0])):
            out[rows] = _mm(left[rows], right[group])
    elif left.dim() == 3:
        out = left.new_zeros((left.shape[1], right.shape[1]))
        for group, columns in enumerate(_groups(offs, right.shape[1])):
            out[:, columns] = _mm(left[group], right[:, columns])
    else:
        out = left.new_empty((offs.shape[0], left.shape[0], right.shape[1]))
        for group, inner in enumerate(_groups(offs, left.shape[1])):
            out[group] = _mm(left[:, inner], right[inner])
    return out


def _groups(offs: torch.Tensor, length: int) -> list[slice]:
    """Return the groups that end at `offs`; on shapes alone, where it has no values, groups of one size."""
    count = offs.shape[0]
    if isinstance(offs, FakeTensor):
        ends = [length * (group + 1) // count for group in range(count)]
    else:
        ends = offs.tolist()
    return [slice(start, stop) for start, stop in zip([0, *ends], ends, strict=False)]


def _pieces(length: int, width: int) -> Iterator[slice]:
    """Cut a side so that a piece of it, times `width`, stays within the allowed bytes."""
    step = max(1, _PIECE_BYTES // _WIDE_BYTES // max(1, width))
    yield from (slice(start, min(start + step, length)) for start in range(0, length, step))


def _whole(func: Any, *wide_outputs: int) -> Product:
    """Return `func` computed in float32 in one go; of its outputs, all but `wide_outputs` are rounded."""

    def product(*args: Any, **kwargs: Any) -> Any:
        dtype = next(value.dtype for value in args if isinstance(value, torch.Tensor))

        def widened(value: Any) -> Any:
            return value.float() if isinstance(value, torch.Tensor) and value.dtype is dtype else value

        out = func(*(widened(value) for value in args), **{name: widened(value) for name, value in kwargs.items()})
        if isinstance(out, torch.Tensor):
            return out.to(dtype)
        return tuple(value if index in wide_outputs else value.to(dtype) for index, value in enumerate(out))

    return product


_LOG_SUM_EXP = 1  # an output that is float32 in either case
_PRODUCTS: dict[Any, Product] = {
    _aten.mm.default: _mm,
    _aten.addmm.default: _addmm,
    _aten.bmm.default: _bmm,
    _aten.baddbmm.default: _whole(_aten.baddbmm.default),
    _aten._grouped_mm.default: _grouped_mm,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _whole(
        _aten._scaled_dot_product_flash_attention_for_cpu.default, _LOG_SUM_EXP
    ),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _whole(
        _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    ),
}
