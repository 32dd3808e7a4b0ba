"""Experts that are trained, as parts: from their unit in host memory a round at a time, and their gradients back to it.

Where the host computes, both are views of the unit's own weights and gradient. A separate device has slots for rounds, where
gradients are summed over the micro-batches that are together. Then they leave for the unit's drained gradient. If more
micro-batches come, they wait in host memory first.

Invariant: an expert's gradient is the sum that whole blocks have, of the same numbers in the same order.
"""

from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from headrace.flow.weights.buffers import Buffers
from headrace.machine.protocol import Machine
from headrace.model.parts.banks import BlockExperts, Weights
from headrace.plan.value.expert_plan import ExpertParts
from headrace.terms.layout import PARAMETER_ALIGNMENT, UnitLayout
from headrace.terms.program import Op, Pool
from headrace.terms.sizes import round_up


class TrainedExperts:
    """The experts of `blocks`, whose units are laid out by `layouts`, in a plan's buffers.

    `summed` says, by unit and expert, how many micro-batches of the step have given a gradient.
    """

    def __init__(
        self,
        plan: ExpertParts,
        layouts: Sequence[UnitLayout],
        blocks: Sequence[BlockExperts | None],
        buffers: Buffers,
        machine: Machine,
    ) -> None:
        self.plan, self._layouts, self._blocks, self._buffers, self._machine = plan, layouts, blocks, buffers, machine
        self.summed: dict[int, dict[int, int]] = {}

    def of_round(self, op: Op, wanted: Sequence[int]) -> list[int]:
        """Return those of the `wanted` experts that belong to the round of `op`."""
        first = op.part * self.plan.in_round
        return [expert for expert in wanted if first <= expert < first + self.plan.in_round]

    def upload(self, op: Op, wanted: Sequence[int]) -> None:
        """Copy the experts of a round to the device."""
        for expert in self.of_round(op, wanted):
            slot = self._in_slot(op.unit, self._place(self._buffers.device_experts, op, Pool.DEVICE_EXPERTS, expert))
            for name, there in self._stored(op, expert).items():
                self._machine.copy(slot[name], there)

    def weights(self, op: Op, wanted: Sequence[int]) -> dict[int, Weights]:
        """Return the weights of a round's experts, by number and attribute, as views of where they are."""
        if op.slot(Pool.DEVICE_EXPERTS) < 0:
            return {expert: self._stored(op, expert) for expert in self.of_round(op, wanted)}
        slots = self._buffers.device_experts
        return {
            expert: self._in_slot(op.unit, self._place(slots, op, Pool.DEVICE_EXPERTS, expert))
            for expert in self.of_round(op, wanted)
        }

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
        for expert in self.of_round(op, tuple(self.summed.get(op.unit, ()))):
            self._machine.copy(self._place(self._buffers.expert_sums, op, Pool.EXPERT_SUMS, expert), self._parked(expert))

    def to_host(self, op: Op, wanted: Sequence[int]) -> None:
        """Copy the sums of a round to the host, until the next micro-batches."""
        for expert in self.of_round(op, wanted):
            self._machine.copy(self._parked(expert), self._place(self._buffers.expert_sums, op, Pool.EXPERT_SUMS, expert))

    def drain(self, op: Op, wanted: Sequence[int]) -> None:
        """Bring the sums of a round into the unit's drained gradient."""
        for expert in self.of_round(op, wanted):
            sums = self._sums(op, expert)
            for name, into in self._of_gradient(op, expert).items():
                self._machine.copy(into, sums[name].to(into.dtype))

    def finish(self, op: Op, num_micro: int) -> None:
        """Complete a unit's drained gradient: with sums that wait on the host, and with zeros for micro-batches of which no
        token reached an expert.
        """
        counts = self.summed.pop(op.unit, {})
        for expert in range(self.plan.figures.num_experts[op.unit]):
            found = self._of_gradient(op, expert)
            if self._buffers.parked_experts and expert in counts:
                for name, parked in self._in_slot(op.unit, self._parked(expert)).items():
                    found[name].copy_(parked)
            for each in found.values():
                if expert not in counts:
                    each.zero_()
                elif counts[expert] < num_micro:
                    each.add_(0.0)  # a sum of negative zeros alone stays one; whole blocks add zeros to it

    def names(self, unit: int) -> frozenset[str]:
        """Return the names of a unit's parameters that are experts."""
        block = self._blocks[unit - 1] if self.plan.figures.num_experts[unit] else None
        return frozenset(block.names.values()) if block else frozenset()

    def _stored(self, op: Op, expert: int) -> dict[str, Tensor]:
        whole = torch.from_numpy(self._buffers.stored(op.unit, op)).view(self._buffers.dtype)
        return self._of_unit(op.unit, whole, expert)

    def _of_gradient(self, op: Op, expert: int) -> dict[str, Tensor]:
        return self._of_unit(op.unit, self._buffers.gradient_tensor(op.unit, op.slot(Pool.GRADIENT)), expert)

    def _sums(self, op: Op, expert: int) -> dict[str, Tensor]:
        """Return where an expert's gradients are summed."""
        if op.slot(Pool.EXPERT_SUMS) >= 0:
            return self._in_slot(op.unit, self._place(self._buffers.expert_sums, op, Pool.EXPERT_SUMS, expert))
        total = self._buffers.accumulator(op.unit, op.slot(Pool.ACCUMULATOR))
        return self._of_gradient(op, expert) if total is None else self._of_unit(op.unit, total, expert)

    def _parked(self, expert: int) -> Tensor:
        size = self.plan.figures.elements
        return self._buffers.parked_experts[0][expert * size : (expert + 1) * size]

    def _place(self, slots: Sequence[Tensor], op: Op, pool: Pool, expert: int) -> Tensor:
        """Return an expert's place in the slot of a round."""
        return slots[op.slot(pool) * self.plan.in_round + expert % self.plan.in_round][: self.plan.figures.elements]

    def _of_unit(self, unit: int, whole: Tensor, expert: int) -> dict[str, Tensor]:
        """Return an expert's part of a plane of its unit, by attribute."""
        found = {}
        for name, shape, start in self._stacks(unit):
            size = prod(shape[1:])
            found[name] = whole[start + expert * size :][:size].view(shape[1:])
        return found

    def _in_slot(self, unit: int, slot: Tensor) -> dict[str, Tensor]:
        """Return an expert's parts of a slot of its own, by attribute: one after another."""
        found, start = {}, 0
        for name, shape, _ in self._stacks(unit):
            size = prod(shape[1:])
            found[name] = slot[start : start + size].view(shape[1:])
            start += round_up(size, PARAMETER_ALIGNMENT)
        return found

    def _stacks(self, unit: int) -> Iterator[tuple[str, tuple[int, ...], int]]:
        """Yield attribute, shape and first element in its unit of each stack of experts."""
        block = self._blocks[unit - 1]
        assert block is not None, "the unit has experts"
        specs = {spec.name: spec for spec in self._layouts[unit].parameters}
        for attribute, name in block.names.items():
            yield attribute, specs[name].shape, specs[name].offset
