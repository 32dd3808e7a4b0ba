"""Single experts in a pass: the operations with a `part`, and how seats wait within a block.

A seat runs a block in its own thread. Where the block's experts are called it says which ones it will want, and waits. Then
experts come round by round, and each seat that waits for one goes on until it wants one that is not there (`model/banks.py`).

Invariant: an expert is read once for all seats of a pass, and only if some seat wants it, unless all are read ahead.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from headrace.generate.buffers import GenerationBuffers
from headrace.generate.expert_cache import ExpertCache
from headrace.generate.expert_plan import ExpertPlan
from headrace.generate.expert_source import ExpertSource
from headrace.machine.host_memory import Bytes
from headrace.machine.protocol import Machine
from headrace.model import Chain
from headrace.model.banks import Banks
from headrace.model.seats import Seat
from headrace.terms.errors import StepFailed
from headrace.terms.program import Op, Pool


@dataclass(slots=True)
class ExpertCounts:
    """How many experts a pass `wanted`, and how many of these it `found` in memory.

    `router_seconds` pass between the routers of a block and the first experts that they chose.
    """

    wanted: int = 0
    found: int = 0
    router_seconds: float = 0.0


class _Visit:
    """A seat within a block. `wants` is the expert for which it waits."""

    def __init__(self, flow: "ExpertFlow", unit: int, seat: Seat) -> None:
        self.seat, self.needs, self.wants = seat, tuple[int, ...](), -1
        self._flow, self._unit = flow, unit

    def announce(self, experts: Mapping[int, int]) -> None:
        """See `Visitor`. At this point the seat has been to its router."""
        self.needs = tuple(experts)
        for expert, tokens in experts.items():
            self._flow.cache.tokens[self._unit, expert] += tokens
        if experts:
            self.wait_for(self.needs[0])

    def wait_for(self, expert: int) -> None:
        """See `Visitor`."""
        self.wants = expert
        self.seat.wait()


class ExpertFlow:
    """The experts of all blocks, in use from the time a plan's buffers exist until `close`."""

    def __init__(
        self, plan: ExpertPlan, chain: Chain, source: ExpertSource, buffers: GenerationBuffers, machine: Machine
    ) -> None:
        self.plan, self._chain, self._source, self._buffers, self._machine = plan, chain, source, buffers, machine
        self.cache = ExpertCache(buffers.cached_experts)
        self._banks = Banks(source.blocks, chain.dtype, chain.device)
        self.counts = ExpertCounts()
        self._ahead, self._routed_at = False, 0.0
        self._waiting: list[_Visit] = []
        self._routed: dict[int, tuple[int, ...]] = {}
        self._read: dict[int, list[tuple[int, Bytes]]] = {}  # by slot of a round: experts, and where each was read
        self._sent: dict[int, list[tuple[int, torch.Tensor]]] = {}
        self._ready: dict[int, list[tuple[int, torch.Tensor]]] = {}
        self._banks.install()

    def close(self) -> None:
        """Put the model's experts back."""
        self._banks.remove()

    def begin_pass(self, tokens: int) -> None:
        """Prepare for a pass over so many tokens. Everything before it is complete."""
        self._ahead = self.plan.is_ahead(tokens)
        self._waiting.clear()
        self._routed.clear()
        self.counts = ExpertCounts()

    def end_pass(self) -> None:
        """Choose the experts that stay in host memory. Nothing may be under way."""
        self.cache.after_pass()

    def pass_key(self, tokens: int) -> tuple[bool, int]:
        """Return a key that is equal for passes with equal programs."""
        most = max(self.plan.figures.num_experts)
        return self.plan.is_ahead(tokens), min(tokens * self.plan.choices, most)

    def has(self, unit: int) -> bool:
        """Return whether a unit has experts."""
        return self.plan.figures.num_experts[unit] > 0

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
        self._routed[op.unit] = tuple(sorted({expert for visit in self._waiting for expert in visit.needs}))
        self._routed_at = time.perf_counter()

    def fetch(self, op: Op) -> None:
        """Read those experts of a round that are not in host memory."""
        slot, first = op.slot(Pool.EXPERTS), op.part * self.plan.in_round
        wanted = range(self.plan.figures.num_experts[op.unit]) if self._ahead else self._routed[op.unit]
        found, tickets = [], []
        for place, expert in enumerate(wanted[first : first + self.plan.in_round]):
            there = self.cache.find((op.unit, expert))
            if there is None:
                there = self.cache.admit((op.unit, expert))
                if there is None:
                    there = self._buffers.experts[slot * self.plan.in_round + place]
                tickets.append(self._source.read_expert(op.unit, expert, there))
            else:
                self.counts.found += 1
            self.counts.wanted += 1
            found.append((expert, there[: self._source.expert(op.unit, expert).num_bytes]))
        for ticket in tickets:
            ticket.wait()
        self._read[slot] = found

    def upload(self, op: Op) -> None:
        """Copy the experts of a round to the device; for experts that are made, copy their sources."""
        slot, sent = op.slot(Pool.EXPERTS), op.slot(Pool.EXPERT_SOURCES)
        computed, found = op.slot(Pool.DEVICE_EXPERTS), []
        for place, (expert, read) in enumerate(self._read[slot]):
            if sent >= 0:
                into = self._buffers.expert_sources[sent * self.plan.in_round + place][: read.size]
            else:
                into = self._buffers.device_experts[computed * self.plan.in_round + place].view(torch.uint8)[: read.size]
            self._machine.copy(into, torch.from_numpy(read))
            found.append((expert, into))
        if sent >= 0:
            self._sent[sent] = found
        else:
            self._ready[computed] = [(expert, there.view(self._buffers.dtype)) for expert, there in found]

    def make(self, op: Op) -> None:
        """Make the slots of a round's experts from what was read."""
        sent, computed = op.slot(Pool.EXPERT_SOURCES), op.slot(Pool.DEVICE_EXPERTS)
        read = (
            self._sent[sent]
            if sent >= 0
            else [(expert, torch.from_numpy(there)) for expert, there in self._read[op.slot(Pool.EXPERTS)]]
        )
        found = []
        for place, (expert, stored) in enumerate(read):
            size = self._source.expert(op.unit, expert).layout.num_elements
            into = self._buffers.device_experts[computed * self.plan.in_round + place][:size]
            self._source.make_expert(op.unit, expert, stored, into)
            found.append((expert, into))
        self._ready[computed] = found

    def go_on(self, op: Op) -> None:
        """Let seats continue with the experts of a round."""
        if op.part == 0 and not self._ahead:
            self.counts.router_seconds += time.perf_counter() - self._routed_at
        computed, host = op.slot(Pool.DEVICE_EXPERTS), op.slot(Pool.EXPERTS)
        ready: Sequence[tuple[int, torch.Tensor]]
        if computed >= 0:
            ready = self._ready[computed]
        else:
            ready = [(expert, torch.from_numpy(there).view(self._buffers.dtype)) for expert, there in self._read[host]]
        present = self._banks.present
        block = self._source.blocks[op.unit - 1]
        assert block is not None, "it has experts"
        for expert, flat in ready:
            specs = {spec.name: spec for spec in self._source.expert(op.unit, expert).layout.parameters}
            present[expert] = {
                attribute: flat[specs[name].offset : specs[name].offset + specs[name].num_elements].view(specs[name].shape)
                for attribute, name in block.names.items()
            }
        try:
            self._waiting = [visit for visit in self._waiting if not self._served(visit)]
        finally:
            present.clear()

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

    def _served(self, visit: _Visit) -> bool:
        """Let a seat go on while the expert that it wants is there; return whether it has passed the block."""
        return visit.wants in self._banks.present and visit.seat.go_on()
