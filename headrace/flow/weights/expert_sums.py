"""Gradients of experts that are trained, from where rounds of them are summed to the drained gradient of their unit.

Where the host computes, sums are views of the unit's own gradient. A separate device has slots for rounds, where gradients are
summed over the micro-batches that are together. Then they leave for the unit's drained gradient. If more micro-batches come,
they wait in host memory first.

Invariant: an expert's gradient is the sum that whole blocks have, of the same numbers in the same order.
"""

from torch import Tensor

from headrace.flow.weights.buffers import Buffers
from headrace.flow.weights.experts import Experts
from headrace.machine.protocol import Machine
from headrace.model.parts.banks import Weights
from headrace.terms.program import Op, Pool


class ExpertSums:
    """Sums of what is trained of `experts`, in a plan's buffers.

    `summed` says, by unit and expert, how many micro-batches of the step have given a gradient.
    """

    def __init__(self, experts: Experts, buffers: Buffers, machine: Machine) -> None:
        self._experts, self._buffers, self._machine = experts, buffers, machine
        self.summed: dict[int, dict[int, int]] = {}

    def add(self, op: Op, expert: int, gradients: Weights) -> None:
        """Add an expert's gradients (1, ...) of a micro-batch to those before it."""
        counts = self.summed.setdefault(op.unit, {})
        for name, into in self._sums(op, expert).items():
            if expert in counts:
                into.add_(gradients[name][0])
            else:
                into.copy_(gradients[name][0])
        counts[expert] = counts.get(expert, 0) + 1

    def to_device(self, op: Op) -> None:
        """Bring the sums of a round to the device, so far as they were begun."""
        for expert in self._experts.of_round(op, tuple(self.summed.get(op.unit, ()))):
            self._machine.copy(self._slot(op, expert), self._parked(expert))

    def to_host(self, op: Op) -> None:
        """Copy the sums of a round to the host, until the next micro-batches."""
        for expert in self._experts.of_round(op):
            self._machine.copy(self._parked(expert), self._slot(op, expert))

    def drain(self, op: Op) -> None:
        """Bring the sums of a round into the unit's drained gradient."""
        for expert in self._experts.of_round(op):
            sums = self._sums(op, expert)
            for name, into in self._of_gradient(op, expert).items():
                self._machine.copy(into, sums[name].to(into.dtype))

    def finish(self, op: Op, num_micro: int) -> frozenset[str]:
        """Complete a unit's drained gradient: with sums that wait on the host, and with zeros for micro-batches of which no
        token reached an expert. Return the names of the parameters that are experts.
        """
        counts, places = self.summed.pop(op.unit, {}), self._experts.places
        for expert in range(self._experts.plan.figures.num_experts[op.unit]):
            found = self._of_gradient(op, expert)
            if self._buffers.parked_experts and expert in counts:
                for name, parked in places.views(op.unit, expert, self._parked(expert)).items():
                    found[name].copy_(parked)
            for each in found.values():
                if expert not in counts:
                    each.zero_()
                elif counts[expert] < num_micro:
                    each.add_(0.0)  # a sum of negative zeros alone stays one; whole blocks add zeros to it
        return places.names(op.unit)

    def _of_gradient(self, op: Op, expert: int) -> Weights:
        drained = self._buffers.gradient_tensor(op.unit, op.slot(Pool.GRADIENT))
        return self._experts.places.views(op.unit, expert, drained, whole=True)

    def _sums(self, op: Op, expert: int) -> Weights:
        """Return where an expert's gradients are summed."""
        if op.slot(Pool.EXPERT_SUMS) >= 0:
            return self._experts.places.views(op.unit, expert, self._slot(op, expert))
        total = self._buffers.accumulator(op.unit, op.slot(Pool.ACCUMULATOR))
        if total is None:
            return self._of_gradient(op, expert)
        return self._experts.places.views(op.unit, expert, total, whole=True)

    def _parked(self, expert: int) -> Tensor:
        size = self._experts.plan.figures.elements
        return self._buffers.parked_experts[0][expert * size : (expert + 1) * size]

    def _slot(self, op: Op, expert: int) -> Tensor:
        """Return an expert's place in the slot of a round."""
        plan = self._experts.plan
        place = op.slot(Pool.EXPERT_SUMS) * plan.in_round + expert % plan.in_round
        return self._buffers.expert_sums[place][: plan.figures.elements]
