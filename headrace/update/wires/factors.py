"""The gradient of a product's matrix by its factors, `dY^T X`, for a wire that needs the factors and not the whole.

Inside the context each call of `linear` with a known matrix (identified by where it lies) gives its factors away instead of a
gradient. So does `addmm`, which transformers' Conv1D calls with transposed matrices: `X^T dY`. Whatever else is done with the
matrix gives a gradient as usual.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _nn
from torch.overrides import TorchFunctionMode

from headrace.terms.layout import UnitLayout

Take = Callable[[str, Tensor, Tensor], None]


class Factors(TorchFunctionMode):
    """Gives the factors of the matrices called `names` to `take`: name, dY (tokens, rows), X (tokens, columns). For a
    transposed matrix X belongs to its rows, and comes first.
    """

    def __init__(self, layout: UnitLayout, weights: Tensor, take: Take, names: Collection[str]) -> None:
        super().__init__()
        start, width = weights.data_ptr(), weights.element_size()
        specs = [spec for spec in layout.parameters if len(spec.shape) == 2 and spec.name in names]
        self._names = {start + spec.offset * width: spec.name for spec in specs}
        self._take = take

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is _nn.linear and torch.is_grad_enabled() and len(args) > 1 and not kwargs:
            name = self._names.get(args[1].data_ptr())
            if name is not None and args[1].dim() == 2:
                return _Product.apply(args[0], args[1], args[2] if len(args) > 2 else None, name, self._take)  # type: ignore[no-untyped-call]
        if function is torch.addmm and torch.is_grad_enabled() and len(args) == 3 and not kwargs:
            name = self._names.get(args[2].data_ptr())
            if name is not None and args[2].dim() == args[1].dim() == 2:
                return _Transposed.apply(*args, name, self._take)  # type: ignore[no-untyped-call]
        return function(*args, **(kwargs or {}))


class _Product(torch.autograd.Function):
    """`linear` that gives the factors of its matrix's gradient to `take`."""

    @staticmethod
    def forward(context: Any, inputs: Tensor, matrix: Tensor, bias: Tensor | None, name: str, take: Take) -> Tensor:
        context.save_for_backward(inputs, matrix)
        context.name, context.take, context.biased = name, take, bias is not None
        return F.linear(inputs, matrix, bias)

    @staticmethod
    def backward(context: Any, *given: Tensor) -> Any:
        (outputs,) = given
        inputs, matrix = context.saved_tensors
        rows = outputs.reshape(-1, outputs.shape[-1])
        context.take(context.name, rows, inputs.reshape(-1, inputs.shape[-1]))
        of_bias = rows.float().sum(dim=0).to(outputs.dtype) if context.biased else None
        return outputs @ matrix, None, of_bias, None, None


class _Transposed(torch.autograd.Function):
    """`addmm` of a vector, inputs and a matrix, which gives the factors of the matrix's gradient to `take`."""

    @staticmethod
    def forward(context: Any, bias: Tensor, inputs: Tensor, matrix: Tensor, name: str, take: Take) -> Tensor:
        context.save_for_backward(inputs, matrix)
        context.name, context.take = name, take
        return torch.addmm(bias, inputs, matrix)

    @staticmethod
    def backward(context: Any, *given: Tensor) -> Any:
        (outputs,) = given
        inputs, matrix = context.saved_tensors
        context.take(context.name, inputs, outputs)
        return outputs.float().sum(dim=0).to(outputs.dtype), outputs @ matrix.T, None, None, None
