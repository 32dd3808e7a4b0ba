"""Blocks whose experts are parts, in a step: micro-batches go up to the router, experts come, micro-batches go on.

They do so in groups. An expert comes once for each group, forward and backward, if some token of the group wants it. In
backward it is known from forward which are wanted, so they are read ahead.
"""

from collections.abc import Sequence

from headrace.plan.ledger import Ledger
from headrace.plan.plan import Plan
from headrace.plan.schedules.experts import ROUTED, BringExperts
from headrace.terms.lanes import Lane
from headrace.terms.program import Pool, Verb, buffer

_CHOICES = buffer(Pool.CHOICES)


class PartedBlocks:
    """Emits what is special of such blocks into `ledger`, for a pass of `num_micro` micro-batches."""

    def __init__(self, plan: Plan, ledger: Ledger, num_micro: int) -> None:
        self._plan, self._ledger, self._num_micro, experts = plan, ledger, num_micro, plan.experts
        weight = plan.planes.weight
        self._bringing = BringExperts(experts, ledger, weight, separate=plan.separate_device) if experts else None
        self._expert_bytes = weight.num_bytes(experts.figures.elements) if experts else 0

    def has(self, block: int) -> bool:
        """Return whether the experts of a block are parts."""
        return self._plan.experts is not None and self._plan.experts.figures.num_experts[block] > 0

    def groups(self, block: int) -> list[range]:
        """Return the groups of micro-batches that are in a block together: of those that come whole, each alone."""
        size = self._plan.experts.together if self._plan.experts and self.has(block) else 1
        return [range(start, min(start + size, self._num_micro)) for start in range(0, self._num_micro, size)]

    def common_flops(self, block: int) -> float:
        """Return the operations of a block's forward on a micro-batch without its experts; all, where it comes whole."""
        flops = self._plan.results.forward_flops[block] if self._plan.results.forward_flops else 0.0
        return flops - self._expert_flops(block) if self.has(block) else flops

    def forward(self, block: int, group: range, weights: Sequence[int]) -> None:
        """Take a group up to the router of a block, and through its experts. Nothing, where it comes whole."""
        if not self.has(block):
            return
        op = self._ledger.op
        for micro in group:
            flops = self.common_flops(block)
            op(Verb.ENTER, Lane.COMPUTE, weights, (_CHOICES,), unit=block, micro=micro, flops=flops)
        op(Verb.ROUTE, Lane.ROUTER, (_CHOICES,), (ROUTED,), unit=block, micro=group[0])
        self._visit(Verb.VISIT, block, group, (ROUTED,))

    def backward(self, block: int, group: range) -> None:
        """Take a group, whose blocks are recomputed, back through the experts."""
        self._visit(Verb.REVISIT, block, group, ())

    def _expert_flops(self, block: int) -> float:
        experts, batch = self._plan.experts, self._plan.batch
        assert experts is not None, "experts are parts"
        flops = self._plan.results.forward_flops[block] if self._plan.results.forward_flops else 0.0
        tokens = batch.tokens_per_step / max(1, batch.num_micro_batches)
        return min(flops, 2.0 * tokens * experts.choices * experts.figures.num_parameters)

    def _visit(self, verb: Verb, block: int, group: range, after: Sequence[int]) -> None:
        plan, experts, op = self._plan, self._plan.experts, self._ledger.op
        assert experts is not None and self._bringing is not None, "experts are parts"  # noqa: PT018
        tokens = round(plan.batch.tokens_per_step * len(group) / max(1, plan.batch.num_micro_batches))
        count = experts.figures.num_experts[block]
        rounds, wanted = experts.rounds(block, count), experts.touched(block, tokens)
        times = 1 if verb is Verb.VISIT else 2
        for number in range(rounds):
            ready = self._bringing.bring(block, number, wanted / rounds, after, micro=group[0])
            op(
                verb,
                Lane.COMPUTE,
                (ready,),
                unit=block,
                part=number,
                micro=group[0],
                num_bytes=int(times * wanted / rounds * self._expert_bytes),
                flops=times * self._expert_flops(block) * len(group) / rounds,
            )
