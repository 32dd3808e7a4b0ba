"""Replay: in recompute, hand back operator outputs that forward kept, instead of computing them again.

A recording dispatch mode keeps the outputs of chosen operators in forward, which runs without a graph. In backward the block
runs again under a replaying mode that returns them in the same order. So only the rest is computed. Gradients are bit-identical
to full recompute, because the same numbers enter the same graph. This one mechanism covers recomputation (nothing kept),
activation swapping (Fuyou: outputs kept on host or SSD) and everything between.

Operators are named by their *ordinal*: the position among the replayable operator calls of one run of the block.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.terms.costs import ATTENTION
from headrace.terms.errors import HeadraceError

Output = torch.Tensor | tuple[Any, ...]

_aten = torch.ops.aten


def _replayable() -> frozenset[Any]:
    """Return the operators whose outputs may be kept: functional, deterministic, expensive for their size.

    Views and in-place operators are not among them (they alias their arguments). Operators that this build of torch does not
    have are left out. Fused attention draws random numbers where it has dropout: see `is_random`.
    """
    names = (
        "mm.default",
        "addmm.default",
        "bmm.default",
        "baddbmm.default",
        "convolution.default",
        "_grouped_mm.default",
        "_scaled_dot_product_flash_attention_for_cpu.default",
        "_scaled_dot_product_flash_attention.default",
        "_scaled_dot_product_efficient_attention.default",
        "_scaled_dot_product_cudnn_attention.default",
    )
    found = []
    for name in names:
        packet, overload = name.rsplit(".", 1)
        operator = getattr(getattr(_aten, packet, None), overload, None)
        if operator is not None:
            found.append(operator)
    return frozenset(found)


REPLAYABLE = _replayable()


class ReplayMismatch(HeadraceError, RuntimeError):
    """The block runs other operators in recompute than in forward; going on would give wrong gradients."""


def operator_name(func: Any) -> str:
    """Return an operator's name; all forms of fused attention share one, because the device chooses which of them runs."""
    name = str(func)
    return ATTENTION if "scaled_dot_product" in name else name


def overwritten(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the arguments that a call of `func` writes into: what they held is no longer what an operator returned."""
    written = [args[place] if place < len(args) else kwargs.get(name) for place, name in _written_by(func)]
    return [value for value in written if isinstance(value, torch.Tensor)]


@cache
def _written_by(func: Any) -> tuple[tuple[int, str], ...]:
    """Return place and name of the arguments that `func` writes into. There are mostly none; every operator is asked."""
    arguments = enumerate(func._schema.arguments)
    return tuple(
        (place, known.name) for place, known in arguments if known.alias_info is not None and known.alias_info.is_write
    )


class Record(TorchDispatchMode):
    """Keep the outputs of the operators at `chosen` ordinals in `kept` (ordinal -> operator and output).

    Random operators are not kept, nor outputs that the block writes into afterwards: recompute would write a second time.

    `names` lists what ran, in order: ordinals mean nothing if it differs from the operators for which they were chosen.
    """

    def __init__(self, chosen: frozenset[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept: dict[int, tuple[Any, Output]] = {}
        self.names: list[str] = []
        self._chosen = chosen

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in REPLAYABLE:
            for tensor in overwritten(func, args, kwargs or {}):
                self._forget(tensor)
            return func(*args, **(kwargs or {}))
        ordinal = len(self.names)
        self.names.append(operator_name(func))
        if ordinal not in self._chosen or is_random(func, args, kwargs or {}):
            return func(*args, **(kwargs or {}))
        out = _call_for_backward(func, args, kwargs or {})
        self.kept[ordinal] = (func, out)
        return out

    def _forget(self, written: torch.Tensor) -> None:
        """Drop the kept outputs that share memory with `written`, by whatever views."""
        storage = written.untyped_storage()._cdata
        for ordinal, (_, out) in list(self.kept.items()):
            if any(tensor.untyped_storage()._cdata == storage for tensor in tensors_in(out)):
                del self.kept[ordinal]


def tensors_in(out: Output) -> list[torch.Tensor]:
    """Return the tensors among what an operator returned."""
    return [value for value in (out if isinstance(out, tuple | list) else (out,)) if isinstance(value, torch.Tensor)]


class Replay(TorchDispatchMode):
    """Return kept outputs instead of computing them; `skipped` ordinals return memory that was never written.

    A skipped operator is one whose output no gradient depends on (`find_skippable`): it is neither kept nor computed. `names`
    are the operators that ran in forward. Attention, for example, may take another path where there is a graph. That is noticed
    before anything wrong is returned; what has been computed so far is right, but has to be done again.

    Raises:
        ReplayMismatch: an operator is not the one that ran in forward, or, at the exit, there were fewer.
    """

    def __init__(
        self,
        kept: Mapping[int, tuple[Any, Output]],
        skipped: frozenset[int] = frozenset(),
        *,
        names: Sequence[str],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept, self._skipped, self._names, self._next = kept, skipped, names, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in REPLAYABLE:
            return func(*args, **(kwargs or {}))
        ordinal, self._next = self._next, self._next + 1
        before = self._names[ordinal] if ordinal < len(self._names) else "none"
        if operator_name(func) != before:
            raise ReplayMismatch(f"operator {ordinal} of the block was {before} in forward and is {func} in recompute")
        if ordinal in self._kept:
            recorded, out = self._kept[ordinal]
            if recorded is not func:
                raise ReplayMismatch(f"operator {ordinal} of the block was {recorded} in forward and is {func} in recompute")
            return out
        if ordinal in self._skipped and func in _SHAPES:
            return _SHAPES[func](args)
        return func(*args, **(kwargs or {}))

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if kind is None and self._next != len(self._names):
            raise ReplayMismatch(f"the block ran {len(self._names)} operators in forward and {self._next} in recompute")


def _call_for_backward(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Output:
    """Call an operator so that its output serves backward: without a graph, a GPU's attention leaves a part of it out."""
    out: Output = func(*with_log_sumexp(func, args), **kwargs)
    return out


def with_log_sumexp(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the positional arguments of `func` with `compute_log_sumexp` on, if it has that argument (never by keyword)."""
    position = _position(func, "compute_log_sumexp")
    return args if position is None else (*args[:position], True, *args[position + 1 :])


def is_random(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether this call draws random numbers. If so it must run in recompute: later draws depend on it."""
    position = _position(func, "dropout_p")
    if position is None:
        return False
    return bool(args[position] if position < len(args) else kwargs.get("dropout_p", 0.0))


def _position(func: Any, argument: str) -> int | None:
    """Return the position of `argument` among those of `func`, None where there is none."""
    names = [known.name for known in func._schema.arguments]
    return names.index(argument) if argument in names else None


def _matrix_shape(args: tuple[Any, ...]) -> torch.Tensor:
    left, right = args[-2:]
    empty: torch.Tensor = left.new_empty((*left.shape[:-1], right.shape[-1]))
    return empty


# Operators that can be skipped: the shape of their output follows from their inputs.
_SHAPES: dict[Any, Callable[[tuple[Any, ...]], torch.Tensor]] = {
    _aten.mm.default: _matrix_shape,
    _aten.addmm.default: _matrix_shape,
    _aten.bmm.default: _matrix_shape,
}


class Poison(TorchDispatchMode):
    """Replace the output of one operator by NaN, to see which gradients depend on it."""

    def __init__(self, ordinal: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ordinal, self._next = ordinal, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in REPLAYABLE:
            if self._next == self._ordinal and func in _SHAPES:
                out = torch.full_like(out, float("nan"))
            self._next += 1
        return out


def count_operators(run: Callable[[], object]) -> list[Any]:
    """Return the replayable operators that `run` calls, in order; the index is the ordinal."""

    class Count(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.seen: list[Any] = []

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            if func in REPLAYABLE:
                self.seen.append(func)
            return func(*args, **(kwargs or {}))

    with Count() as count:
        run()
    seen: list[Any] = count.seen
    return seen


def find_skippable(
    forward: Callable[[], torch.Tensor], backward: Callable[[torch.Tensor], list[torch.Tensor]]
) -> frozenset[int]:
    """Return the ordinals whose output no gradient depends on, found by trying.

    `forward` runs the block with a graph and returns its output. `backward` takes that output and a fixed output gradient, and
    returns all gradients: of the input and of the parameters. An output is skippable if NaN in its place changes no gradient.
    The usual case is the last projection of a block, whose result only the next block uses.
    """
    operators = count_operators(forward)
    wanted = backward(forward())
    skippable = set()
    for ordinal, operator in enumerate(operators):
        if operator not in _SHAPES:
            continue
        with Poison(ordinal):
            out = forward()
        if all(torch.equal(got, want) for got, want in zip(backward(out), wanted, strict=True)):
            skippable.add(ordinal)
    return frozenset(skippable)
