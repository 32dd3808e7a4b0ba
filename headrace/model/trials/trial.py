"""Trials: what a tiny instance of an architecture gives with a change and without it, compared.

Invariant: an architecture is tried once in a process, and what a trial finds depends on its tiny instance alone.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from headrace.model.parts.runner import Runner
from headrace.model.trials.block_major import take_gradients
from headrace.model.trials.instance import tiny_runner
from headrace.model.trials.thresholds import architecture_key
from headrace.terms.errors import in_one_line

# What a run of a tiny instance gives, by name: "" are its logits.
Found = Mapping[str, Tensor]
_P = ParamSpec("_P")
_T = TypeVar("_T")


def tried(check: Callable[Concatenate[Runner, _P], _T]) -> Callable[Concatenate[Any, _P], _T]:
    """Let a check of a tiny instance take a configuration of transformers, whose architecture is tried once."""

    @lru_cache(maxsize=64)
    def of_architecture(config_class: type, key: str, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return check(tiny_runner(config_class, key), *args, **kwargs)

    @wraps(check)
    def of_config(config: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return of_architecture(cast(Hashable, type(config)), architecture_key(config), *args, **kwargs)  # type: ignore[arg-type]

    return of_config


def why_other(
    own: Callable[[], Sequence[Found]],
    changed: Callable[[], Sequence[Found]],
    differing: Callable[[Found, Found], str],
    *,
    own_fails: str = "{}",
    fails: str = "{}",
) -> str:
    """Return why a change gives something else than the instance's `own` code, which runs first; "" where it does not.

    `differing` gets what both found of a sample. Either may raise anything, as others' code does on what it does not expect:
    these words then take the place of "{}" in `own_fails` or `fails`.
    """
    words = own_fails
    try:
        expected = own()
        words = fails
        found = changed()
    except Exception as error:
        return words.format(in_one_line(error))
    return next(filter(None, map(differing, expected, found)), "")


def unless_alike(what: str, within: float = 0.0) -> Callable[[Found, Found], str]:
    """Return what says `what` unless names and bits are the same; tensors may differ by `within` times their largest number."""

    def near(own: Tensor, ours: Tensor) -> bool:
        return torch.equal(own, ours) or (bool(within) and furthest(own, ours) <= within * float(own.abs().max()))

    def differing(own: Found, ours: Found) -> str:
        return "" if own.keys() == ours.keys() and all(near(own[name], ours[name]) for name in own) else what

    return differing


def furthest(one: Tensor, other: Tensor) -> float:
    """Return the largest difference between elements of two tensors of one shape."""
    return float((one - other).abs().max())


def gradients_of(model: Any) -> dict[str, Tensor]:
    """Return the gradients that a model's parameters have, by name, and leave none behind."""
    return {name: gradient for name, gradient in take_gradients(model).items() if gradient is not None}


def run_back(model: Any, ids: Tensor, *, embedded: bool = False) -> dict[str, Tensor]:
    """Return the logits of rows `ids` (b, T), and the gradients of all parameters that have one, by name.

    With `embedded` the model gets the rows' embeddings, whose gradient is " ".
    """
    hidden = model.get_input_embeddings()(ids).detach().requires_grad_() if embedded else None
    out = model(**({"input_ids": ids} if hidden is None else {"inputs_embeds": hidden}), use_cache=False).logits
    out.backward(torch.cos(out.detach()))
    found = {"": out.detach()} if hidden is None or hidden.grad is None else {"": out.detach(), " ": hidden.grad}
    return found | gradients_of(model)
