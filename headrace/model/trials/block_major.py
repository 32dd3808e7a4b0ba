"""Loss and gradients block by block, without streaming: the reference of what the engine computes, and how to compare
gradients.

Invariant: all micro-batches pass a block before the next is touched, as in a step.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from headrace.model.blocks.chain_values import IGNORED, MicroBatch, shift_labels
from headrace.model.parts.runner import RunBlock, Runner

# Sums are taken in another order: 3e-8 was measured on 25 architectures in float32; a lost gradient is larger by magnitudes.
RELATIVE_TOLERANCE = 1e-4


def block_major_backward(runner: Runner, batches: Sequence[MicroBatch]) -> float:
    """Run forward and backward of `batches` block by block, gradients into `.grad`; return the token-mean loss.

    All micro-batches pass a block before the next block is touched, as in the engine; nothing is streamed.
    """
    trained = sum(int((shift_labels(batch.labels) != IGNORED).sum()) for batch in batches)
    inputs, calls, asides = _forward_all(runner, batches)
    aside_gradients, loss = _aside_gradients(runner, asides, batches)
    gradients: list[Any] = []
    for batch, hidden in zip(batches, inputs[-1], strict=True):
        final = hidden.requires_grad_()
        part = runner.loss_sum(batch.input_ids, final, shift_labels(batch.labels)) / trained
        part.backward()  # type: ignore[no-untyped-call]
        loss += float(part.detach())
        gradients.append(final.grad)
    for index in reversed(range(len(runner.blocks))):
        for micro in range(len(batches)):
            wanted = [gradients[micro], *(grads[micro] for grads in aside_gradients[index])]
            if calls[micro][index].samples:
                gradients[micro] = runner.block_gradient(index, inputs[index][micro], calls[micro][index], wanted)
                continue
            hidden = inputs[index][micro].detach().requires_grad_()
            result = runner.block(index, hidden, calls[micro][index])
            torch.autograd.backward([result.hidden, *result.asides], wanted)
            gradients[micro] = hidden.grad
    for batch, gradient in zip(batches, gradients, strict=True):
        first = runner.prologue(batch).hidden
        if first.requires_grad:
            first.backward(gradient)  # type: ignore[no-untyped-call]
    return loss


@torch.no_grad()
def _forward_all(runner: Runner, batches: Sequence[MicroBatch]) -> tuple[list[list[torch.Tensor]], list[Any], list[Any]]:
    """Return hidden states [block][micro-batch], calls [micro-batch][block], asides [block][micro-batch]."""
    starts = [runner.prologue(batch) for batch in batches]
    inputs = [[start.hidden for start in starts]]
    calls = [start.calls for start in starts]
    asides = []
    for index in range(len(runner.blocks)):
        results = [runner.block(index, inputs[-1][micro], calls[micro][index]) for micro in range(len(batches))]
        inputs.append([result.hidden.detach() for result in results])
        asides.append([result.asides for result in results])
    return inputs, calls, asides


def _aside_gradients(
    runner: Runner, asides: list[list[tuple[torch.Tensor, ...]]], batches: Sequence[MicroBatch]
) -> tuple[list[list[tuple[torch.Tensor, ...]]], float]:
    """Return gradients [block][aside][micro-batch] of the auxiliary loss over the whole step, and the loss."""
    joined = [[torch.cat(parts).requires_grad_() for parts in zip(*block, strict=True)] for block in asides]
    flat = [logits for block in joined for logits in block]
    if not flat:
        return [[] for _ in asides], 0.0
    masks = [torch.ones_like(b.input_ids) if b.attention_mask is None else b.attention_mask for b in batches]
    loss = runner.aside_loss(flat, torch.cat([mask.flatten() for mask in masks]))
    gradients = iter(torch.autograd.grad(loss, flat))
    rows = [mask.numel() for mask in masks]
    return [[tuple(torch.split(next(gradients), rows)) for _ in block] for block in joined], float(loss.detach())


def plain_loss(runner: Runner, samples: Sequence[MicroBatch]) -> torch.Tensor:
    """Return the model's own loss of the samples, rows of one length, as one batch."""
    wanted = {"output_router_logits": True} if runner.collects_asides else {}
    loss: torch.Tensor = runner.model(
        input_ids=torch.cat([sample.input_ids for sample in samples]),
        attention_mask=torch.cat([cast(torch.Tensor, sample.attention_mask) for sample in samples]),
        labels=torch.cat([sample.labels for sample in samples]),
        use_cache=False,
        **wanted,
    ).loss
    return loss


def compare_gradients(runner: Runner, run_blocks: RunBlock, samples: Sequence[MicroBatch]) -> str:
    """Return where loss or gradients with `run_blocks` differ from those of the model's own code; "" if they do not.

    Both run block by block on `samples`; `runner` runs blocks as before afterwards, and its model has no gradients.
    """
    own, expected_loss = runner.run_block, block_major_backward(runner, samples)
    expected = take_gradients(runner.model)
    runner.run_block = run_blocks
    try:
        loss = block_major_backward(runner, samples)
        if not abs(loss - expected_loss) <= RELATIVE_TOLERANCE * abs(expected_loss):
            return f"loss is {loss:.6f} instead of {expected_loss:.6f}"
        return differing_gradient(runner.model, expected)
    finally:
        runner.run_block = own
        runner.model.zero_grad(set_to_none=True)


def take_gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the gradients of all parameters and leave none behind."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return gradients


def differing_gradient(model: nn.Module, expected: Mapping[str, torch.Tensor | None]) -> str:
    """Return words about the first gradient that is not as `expected`; "" if all are."""
    largest = max(float(grad.abs().max()) for grad in expected.values() if grad is not None and grad.numel())
    for name, parameter in model.named_parameters():
        if not parameter.numel():
            continue  # this gradient has a size that is zero in a tiny instance
        plain, ours = expected[name], parameter.grad
        plain = torch.zeros_like(parameter) if plain is None else plain
        difference = float((plain - (0 if ours is None else ours)).abs().max())
        if not difference <= RELATIVE_TOLERANCE * float(plain.abs().max()) + 1e-6 * largest:
            return f"gradient of {name} differs by {difference:.2g} (largest element {float(plain.abs().max()):.2g})"
    return ""
