"""A forward pass: from a plan to a program that scores rows, and changes nothing: no gradient, no update, no commit.

Weights come as for a training step, and the next program, of either kind, finds what slots hold.
"""

from typing import Any

from headrace.plan.schedules.hosted import HostedStates
from headrace.plan.schedules.ledger import Snapshot
from headrace.plan.schedules.parted import PartedBlocks
from headrace.plan.schedules.weights import RESIDENT, Weights
from headrace.plan.value.plan import Plan
from headrace.terms.lanes import Lane
from headrace.terms.program import Program, Verb


def build_forward(plan: Plan, num_micro_batches: int, before: Snapshot, *, shared: bool = False) -> tuple[Program, Snapshot]:
    """Return the program of one pass over `num_micro_batches` micro-batches, and what it leaves behind.

    `before` may have no pending update, because a pass reads the newest weights. `shared`: see `Weights`.
    """
    schedule = _Forward(plan, before, shared=shared)
    schedule.run(num_micro_batches)
    return schedule.ledger.finish()


class _Forward(Weights):
    """Emits operations in order."""

    def __init__(self, plan: Plan, before: Snapshot, *, shared: bool) -> None:
        super().__init__(plan, before, shared=shared)
        self.plan = plan
        self.come_in_parts = plan.parts is not None

    def run(self, num_micro: int) -> None:
        plan, op, parted = self.plan, self.ledger.op, PartedBlocks(self.plan, self.ledger, num_micro)
        hosted, last = HostedStates(plan, self.ledger, num_micro, spills=False), 0
        for end in plan.ends:
            self.refresh(end)
        for micro in range(num_micro):
            made = hosted.going()
            op(Verb.PROLOGUE, Lane.COMPUTE, (RESIDENT,), made, unit=0, micro=micro, flops=self.flops(0))
            hosted.leave(1, micro, made)
        for block in range(1, self.blocks + 1):
            self.position = block - 1
            for ahead in range(block, min(block + plan.prefetch, self.blocks) + 1):
                self.acquire(ahead)
            host, computed = self.acquired.pop(block)
            weights = self.reads_of(block, host, computed)
            linked = plan.parts.forward_bytes(block, plan.planes.weight.bytes_per_element) if plan.parts else 0
            for group in parted.groups(block):
                inputs = hosted.arrive(group)
                parted.forward(block, group, weights, host, inputs)
                for micro in group:
                    flops, made = 0.0 if parted.has(block) else self.flops(block), hosted.going()
                    what: dict[str, Any] = {"unit": block, "micro": micro, "flops": flops, "linked": linked}
                    last = op(Verb.FORWARD, Lane.COMPUTE, (*weights, *inputs[micro]), made, **what)
                    hosted.leave(block + 1, micro, made)
        self.visit(plan, (last,))
        unit = plan.ends[-1]
        for micro in range(num_micro):
            reads = (*(RESIDENT + end for end in plan.ends), *hosted.arrive(range(micro, micro + 1))[micro])
            op(Verb.SCORE, Lane.COMPUTE, reads, unit=unit, micro=micro, flops=self.results.epilogue_flops)

    def uses_until(self, block: int) -> int:
        # The next use is in this pass, or in the next one, if passes follow one another.
        return next(use - self.position for use in (block - 1, self.blocks + block - 1) if use > self.position)
