"""Where the gradients of micro-batches are added: one after the other, or as an aligned binary tree (`terms.options.summing`).

Invariant: a sum of either kind has the same bits however the step is cut into passes; a tree's, whoever computes its branches.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from headrace.flow.weights.buffers import Buffers
from headrace.plan.value.plan import Plan
from headrace.terms.layout import UnitLayout
from headrace.terms.options.summing import SEQUENTIAL, branches_before, merges_after, place_of
from headrace.terms.program import Op, Pool


class SequentialSums:
    """Adds each micro-batch to those before it. Gradients that are made in place are added in the drained gradient's buffer.

    `delivered` names, by unit, the parameters that got gradients since the step began.
    """

    def __init__(self, buffers: Buffers) -> None:
        self._buffers, self._slot_of = buffers, buffers.plan.gradient_slot_of
        self.delivered: dict[int, set[str]] = defaultdict(set)

    @contextmanager
    def leaf(self, op: Op, unit: int, trained: UnitLayout) -> Iterator[tuple[Tensor, set[str]]]:
        """Make the context in which `op` makes a micro-batch's gradients of a unit. It gives the flat tensor to which they are
        added, and the names of the parameters that have some there. A context that fails adds nothing more.
        """
        total = self._buffers.accumulator(unit, op.slot(Pool.ACCUMULATOR))
        if total is None:
            total = self._buffers.gradient_tensor(unit, self._slot_of.get(unit, op.slot(Pool.GRADIENT)))
        yield total, self.delivered[unit]


def sums_of(plan: Plan, buffers: Buffers, num_micro: int) -> SequentialSums:
    """Return the sums of a step of `num_micro` micro-batches."""
    if plan.gradients.order == SEQUENTIAL or not plan.gradients.accumulate:
        return SequentialSums(buffers)
    return TreeSums(plan, buffers, num_micro)


class TreeSums(SequentialSums):
    """Adds a micro-batch to its branch once that is whole.

    The leaves of a tied matrix wait for its second use, each in a place of its own.
    """

    def __init__(self, plan: Plan, buffers: Buffers, num_micro: int) -> None:
        super().__init__(buffers)
        self._tied, self._num_micro = plan.tied, num_micro
        # Micro-batch -> the parameters of the prologue whose gradients the head has given to its leaf.
        self._waiting: dict[int, set[str]] = {}

    @contextmanager
    def leaf(self, op: Op, unit: int, trained: UnitLayout) -> Iterator[tuple[Tensor, set[str]]]:
        """Make a leaf, which begins with nothing, or with the gradients of the other use of a tied matrix."""
        micro, waits = op.micro, self._tied and unit == 0
        named = self._waiting.pop(micro, set()) if waits else set()
        yield self._place(op, unit, micro if waits else place_of(micro)), named
        if unit != op.unit:
            self._waiting[micro] = named
            return
        self.delivered[unit] |= named
        top = place_of(micro)
        sums = [self._place(op, unit, each) for each in ((*branches_before(micro), micro) if waits else range(top + 1))]
        for spec in trained.parameters:
            if spec.name not in named:
                sums[top][spec.offset : spec.offset + spec.num_elements] = 0
        for _ in range(merges_after(micro, self._num_micro)):
            sums[top - 1] += sums[top]
            top -= 1

    def _place(self, op: Op, unit: int, place: int) -> Tensor:
        found = self._buffers.accumulator(unit, op.slot(Pool.ACCUMULATOR), place)
        assert found is not None, "what has several micro-batches has accumulators"
        return found
