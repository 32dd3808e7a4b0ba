"""How single experts come to compute, in a generation's pass as in a step: files -> host slot -> device slot, a few at a time.

Experts come in *rounds* (`plan/value/expert_plan.py`). Whoever computes says which experts a round brings, and gets them.

Invariant: an expert is read only if it is wanted and not on the shelf in host memory.
"""

from collections.abc import Mapping, Sequence

import torch

from headrace.flow.weights.expert_source import ExpertSource
from headrace.flow.weights.weights import WeightBuffers
from headrace.machine.host_memory import Bytes
from headrace.machine.protocol import Machine
from headrace.plan.value.expert_plan import ExpertPlan
from headrace.terms.program import Op, Pool
from headrace.terms.shelf import POLICIES, Part, Shelf

Weights = Mapping[str, torch.Tensor]


def part_of(unit: int, expert: int) -> Part:
    """Return an expert as a part of its unit."""
    return Part(unit, ((expert, expert + 1),))


class ExpertLoads:
    """Brings rounds of experts into a plan's buffers. The `shelf` has those that stay in host memory."""

    def __init__(self, plan: ExpertPlan, source: ExpertSource, buffers: WeightBuffers, machine: Machine) -> None:
        self.plan, self.source, self._buffers, self._machine = plan, source, buffers, machine
        self.shelf = Shelf(plan.cached, POLICIES[plan.policy](plan.cached))
        self._held: dict[int, list[Part]] = {}  # by slot of a round: experts of the shelf that it reads
        self._read: dict[int, list[tuple[int, Bytes]]] = {}  # by slot of a round: experts, and where each was read
        self._sent: dict[int, list[tuple[int, torch.Tensor]]] = {}
        self._ready: dict[int, list[tuple[int, torch.Tensor]]] = {}

    def fetch(self, op: Op, wanted: Sequence[int]) -> int:
        """Read the round's experts, of all that are `wanted`; return how many of them were in host memory."""
        slot, first, found = op.slot(Pool.EXPERTS), op.part * self.plan.in_round, 0
        self.shelf.release(self._held.pop(slot, ()))  # nothing reads the round before
        read, tickets, held = [], [], []
        for number, expert in enumerate(wanted[first : first + self.plan.in_round]):
            part = part_of(op.unit, expert)
            place, into = self.shelf.hold(part), self._buffers.experts[slot * self.plan.in_round + number]
            if place is not None:
                held.append(part)
                into = self._buffers.cached_experts[place.slot]
            if place is not None and place.is_there:
                found += 1
            else:
                tickets.append(self.source.read_expert(op.unit, expert, into))
            read.append((expert, into[: self.source.expert(op.unit, expert).num_bytes]))
        for ticket in tickets:
            ticket.wait()
        self.shelf.arrived(held)
        self._read[slot], self._held[slot] = read, held
        return found

    def end_pass(self) -> None:
        """Let go of what a pass held, so that its end may choose what stays. Nothing may be under way."""
        while self._held:
            self.shelf.release(self._held.popitem()[1])
        self.shelf.after_pass()

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
            size = self.source.expert(op.unit, expert).layout.num_elements
            into = self._buffers.device_experts[computed * self.plan.in_round + place][:size]
            self.source.make_expert(op.unit, expert, stored, into)
            found.append((expert, into))
        self._ready[computed] = found

    def weights(self, op: Op) -> dict[int, Weights]:
        """Return the weights of a round's experts, by number and attribute, as views of the slots that `op` reads."""
        host, computed = op.slot(Pool.EXPERTS), op.slot(Pool.DEVICE_EXPERTS)
        ready: Sequence[tuple[int, torch.Tensor]]
        if computed >= 0:
            ready = self._ready[computed]
        else:
            ready = [(expert, torch.from_numpy(there).view(self._buffers.dtype)) for expert, there in self._read[host]]
        block = self.source.blocks[op.unit - 1]
        assert block is not None, "it has experts"
        found: dict[int, Weights] = {}
        for expert, flat in ready:
            specs = {spec.name: spec for spec in self.source.expert(op.unit, expert).layout.parameters}
            found[expert] = {
                attribute: flat[specs[name].offset : specs[name].offset + specs[name].num_elements].view(specs[name].shape)
                for attribute, name in block.names.items()
            }
        return found
