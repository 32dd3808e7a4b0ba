"""One pass of a generation: a program that takes all seats through all blocks once, and then gives each its turn.

All seats pass through a block before the next block's weights are needed, as in FlexGen's zig-zag (Sheng et al. 2023, section
4.2). A seat decodes one token, or comes in with its whole prompt. Between two passes each seat's own code runs; meanwhile the
first blocks of the next pass are fetched.

Invariant: a copy that a seat waits for waits itself behind at most one page of weights, in the simulator as in a link's queue.
This holds if weights come one block ahead or all caches are elsewhere.
"""

from collections.abc import Sequence
from typing import Any

from headrace.generate.plan.cache_schedule import Caches
from headrace.generate.plan.expert_schedule import ExpertRounds
from headrace.generate.plan.page_schedule import PagedWeights
from headrace.generate.plan.plan import GenerationPlan
from headrace.plan.schedules.ledger import Snapshot
from headrace.plan.schedules.weights import RESIDENT
from headrace.terms.costs import PassCosts
from headrace.terms.lanes import Lane
from headrace.terms.program import Pool, Program, Verb, buffer

_CARRIED = buffer(Pool.CARRIED)


def build_pass(
    plan: GenerationPlan,
    num_seats: int,
    before: Snapshot,
    *,
    first: bool = False,
    tokens: int | None = None,
    attends: Sequence[bool] = (),
) -> tuple[Program, Snapshot]:
    """Return the program of one pass of `num_seats` seats, and what it leaves behind. `first`: a pass over prompts, not tokens.

    A seat is the `micro` of its operations. `tokens` are those of the pass; None: it is a forecast, with as many experts as are
    likely. `attends` says for which seats the host attends, () of a forecast.
    """
    schedule = _Pass(plan, before, plan.costs.first if first else plan.costs.next)
    schedule.rows = plan.rows * (plan.costs.product_tokens if first else 1)
    schedule.times = plan.costs.chunks if first else 1
    if plan.experts is not None:
        likely = schedule.rows * num_seats
        schedule.experts = ExpertRounds(
            plan.experts,
            schedule.ledger,
            plan.planes.weight,
            separate=plan.separate_device,
            tokens=tokens or likely,
            expected=tokens is None,
        )
    schedule.run(num_seats, Caches(plan, schedule.ledger, num_seats, first=first, attends=attends))
    return schedule.ledger.finish()


class _Pass(PagedWeights):
    """Emits operations in order."""

    def __init__(self, plan: GenerationPlan, before: Snapshot, costs: PassCosts) -> None:
        super().__init__(plan, before)
        self.plan, self.block_flops = plan, costs.flops
        self.calls = costs.calls or (0,) * plan.num_blocks
        self.waited_bytes = costs.waited_bytes or (0,) * plan.num_blocks
        self.experts: ExpertRounds | None = None
        self.rows = plan.rows  # of a seat's products
        self.times = 1  # that a seat's pass takes a block

    def run(self, num_seats: int, caches: Caches) -> None:
        plan, op = self.plan, self.ledger.op
        for block in range(1, self.blocks + 1):
            self.position = block - 1
            for ahead in range(block, block + plan.prefetch + 1):
                self.acquire((ahead - 1) % self.blocks + 1)
            self.have_come(block)
            weights = (self.acquired.pop(block)[1],)
            weight_bytes = self.times * plan.block_bytes(block, self.rows) + self.waited_bytes[block - 1]
            flops, calls = self.block_flops[block - 1], self.calls[block - 1]
            if self.experts is not None and self.experts.plan.has(block):
                touched = weight_bytes + caches.touched_bytes(block, 0)
                self.experts.block(
                    block, weights, seats=num_seats, flops=flops, num_bytes=touched, calls=calls, caches=caches, pages=self
                )
                continue
            waiting: list[int] = []
            for seat in range(num_seats):
                if plan.separate_device and caches.attends(block, seat):
                    # What lies before attention is a quarter of a dense block's weights at most.
                    before: dict[str, Any] = {"num_bytes": weight_bytes // 4, "flops": flops / 4, "calls": calls // 4}
                    op(Verb.QUERY, Lane.COMPUTE, weights, (_CARRIED + seat,), unit=block, micro=seat, **before)
                    caches.attend(block, seat, _CARRIED + seat)
                    self.between()  # a page comes while the host attends
                    caches.result(block, seat, _CARRIED + seat)
                    waiting.append(seat)
                    continue
                brought = caches.bring(block, seat)
                caches.recompute(block, seat, weights, plan.block_bytes(block, plan.rows * plan.costs.first_tokens) // 4)
                op(
                    Verb.FORWARD,
                    Lane.COMPUTE,
                    weights,
                    brought,
                    unit=block,
                    micro=seat,
                    num_bytes=weight_bytes + caches.touched_bytes(block, seat),
                    flops=flops,
                    calls=calls,
                )
                caches.keep(block, seat)
                self.between()
            # While the host attends for one seat, compute does what lies before attention for the next ones.
            for seat in waiting:
                rest: dict[str, Any] = {
                    "num_bytes": weight_bytes - weight_bytes // 4,
                    "flops": flops - flops / 4,
                    "calls": calls - calls // 4,
                }
                op(Verb.FORWARD, Lane.COMPUTE, (*weights, _CARRIED + seat), unit=block, micro=seat, **rest)
        self.have_come()
        reads, last = tuple(RESIDENT + end for end in plan.ends), plan.ends[-1]
        for seat in range(num_seats):
            flops, num_bytes = plan.costs.head_flops, plan.multiplied_bytes(plan.head_bytes, plan.rows)
            op(Verb.TURN, Lane.COMPUTE, reads, unit=last, micro=seat, num_bytes=num_bytes, flops=flops)

    def uses_until(self, block: int) -> int:
        # The next use is in this pass, or else in the next one.
        return next(use - self.position for use in (block - 1, self.blocks + block - 1) if use > self.position)
