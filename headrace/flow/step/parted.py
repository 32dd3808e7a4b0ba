"""Blocks whose experts are parts: micro-batches wait at the experts, which come a few at a time, in forward and in backward.

Forward: each micro-batch of a group runs up to the experts in a thread of its own (`enter`). `route` tells which experts they
want. A few experts come at a time, and take all tokens of the group (`visit`); then `compute.forward` runs the rest. Backward:
`recompute` makes the block's graph, in which a result stands for the experts, and the gradient of that result. The experts come
again (`revisit`); then `compute.backward` runs as always. Where the plan says so (`remakes`), no graph waits meanwhile: the
block is recomputed a second time.

Invariant: an expert that no token of a group wants is not read.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial

import torch

from headrace.flow.step.compute import OF_EXPERTS, bound, seed
from headrace.flow.step.step_state import Package, StepState
from headrace.flow.weights.expert_sums import ExpertSums
from headrace.flow.weights.experts import Experts
from headrace.model.parts.parted_experts import PartedExperts, Recompute, Visit, Walk, stacked_alone
from headrace.terms.lanes import Lane
from headrace.terms.layout import ParameterSpec
from headrace.terms.program import Op, Verb
from headrace.update.wires.wire import Catching, Sink


@dataclass
class _Later:
    """A sink of gradients that come in a later operation, which says where they go."""

    to: Sink | None = None

    def __call__(self, spec: ParameterSpec, gradient: torch.Tensor) -> None:
        assert self.to is not None, "something of the unit is trained"
        self.to(spec, gradient)


@dataclass
class Recomputed:
    """A block with its graph, as far as its experts. `gradients` are those of its `outputs`; their gradients go to `sink`."""

    hidden: torch.Tensor
    outputs: Sequence[torch.Tensor]
    gradients: Sequence[torch.Tensor]
    sink: _Later = field(default_factory=_Later)


@dataclass
class Waiting:
    """A micro-batch in backward at its experts: its `visit`, and what gives the block with its graph when that is over."""

    visit: Visit
    block: Callable[[], Recomputed]


def enter(state: StepState, op: Op) -> None:
    """Block input -> its experts, where the micro-batch waits."""
    chain, machine = state.parts.chain, state.parts.machine
    hidden, call = state.inputs[op.unit, op.micro], state.calls[op.micro][op.unit - 1]

    def context() -> AbstractContextManager[object]:
        stack = ExitStack()
        stack.enter_context(machine.lane(Lane.COMPUTE))
        stack.enter_context(chain.arithmetic())
        return stack

    walk = Walk(_parts(state), lambda: chain.block(op.unit - 1, hidden, call), context, random=chain.has_dropout)
    state.at_experts.walks[op.micro] = walk
    seed(state, op.unit, op.micro)
    with bound(state, op, op.unit):
        walk.enter()


def route(state: StepState, op: Op) -> None:
    """Note which experts of a block the micro-batches that wait there want, ascending."""
    experts, wanted = _experts(state), set[int]()
    for walk in state.at_experts.walks.values():
        experts.want(op.unit, tokens := walk.visit.route())
        wanted |= tokens.keys()
    experts.wanted[op.unit, op.micro] = tuple(sorted(wanted))


def visit(state: StepState, op: Op) -> None:
    """Take all micro-batches that wait through some experts."""
    for expert, weights in _experts(state).weights(op).items():
        for walk in state.at_experts.walks.values():
            walk.visit.forward(expert, stacked_alone(weights))


def recompute(state: StepState, op: Op) -> None:
    """Block input -> its graph, and the gradient of what its experts made."""
    package = state.left.recalled.pop((op.unit, op.micro))
    if state.plan.stash.tiers[op.unit - 1] == "ssd" and not state.plan.separate_device:
        package = package.like(torch.clone)  # another micro-batch gets the buffer before this one's backward
    gradients = [state.hidden_gradients[op.micro], *state.asides.gradients.pop((op.unit, op.micro), ())]
    again, block = _recomputed(state, op, package, gradients)
    remakes = state.plan.experts is not None and state.plan.experts.remakes
    again.begin_backward(block.outputs, gradients, stays=not remakes)
    visit = again.visit
    visit.route()

    def remade() -> Recomputed:
        other, block = _recomputed(state, op, package, gradients)
        other.go_on(visit)
        return block

    state.at_experts.recomputed[op.micro] = Waiting(visit, remade if remakes else partial(_same, block))


def _same(block: Recomputed) -> Recomputed:
    return block


def _recomputed(state: StepState, op: Op, package: Package, gradients: Sequence[torch.Tensor]) -> tuple[Recompute, Recomputed]:
    """Return a block with its graph, and what stands for its experts there."""
    again, sink = Recompute(package.kept[OF_EXPERTS][1]), _Later()
    unit = state.plan.units[op.unit]
    found = Catching(sink, lambda spec: unit.in_place) if unit.is_trained else None
    hidden = package.hidden.detach().requires_grad_()
    seed(state, op.unit, op.micro)
    with torch.enable_grad(), bound(state, op, op.unit, found), _parts(state).visited_by(again):
        result = state.parts.chain.block(op.unit - 1, hidden, state.calls[op.micro][op.unit - 1])
    outputs = [result.hidden, *result.asides][: len(gradients)]
    return again, Recomputed(hidden, outputs, gradients, sink)


def revisit(state: StepState, op: Op) -> None:
    """Take all recomputed micro-batches back through some experts. What is trained of these is summed, in the order of
    micro-batches.
    """
    for expert, weights in _experts(state).weights(op).items():
        for each in state.at_experts.recomputed.values():
            gradients = each.visit.backward(expert, stacked_alone(weights))
            if gradients:
                _sums(state).add(op, expert, gradients)


def _parts(state: StepState) -> PartedExperts:
    assert state.parts.chain.parts is not None, "experts of the plan are parts"
    return state.parts.chain.parts


def _experts(state: StepState) -> Experts:
    assert state.parts.parted.experts is not None, "experts of the plan are parts"
    return state.parts.parted.experts


def _sums(state: StepState) -> ExpertSums:
    assert state.parts.parted.sums is not None, "experts of the plan are trained"
    return state.parts.parted.sums


# What brings rounds of experts, and takes their gradients away.
OF_ROUNDS: Mapping[Verb, Callable[[StepState, Op], None]] = {
    Verb.FETCH: lambda state, op: _experts(state).fetch(op),
    Verb.UPLOAD: lambda state, op: _experts(state).upload(op),
    Verb.MAKE: lambda state, op: _experts(state).make(op),
    Verb.OUT: lambda state, op: _sums(state).to_host(op),
    Verb.IN: lambda state, op: _sums(state).to_device(op),
    Verb.DRAIN: lambda state, op: _sums(state).drain(op),
}
