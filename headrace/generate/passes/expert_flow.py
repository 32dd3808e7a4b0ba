"""Single experts in a pass: the operations with a `part`, and how seats wait within a block.

A seat runs a block in its own thread. Where the block's experts are called it says which ones it will want, and waits. Then
experts come round by round, and each seat that waits for one goes on until it wants another (`model/parts/banks.py`).

Invariant: an expert is read once for all seats of a pass, and only if some seat wants it, unless all are read ahead.
"""

import time
from collections.abc import Mapping

from headrace.flow.weights.expert_source import ExpertSource
from headrace.flow.weights.experts import Experts
from headrace.generate.passes.buffers import GenerationBuffers
from headrace.machine.protocol import Machine
from headrace.model import Chain
from headrace.model.parts.banks import Banks, Walker, needed_by
from headrace.model.seats.seats import Seat
from headrace.plan.value.expert_plan import ExpertPlan
from headrace.terms.errors import StepFailed
from headrace.terms.program import Op


class _Visit(Walker):
    """A seat within a block."""

    def __init__(self, flow: "ExpertFlow", unit: int, seat: Seat) -> None:
        super().__init__(seat.wait)
        self.seat, self._flow, self._unit = seat, flow, unit

    def announce(self, experts: Mapping[int, int]) -> None:
        """See `Walker`. At this point the seat has been to its router."""
        super().announce(experts)
        self._flow.loads.want(self._unit, experts)
        if experts:
            self.wait_for(self.needs[0])


class ExpertFlow:
    """The experts of all blocks, in use from the time a plan's buffers exist until `close`."""

    def __init__(
        self, plan: ExpertPlan, chain: Chain, source: ExpertSource, buffers: GenerationBuffers, machine: Machine
    ) -> None:
        self.plan, self._chain = plan, chain
        self.loads = Experts(plan, source.places, buffers, machine, source)
        self._banks = Banks(source.places.blocks, chain.dtype, chain.device)
        self._ahead, self._routed_at = False, 0.0
        self._waiting: list[_Visit] = []
        self._banks.install()

    def close(self) -> None:
        """Put the model's experts back."""
        self._banks.remove()

    def begin_pass(self, tokens: int) -> None:
        """Prepare for a pass over so many tokens. Everything before it is complete."""
        self._ahead = self.plan.is_ahead(tokens)
        self._waiting.clear()
        self.loads.begin_pass()

    def pass_key(self, tokens: int) -> tuple[bool, int]:
        """Return a key that is equal for passes with equal programs."""
        most = max(self.plan.figures.num_experts)
        return self.plan.is_ahead(tokens), min(tokens * self.plan.choices, most)

    def enter(self, unit: int, seat: Seat) -> None:
        """Run a seat into a block, as far as its router. The block's other weights are bound."""
        visit = _Visit(self, unit, seat)

        def run() -> None:
            assert seat.hidden is not None, "a seat of a pass is parked"
            self._banks.visit(visit)
            try:
                seat.hidden = self._chain.block(unit - 1, seat.hidden, seat.calls[unit - 1]).hidden
            finally:
                self._banks.visit(None)

        if not seat.work(run):
            self._waiting.append(visit)

    def route(self, op: Op) -> None:
        """Note which experts of a block the seats want, in ascending order."""
        self.loads.wanted[op.unit, op.micro] = needed_by(self._waiting)
        self._routed_at = time.perf_counter()

    def go_on(self, op: Op) -> None:
        """Let seats continue with the experts of a round."""
        if op.part == 0 and not self._ahead:
            self.loads.counts.router_seconds += time.perf_counter() - self._routed_at
        self._waiting = self._banks.let_pass(self.loads.weights(op), self._waiting, lambda visit: visit.seat.go_on())

    def leave(self, op: Op) -> None:
        """End a block: all seats have passed it.

        Raises:
            StepFailed: a seat has not: it wants an expert that has been and gone.
        """
        if self._waiting:
            wanted = sorted({visit.wants for visit in self._waiting})
            raise StepFailed(
                f"unit {op.unit}: its code asks for experts {wanted[:4]} after larger ones, or for ones that its router did "
                "not choose"
            )
        self._chain.release(op.unit)
