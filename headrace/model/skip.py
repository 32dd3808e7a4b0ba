"""Which operators a block's recompute can leave out, for no gradient depends on their output.

Found by trying, on the tiny instance of the architecture that `probe` makes; carried over to the real blocks by the sequence of
operators that a block runs. A block whose sequence the tiny instance does not show is recomputed whole.
"""

from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any, cast

import torch

from headrace.model.instance import tiny_samples
from headrace.model.probe import tiny_runner
from headrace.model.replay import count_operators, find_skippable, operator_name
from headrace.model.thresholds import architecture_key
from headrace.terms.costs import OperatorCosts


def skippable(config: Any, operators: Sequence[OperatorCosts]) -> tuple[int, ...]:
    """Return the ordinals that recompute of a block running `operators` may skip, for the architecture of `config`."""
    known = _skippable(cast(Hashable, type(config)), architecture_key(config))
    return known.get(tuple(operator.name for operator in operators), ())


@lru_cache(maxsize=64)
def _skippable(config_class: type, key: str) -> dict[tuple[str, ...], tuple[int, ...]]:
    runner = tiny_runner(config_class, key)
    sample = tiny_samples(runner.model)[0]
    found: dict[tuple[str, ...], tuple[int, ...]] = {}
    with torch.no_grad():
        start = runner.prologue(sample)
    hidden = start.hidden.detach()
    for index, call in enumerate(start.calls):
        leaf = hidden.detach().requires_grad_()
        parameters = [parameter for parameter in runner.blocks[index].parameters() if parameter.requires_grad]

        def forward(index: int = index, leaf: torch.Tensor = leaf, call: Any = call) -> torch.Tensor:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)  # dropout must draw the same each time
                result = runner.block(index, leaf, call)
            # One output, so that what is handed aside has a gradient too.
            return torch.cat([result.hidden.flatten(), *(aside.flatten().to(result.hidden.dtype) for aside in result.asides)])

        def backward(out: torch.Tensor, wanted: list[torch.Tensor] = [leaf, *parameters]) -> list[torch.Tensor]:  # noqa: B006
            weights = torch.linspace(-1.0, 1.0, out.numel(), dtype=out.dtype)
            gradients = torch.autograd.grad(out, wanted, weights, allow_unused=True, materialize_grads=True)
            return list(gradients)

        names = tuple(operator_name(operator) for operator in count_operators(forward))
        ordinals = tuple(sorted(find_skippable(forward, backward)))
        # Blocks of one sequence that differ in what they need share only what both can do without.
        found[names] = tuple(sorted(set(found.get(names, ordinals)) & set(ordinals)))
        with torch.no_grad():
            hidden = runner.block(index, hidden, call).hidden
    return found
