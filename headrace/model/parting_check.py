"""Find out by trying whether the experts of an architecture can be parts in training (see `parted_experts`).

Invariant: an architecture gets no parts if the results or gradients of its tiny instance had other bits with them.
"""

from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from headrace.model.banks import BlockExperts, find_experts
from headrace.model.instance import tiny_samples
from headrace.model.parted_experts import GROUPED, PartedExperts, Recompute, Visit
from headrace.model.probe import tiny_runner
from headrace.model.thresholds import architecture_key
from headrace.terms.errors import in_one_line


def why_not_parted(config: Any) -> str:
    """Return why experts of the architecture of `config` are trained beside with their whole block; "" where not."""
    return _parting_check(cast(Hashable, type(config)), architecture_key(config))


@lru_cache(maxsize=64)
def _parting_check(config_class: type, key: str) -> str:
    runner = tiny_runner(config_class, key)
    model = runner.model.requires_grad_(False)
    experts = find_experts(model, runner.blocks)
    if not any(experts):
        return "it has no stacked experts"
    if model.config._experts_implementation != GROUPED:
        return "its experts are summed in a way of its own"
    samples = tiny_samples(model)
    try:
        expected = [found for sample in samples for found in _results(model, sample.input_ids)]
        with _Trial(experts) as trial:
            made = [found for sample in samples for found in trial.results(model, sample.input_ids)]
    except Exception as error:  # whatever code raises that is called otherwise than it expects
        return in_one_line(error)
    same = all(torch.equal(one, other) for one, other in zip(expected, made, strict=True))
    return "" if same else "its gradients differ where experts come one at a time"


def _results(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits of a row, and the gradient of its embedding."""
    hidden = model.get_input_embeddings()(ids).detach().requires_grad_()
    out = model(inputs_embeds=hidden, use_cache=False).logits
    out.backward(torch.cos(out.detach()))
    assert hidden.grad is not None
    return out.detach(), hidden.grad


class _Trial:
    """Brings the experts of tiny blocks one at a time: ascending in forward, descending in backward."""

    def __init__(self, experts: Sequence[BlockExperts | None]) -> None:
        self._parts = PartedExperts(experts)
        self._outputs: list[Tensor] = []
        self._again: list[Recompute] = []

    def __enter__(self) -> "_Trial":
        self._parts.install()
        return self

    def __exit__(self, *exception: object) -> None:
        self._parts.remove()

    def results(self, model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
        """As `_results`."""
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
                again.visit.backward(expert, _weights(again.visit.experts, expert))
            found = again.visit.gradients()
            again.visit.gradients = lambda found=found: found  # type: ignore[method-assign,misc]
        out.backward(gradient)
        assert hidden.grad is not None
        return (expected if torch.equal(expected, out) else torch.full_like(expected, torch.nan)), hidden.grad

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


def _weights(experts: BlockExperts, expert: int) -> dict[str, Tensor]:
    return {name: getattr(experts.module, name)[expert : expert + 1].detach() for name in experts.names}
