"""A block with single experts: all seats run to their routers, then experts are loaded in rounds.

In each round a few experts come. All seats with tokens for them continue until they want others, so an expert is read once for
all seats. Routed experts are read once the routers of all seats have run (lane `router`). Experts that are prefetched wait only
for memory; reading continues into the next block.
"""

from collections.abc import Sequence

from headrace.generate.plan.cache_schedule import Caches
from headrace.generate.plan.page_schedule import PagedWeights
from headrace.plan.schedules.experts import ROUTED, BringExperts
from headrace.plan.schedules.ledger import Ledger
from headrace.plan.value.expert_plan import ROUNDS_IN_MEMORY, ExpertPlan
from headrace.terms.costs import CALLS_OF_EXPERT
from headrace.terms.lanes import Lane
from headrace.terms.layout import Plane
from headrace.terms.program import Pool, Verb, buffer

# The most rounds of a block in a forecast: as many bytes, in larger pieces.
_FORECAST_ROUNDS = 6

CHOICES = buffer(Pool.CHOICES)


class ExpertRounds:
    """Emits the operations of blocks with experts into `ledger`.

    `tokens` are those of a pass. `expected`: the rounds are those that are likely, for a forecast, and not all that may be.
    """

    def __init__(self, plan: ExpertPlan, ledger: Ledger, weight: Plane, *, separate: bool, tokens: int, expected: bool) -> None:
        self.plan, self._ledger = plan, ledger
        self._tokens, self._expected = tokens, expected
        self._ahead = plan.is_ahead(tokens)
        self._expert_bytes = weight.num_bytes(plan.figures.elements)
        self._bringing = BringExperts(plan, ledger, weight, separate=separate)

    def block(
        self,
        unit: int,
        weights: Sequence[int],
        *,
        seats: int,
        flops: float,
        num_bytes: int,
        calls: int,
        caches: Caches,
        pages: PagedWeights,
    ) -> None:
        """Emit a block whose other weights lie in `weights`; `flops`, `num_bytes` and `calls` are those of
        one seat in the block.
        """
        plan, op = self.plan, self._ledger.op
        experts = plan.figures.num_experts[unit]
        per_token = 2.0 * plan.figures.num_parameters * min(plan.choices, experts)
        of_experts = min(flops, per_token * self._tokens / seats)
        each = plan.touched(unit, max(1, self._tokens // seats))  # experts that a seat has tokens for
        looped = round(CALLS_OF_EXPERT * each)
        wanted = plan.touched(unit, self._tokens)
        rounds = self._rounds(unit, wanted)
        # What is read ahead comes while seats go to their routers, as far as there are places.
        ready: list[int] = []
        early = min(rounds, ROUNDS_IN_MEMORY) if self._ahead else 0

        def bring() -> None:
            ready.append(self._bring(unit, len(ready), experts if self._ahead else wanted, rounds))

        pages.first_of_all(unit, [bring] * early)
        for seat in range(seats):
            common = {"flops": flops - of_experts, "num_bytes": num_bytes, "calls": max(0, calls - looped)}
            writes = (CHOICES, *caches.bring(unit, seat))
            op(Verb.FORWARD, Lane.COMPUTE, weights, writes, unit=unit, micro=seat, **common)  # type: ignore[arg-type]
            caches.keep(unit, seat)
            pages.between()
        pages.have_come()
        if not self._ahead:
            op(Verb.ROUTE, Lane.ROUTER, (CHOICES,), (ROUTED,), unit=unit)
        multiplied = seats * each
        for number in range(rounds):
            if number == len(ready):
                bring()
            op(
                Verb.FORWARD,
                Lane.COMPUTE,
                (*weights, ready[number]),
                unit=unit,
                part=number,
                num_bytes=int(multiplied / rounds * self._expert_bytes),
                flops=of_experts * seats / rounds,
                calls=round(seats * looped / rounds),
            )
        op(Verb.FORWARD, Lane.COMPUTE, weights, unit=unit, part=rounds)

    def _rounds(self, unit: int, wanted: float) -> int:
        plan = self.plan
        if self._expected:
            return min(_FORECAST_ROUNDS, max(1, plan.rounds(unit, plan.figures.num_experts[unit] if self._ahead else wanted)))
        return plan.rounds(unit, plan.figures.num_experts[unit]) if self._ahead else plan.most_rounds(unit, self._tokens)

    def _bring(self, unit: int, number: int, experts: float, rounds: int) -> int:
        """Bring the experts of a round to where compute reads them; return the buffer."""
        return self._bringing.bring(unit, number, experts / rounds, () if self._ahead else (ROUTED,))
