"""Which operators a block's recompute can leave out, because no gradient depends on their output.

They are found on the architecture's tiny instance (`probe`), and transferred to the real blocks by the sequence of operators
that a block runs. A block whose sequence does not occur in the tiny instance is recomputed whole.
"""

from collections.abc import Sequence
from typing import Any

import torch

from headrace.model.blocks.replay import count_operators, find_skippable, operator_name
from headrace.model.parts.runner import Runner
from headrace.model.trials.instance import tiny_samples
from headrace.model.trials.trial import tried
from headrace.terms.costs import OperatorCosts


def skippable(config: Any, operators: Sequence[OperatorCosts]) -> tuple[int, ...]:
    """Return the ordinals that recompute of a block running `operators` may skip, for the architecture of `config`."""
    return _skippable(config).get(tuple(operator.name for operator in operators), ())


@tried
def _skippable(runner: Runner) -> dict[tuple[str, ...], tuple[int, ...]]:
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
                torch.manual_seed(0)  # dropout must draw the same numbers each time
                result = runner.block(index, leaf, call)
            # All outputs in one, so that what is handed aside has a gradient too.
            return torch.cat([result.hidden.flatten(), *(aside.flatten().to(result.hidden.dtype) for aside in result.asides)])

        def backward(out: torch.Tensor, wanted: list[torch.Tensor] = [leaf, *parameters]) -> list[torch.Tensor]:  # noqa: B006
            weights = torch.linspace(-1.0, 1.0, out.numel(), dtype=out.dtype)
            gradients = torch.autograd.grad(out, wanted, weights, allow_unused=True, materialize_grads=True)
            return list(gradients)

        names = tuple(operator_name(operator) for operator in count_operators(forward))
        ordinals = tuple(sorted(find_skippable(forward, backward)))
        # Blocks with equal sequences may differ in what they need: only what all of them can do without is skipped.
        found[names] = tuple(sorted(set(found.get(names, ordinals)) & set(ordinals)))
        with torch.no_grad():
            hidden = runner.block(index, hidden, call).hidden
    return found
