"""Find out by trying whether the experts of an architecture can be parts in training (see `parted_experts`).

Invariant: an architecture gets no parts if the results or gradients of its tiny instance had other bits with them.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headrace.model.parts.banks import BlockExperts, Weights, find_experts
from headrace.model.parts.parted_experts import GROUPED, PartedExperts, Recompute, Visit
from headrace.model.parts.runner import Runner
from headrace.model.trials.instance import tiny_samples
from headrace.model.trials.trial import gradients_of, run_back, tried, unless_alike, why_other


@tried
def why_not_parted(runner: Runner, *, trained: bool = False) -> str:
    """Return why experts of an architecture are trained, or trained beside, with their whole block; "" where not."""
    model = runner.model.requires_grad_(False)
    experts = find_experts(model, runner.blocks)
    for weight in _stacks(experts) if trained else ():
        weight.requires_grad_()
    if not any(experts):
        return "it has no stacked experts"
    if model.config._experts_implementation != GROUPED:
        return "its experts are summed in a way of its own"
    rows = [sample.input_ids for sample in tiny_samples(model)]

    def parted() -> list[dict[str, Tensor]]:
        with _Trial(experts, trained=trained) as trial:
            return [trial.results(model, ids) for ids in rows]

    whole = partial(run_back, model, embedded=True)
    return why_other(
        lambda: [whole(ids) for ids in rows], parted, unless_alike("its gradients differ where experts come one at a time")
    )


def _stacks(experts: Sequence[BlockExperts | None]) -> list[nn.Parameter]:
    return [getattr(each.module, name) for each in experts if each is not None for name in each.names]


class _Trial:
    """Brings the experts of tiny blocks one at a time: ascending in forward, descending in backward."""

    def __init__(self, experts: Sequence[BlockExperts | None], *, trained: bool) -> None:
        self._parts = PartedExperts(experts, trained=trained)
        self._outputs: list[Tensor] = []
        self._again: list[Recompute] = []

    def __enter__(self) -> "_Trial":
        self._parts.install()
        return self

    def __exit__(self, *exception: object) -> None:
        self._parts.remove()

    def results(self, model: Any, ids: Tensor) -> dict[str, Tensor]:
        """As `run_back`."""
        self._outputs, self._again = [], []
        with self._parts.visited_by(self), torch.no_grad():
            embedded = model.get_input_embeddings()(ids)
            expected = model(inputs_embeds=embedded, use_cache=False).logits
        hidden = embedded.detach().requires_grad_()
        with self._parts.visited_by(self):
            out = model(inputs_embeds=hidden, use_cache=False).logits
        gradient = torch.cos(out.detach())
        for again in reversed(self._again):
            again.begin_backward((out,), (gradient,))
            for expert in reversed(again.visit.route()):
                _note(again.visit.experts, expert, again.visit.backward(expert, _weights(again.visit.experts, expert)) or {})
            found = again.visit.gradients()
            again.visit.gradients = lambda found=found: found  # type: ignore[method-assign,misc]
        out.backward(gradient)
        assert hidden.grad is not None
        same = expected if torch.equal(expected, out) else torch.full_like(expected, torch.nan)
        return {"": same, " ": hidden.grad, **gradients_of(model)}

    def at_experts(self, visit: Visit) -> Tensor:
        """See `Visitor`."""
        if torch.is_grad_enabled():
            again = Recompute(self._outputs[len(self._again)])
            self._again.append(again)
            return again.at_experts(visit)
        for expert in visit.route():
            visit.forward(expert, _weights(visit.experts, expert))
        self._outputs.append(visit.output())
        return self._outputs[-1].clone()


def _note(experts: BlockExperts, expert: int, gradients: Weights) -> None:
    for name, gradient in gradients.items():
        whole = getattr(experts.module, name)
        whole.grad = torch.zeros_like(whole) if whole.grad is None else whole.grad
        whole.grad[expert] = gradient[0]


def _weights(experts: BlockExperts, expert: int) -> dict[str, Tensor]:
    return {name: getattr(experts.module, name)[expert : expert + 1].detach() for name in experts.names}
