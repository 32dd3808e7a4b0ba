"""How single experts come to compute, in a pass as in a step: files -> host slot -> device slot, a few at a time.

Whoever knows what routers chose says which experts a block wants (`wanted`). They come in *rounds*
(`plan/value/expert_plan.py`), past two shelves: one in host memory, one where compute reads. Experts that are trained lie in
their units in host memory, and come from there.

Invariants: an expert is read only if it is wanted and on neither shelf; what shelves hold never decides bits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.flow.weights.expert_source import ExpertSource
from headrace.flow.weights.weights import WeightBuffers
from headrace.machine.protocol import Machine
from headrace.model.parts.banks import ExpertPlaces, Weights
from headrace.plan.value.expert_plan import ExpertPlan
from headrace.terms.program import Op, Pool
from headrace.terms.shelf import Part, Place, Shelf


@dataclass
class ExpertCounts:
    """How many experts a pass `wanted`, and how many of these it `found` in memory.

    `router_seconds` pass between the routers of a block and the first experts that they chose.
    """

    wanted: int = 0
    found: int = 0
    router_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Coming:
    """An expert of a round: where it lies in a tier, or the weights of its unit; its `place` on the shelf of compute."""

    number: int
    flat: Tensor
    place: Place | None


def _part(unit: int, expert: int) -> Part:
    return Part(unit, ((expert, expert + 1),))


class Experts:
    """Brings rounds of experts into a plan's buffers; without a `source`, from their units in host memory.

    `wanted` are ascending, by unit and the first micro-batch of a group (-1 in a pass); all are, where it does not say.
    """

    def __init__(
        self, plan: ExpertPlan, places: ExpertPlaces, buffers: WeightBuffers, machine: Machine, source: ExpertSource | None
    ) -> None:
        self.plan, self.places, self.counts = plan, places, ExpertCounts()
        self._buffers, self._machine, self._source = buffers, machine, source
        self.are_trained = source is None
        self.on_host = Shelf(plan.cached, plan.policy)
        self.on_device = Shelf(len(buffers.kept_device_experts), plan.device_policy)
        self.wanted: dict[tuple[int, int], tuple[int, ...]] = {}
        self._held: dict[tuple[Shelf, int], list[Part]] = {}  # by shelf and slot of a round: what it reads there
        self._here: dict[tuple[Pool, int], list[_Coming]] = {}  # by slot of a round, in host memory, on the way, for compute

    def of_round(self, op: Op, among: Sequence[int] | None = None) -> list[int]:
        """Return the experts of a round that are wanted, or those `among` others. Trained ones come in certain rounds, as their
        gradients wait by rounds.
        """
        if among is None:
            among = self.wanted.get((op.unit, op.micro), range(self.plan.figures.num_experts[op.unit]))
        first, stop = op.part * self.plan.in_round, (op.part + 1) * self.plan.in_round
        return [expert for expert in among if first <= expert < stop] if self.are_trained else list(among[first:stop])

    def want(self, unit: int, tokens: Mapping[int, int]) -> None:
        """Note how many tokens of a micro-batch are sent to experts of a unit: policies of shelves go by it."""
        for expert, times in tokens.items():
            for shelf in (self.on_host, self.on_device):
                shelf.want(_part(unit, expert), times)

    def begin_pass(self) -> None:
        """Forget what a pass counted and wanted. Nothing of it is under way."""
        self.counts = ExpertCounts()
        self.wanted.clear()

    def end_pass(self, *, idle: bool) -> None:
        """End a pass: some experts leave the shelves. `idle`: nothing of it is under way, so nothing is held any more."""
        while idle and self._held:
            (shelf, _), parts = self._held.popitem()
            shelf.release(parts)
        self.on_host.after_pass()
        self.on_device.after_pass()

    def fetch(self, op: Op) -> None:
        """Read those experts of a round that are on no shelf. Those where compute reads are held there from here on."""
        assert self._source is not None, "experts of files are read"
        slot, found = op.slot(Pool.EXPERTS), 0
        self._release(self.on_host, slot)  # nothing reads the round before
        here, tickets, held = [], [], []
        for number, expert in enumerate(self.of_round(op)):
            part, into = _part(op.unit, expert), self._buffers.experts[slot * self.plan.in_round + number]
            there = self.on_device.hold(part)
            kept = None if there is not None and there.is_there else self.on_host.hold(part)
            if kept is not None:
                held.append(part)
                into = self._buffers.cached_experts[kept.slot]
            if any(place is not None and place.is_there for place in (there, kept)):
                found += 1
            else:
                tickets.append(self._source.read_expert(op.unit, expert, into))
            stored = torch.from_numpy(into[: self._source.expert(op.unit, expert).num_bytes])
            here.append(_Coming(expert, stored, there))
        for ticket in tickets:
            ticket.wait()
        self.on_host.arrived(held)
        self._here[Pool.EXPERTS, slot], self._held[self.on_host, slot] = here, held
        self.counts.found += found
        self.counts.wanted += len(here)

    def upload(self, op: Op) -> None:
        """Copy the experts of a round to the device; for experts that are made, copy their sources."""
        self._bring(op, Pool.EXPERT_SOURCES if op.slot(Pool.EXPERT_SOURCES) >= 0 else Pool.DEVICE_EXPERTS, self._copy)

    def make(self, op: Op) -> None:
        """Make the slots of a round's experts from what was read."""
        assert self._source is not None, "experts of files are made"
        self._bring(op, Pool.DEVICE_EXPERTS, self._source.make_expert)

    def weights(self, op: Op) -> dict[int, Weights]:
        """Return the weights of a round's experts, by number and attribute, as views of what `op` reads."""
        slot = op.slot(Pool.DEVICE_EXPERTS)
        if slot >= 0:
            return {
                each.number: self.places.views(op.unit, each.number, each.flat)
                for each in self._here[Pool.DEVICE_EXPERTS, slot]
            }
        return {each.number: self._as_stored(op.unit, each.number, each.flat) for each in self._on_host(op)}

    def _on_host(self, op: Op) -> list[_Coming]:
        if self._source is not None:
            return self._here[Pool.EXPERTS, op.slot(Pool.EXPERTS)]
        unit = torch.from_numpy(self._buffers.stored(op.unit, op))
        return [_Coming(expert, unit, None) for expert in self.of_round(op)]

    def _as_stored(self, unit: int, expert: int, stored: Tensor) -> Weights:
        return self.places.views(unit, expert, stored.view(self._buffers.dtype), whole=self.are_trained)

    def _bring(self, op: Op, pool: Pool, fill: Callable[[int, int, Tensor, Tensor], None]) -> None:
        """Fill the slots of `pool` with a round, but for experts that compute has: from their sources, or from the host."""
        slot, found, computes = op.slot(pool), list[_Coming](), pool is Pool.DEVICE_EXPERTS
        slots = self._buffers.device_experts if computes else self._buffers.expert_sources
        sent = op.slot(Pool.EXPERT_SOURCES) if computes else -1
        for number, each in enumerate(self._here[Pool.EXPERT_SOURCES, sent] if sent >= 0 else self._on_host(op)):
            into = slots[slot * self.plan.in_round + number]
            if computes and each.place is not None:
                into = self._buffers.kept_device_experts[each.place.slot]
            if each.place is None or not each.place.is_there:
                fill(op.unit, each.number, each.flat, into)
            found.append(_Coming(each.number, into, each.place))
        self._here[pool, slot] = found
        if computes:
            self._release(self.on_device, slot)  # compute has done with the round before
            held = [_part(op.unit, each.number) for each in found if each.place is not None]
            self.on_device.arrived(held)
            self._held[self.on_device, slot] = held

    def _copy(self, unit: int, expert: int, stored: Tensor, into: Tensor) -> None:
        if self._source is not None:
            self._machine.copy(into.view(torch.uint8)[: stored.numel()], stored)
            return
        weights = self._as_stored(unit, expert, stored)
        for name, view in self.places.views(unit, expert, into).items():
            self._machine.copy(view, weights[name])

    def _release(self, shelf: Shelf, slot: int) -> None:
        shelf.release(self._held.pop((shelf, slot), ()))
