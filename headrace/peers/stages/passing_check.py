"""Whether blocks get anything from one another, or from the embedding, besides hidden states: stages pass nothing else on."""

from collections.abc import Iterator
from typing import Any

import torch

from headrace.model.blocks.chain_values import PrologueResult
from headrace.model.trials.instance import tiny_samples
from headrace.model.trials.probe import tiny_runner
from headrace.model.trials.thresholds import architecture_key
from headrace.terms.errors import ModelError


@torch.no_grad()
def refuse_what_passes_more(config: Any) -> None:
    """Refuse an architecture whose blocks need more of other blocks, or of the embedding, than hidden states.

    Raises:
        ModelError: it is one.
    """
    runner = tiny_runner(type(config), architecture_key(config))
    batch = tiny_samples(runner.model)[0]
    before = runner.prologue(batch)
    hands = any(call.gets or any(call.hands) or call.kept for call in before.calls)
    embedding = runner.model.get_input_embeddings().weight
    embedding.mul_(-2.0)
    same = all(torch.equal(one, other) for one, other in zip(_made(before), _made(runner.prologue(batch)), strict=True))
    if hands or not same:
        what = "of other blocks" if hands else "of the embedding"
        raise ModelError(
            f"{type(config).__name__}: its blocks get more than hidden states {what}, and stages pass nothing else on; train "
            "it on one machine, or with a node"
        )


def _made(result: PrologueResult) -> Iterator[torch.Tensor]:
    """Yield the tensors that blocks are called with besides hidden states."""
    for call in result.calls:
        yield from (value for each in (*call.args, *call.kwargs.values()) for value in _tensors(each))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)
