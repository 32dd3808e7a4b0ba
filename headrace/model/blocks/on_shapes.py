"""Runs a model's own code on fake tensors. It may look at values that only decide the numbers in tables that it makes.

Rotary tables that grow with the longest position are an example.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.overrides import TorchFunctionMode

from headrace.model.blocks.taps import BlockCall, Handed

_Result = TypeVar("_Result")


def either_answer(run: Callable[[], _Result], calls: Callable[[_Result], Any]) -> _Result:
    """Return what `run` returns on fake tensors; where it asks whether a tensor is true, both answers are tried.

    Raises:
        DataDependentOutputException: it asks for another value, or the answers lead to other `calls` of blocks.
    """
    try:
        return run()
    except DataDependentOutputException:
        results = []
        for answer in (True, False):
            with _Answer(answer):
                results.append(run())
        if outline(calls(results[0])) != outline(calls(results[1])):
            raise
        return results[0]


class _Answer(TorchFunctionMode):
    """Answers with `answer` when code asks whether a tensor is true."""

    def __init__(self, answer: bool) -> None:
        super().__init__()
        self._answer = answer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self._answer if func is torch.Tensor.__bool__ else func(*args, **(kwargs or {}))


def outline(value: Any) -> Any:
    """Return the structure of a value without its numbers."""
    if isinstance(value, torch.Tensor):
        return (value.shape, value.dtype)
    if isinstance(value, BlockCall):
        return (outline(value.args), outline(value.kwargs))
    if isinstance(value, Handed):
        return Handed
    if isinstance(value, dict):
        return {name: outline(inner) for name, inner in value.items()}
    if isinstance(value, tuple | list):
        return [outline(inner) for inner in value]
    return value
