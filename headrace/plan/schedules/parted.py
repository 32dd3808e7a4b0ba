"""Blocks whose experts are parts, in a step: micro-batches go up to the router, experts come, micro-batches go on.

They do so in groups. An expert comes once for each group, forward and backward, if some token of the group wants it. In
backward it is known from forward which are wanted, so they are read ahead. Experts that are trained come from their block's
weights in host memory, and the gradients of a round leave before those of the next but one are summed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.plan.schedules.experts import ROUTED, BringExperts
from headrace.plan.schedules.ledger import Ledger
from headrace.plan.value.expert_plan import ROUNDS_SUMMED
from headrace.plan.value.plan import Plan
from headrace.terms.lanes import Lane
from headrace.terms.program import PIECE_SHIFT, Pool, Verb, Waiting, buffer

_CHOICES = buffer(Pool.CHOICES)
PIECE = 1 << PIECE_SHIFT
_SUMS, PARKED = buffer(Pool.EXPERT_SUMS), buffer(Pool.PARKED)


class PartedBlocks:
    """Emits what is special of such blocks into `ledger`, for a pass of `num_micro` micro-batches."""

    def __init__(self, plan: Plan, ledger: Ledger, num_micro: int) -> None:
        self._plan, self._ledger, self._num_micro, experts = plan, ledger, num_micro, plan.experts
        weight = plan.planes.weight
        self.trains = experts is not None and experts.is_trained
        self.remakes = experts is not None and experts.remakes
        self._bringing = BringExperts(experts, ledger, weight, separate=plan.separate_device) if experts else None
        self._turn = 0
        self._expert_bytes = weight.num_bytes(experts.figures.elements) if experts else 0

    def has(self, block: int) -> bool:
        """Return whether the experts of a block are parts."""
        return self._plan.experts is not None and self._plan.experts.has(block)

    def groups(self, block: int) -> list[range]:
        """Return the groups of micro-batches that are in a block together: of those that come whole, each alone."""
        size = self._plan.experts.together if self._plan.experts and self.has(block) else 1
        return [range(start, min(start + size, self._num_micro)) for start in range(0, self._num_micro, size)]

    def common_flops(self, block: int) -> float:
        """Return the operations of a block's forward on a micro-batch without its experts; all, where it comes whole."""
        flops = self._plan.results.forward_flops[block] if self._plan.results.forward_flops else 0.0
        return flops - self._expert_flops(block) if self.has(block) else flops

    def parks(self, block: int) -> bool:
        """Return whether sums of experts' gradients wait on the host for another group."""
        return self.trains and self._plan.separate_device and len(self.groups(block)) > 1

    def forward(self, block: int, group: range, weights: Sequence[int], host: int, inputs: Mapping[int, Sequence[int]]) -> None:
        """Take a group, whose `inputs` lie there by micro-batch, up to the router of a block, and through its experts. Nothing,
        where it comes whole. `host` has the block's weights in host memory.
        """
        if not self.has(block):
            return
        op = self._ledger.op
        for micro in group:
            flops = self.common_flops(block)
            op(Verb.ENTER, Lane.COMPUTE, (*weights, *inputs[micro]), (_CHOICES,), unit=block, micro=micro, flops=flops)
        op(Verb.ROUTE, Lane.ROUTER, (_CHOICES,), (ROUTED,), unit=block, micro=group[0])
        for number in self._rounds(block):
            ready = self._bring(block, group, number, (host, ROUTED) if self.trains else (ROUTED,))
            self._work(Verb.VISIT, block, group, number, (ready, ROUTED) if self.trains else (ready,))

    def backward(self, block: int, group: range, host: int, made: Sequence[int], gradient: int) -> None:
        """Take a group, whose blocks are recomputed, back through the experts. Where these are trained, their gradients go to
        `made`; from a separate device to `gradient`, or to where they wait for the next group.
        """
        parks = self.parks(block)
        for number in self._rounds(block):
            what: dict[str, Any] = {"unit": block, "part": number, "micro": group[0]}
            reads, sums = (self._bring(block, group, number, (host,) if self.trains else ()),), made if self.trains else ()
            what["num_bytes"] = int(self._share(block, group) * self._expert_bytes)
            if leaves := self.trains and self._plan.separate_device:
                self._turn += 1
                sums = (_SUMS + self._turn % ROUNDS_SUMMED,)
                if parks and group[0]:
                    kept = (PARKED + (number + 1) * PIECE,)
                    self._ledger.op(Verb.IN, Lane.HOST_TO_DEVICE, kept, sums, waiting=Waiting.SUM, **what)
            self._work(Verb.REVISIT, block, group, number, reads, sums)
            if parks:
                to, what["waiting"] = (PARKED + (number + 1) * PIECE,), Waiting.SUM
                self._ledger.op(Verb.OUT, Lane.DEVICE_TO_HOST, sums, to, **what)
            elif leaves:
                self._ledger.op(Verb.DRAIN, Lane.DEVICE_TO_HOST, sums, (gradient,), **what)

    def _rounds(self, block: int) -> range:
        experts = self._plan.experts
        assert experts is not None, "experts are parts"
        return range(experts.rounds(block, experts.figures.num_experts[block]))

    def _bring(self, block: int, group: range, number: int, reads: Sequence[int]) -> int:
        assert self._bringing is not None, "experts are parts"
        return self._bringing.bring(block, number, self._share(block, group), reads, micro=group[0])

    def _share(self, block: int, group: range) -> float:
        """Return how many experts of a round a group is expected to want."""
        plan, experts = self._plan, self._plan.experts
        assert experts is not None, "experts are parts"
        tokens = round(plan.batch.tokens_per_step * len(group) / max(1, plan.batch.num_micro_batches))
        return experts.touched(block, tokens) / experts.rounds(block, experts.figures.num_experts[block])

    def _expert_flops(self, block: int) -> float:
        experts, batch = self._plan.experts, self._plan.batch
        assert experts is not None, "experts are parts"
        flops = self._plan.results.forward_flops[block] if self._plan.results.forward_flops else 0.0
        tokens = batch.tokens_per_step / max(1, batch.num_micro_batches)
        return min(flops, 2.0 * tokens * experts.choices * experts.figures.num_parameters)

    def _work(self, verb: Verb, block: int, group: range, number: int, reads: Sequence[int], sums: Sequence[int] = ()) -> None:
        """Emit the computation of a round: backward computes the experts again, and gradients of hidden states; of weights."""
        times = 1 if verb is Verb.VISIT else 3 if self.trains else 2
        self._ledger.op(
            verb,
            Lane.COMPUTE,
            reads,
            sums,
            unit=block,
            part=number,
            micro=group[0],
            num_bytes=int(times * self._share(block, group) * self._expert_bytes),
            flops=times * self._expert_flops(block) * len(group) / len(self._rounds(block)),
        )
