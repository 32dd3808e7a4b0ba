"""How weights come to compute, in a step as in a pass: SSD or site -> host slot -> device slot.

What is trained of a unit may lie beside its weights; the slot that compute reads is then made of both.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

import torch

from headrace.files.block_file import Ticket
from headrace.flow.weights.arena import TORCH_DTYPES, DeviceArena
from headrace.flow.weights.completing import read_completing
from headrace.flow.weights.make import Maker
from headrace.machine.arena import Arena
from headrace.machine.host_memory import Bytes, huge_page_buffer
from headrace.machine.protocol import Machine
from headrace.plan.value.placement import Placement
from headrace.plan.value.weight_sizes import BufferGroup
from headrace.store import StateStore
from headrace.terms.families import TRAINED, WEIGHTS
from headrace.terms.lanes import Lane
from headrace.terms.program import Op, Pool, Verb
from headrace.terms.sizes import PAGE_BYTES, round_up

_SHARED = "shared host"

if TYPE_CHECKING:  # a generation brings weights without what trains them
    from headrace.update.sites.site import Site


class WeightBuffers:
    """The buffers of a plan, taken from one arena per tier; those of weights. Index them by an operation's slots.

    `host_weights[slot]` and `trained[unit]` (followed by its basis) are uint8 arrays; `sources[slot]`, from which weights are
    made on the device, are uint8 tensors. `residents[unit]` are weights that stay where compute reads them; `head_on_host` is a
    head that visits the device (None: there is none), `head_slots` are for ranges of its rows. Buffers for single
    experts hold one each, `in_round` of them for a slot (`experts.py`). Where ranks of one machine have one copy,
    `shared` gives its memory.
    """

    def __init__(
        self,
        plan: Placement,
        groups: Mapping[str, BufferGroup],
        machine: Machine,
        shared: Callable[[int], Bytes] | None = None,
    ) -> None:
        self._placement, self._groups, self.dtype = plan, groups, TORCH_DTYPES[plan.compute_dtype]
        sizes = {"host": 0, "device": 0, _SHARED: 0}
        for group in groups.values():
            sizes[_SHARED if shared and group.is_shared else group.tier] += group.total_bytes
        self._host = Arena("host", sizes["host"], machine.host_buffer)
        self._shared = Arena(_SHARED, sizes[_SHARED], shared) if shared else self._host
        self._device = DeviceArena(machine, sizes["device"]) if plan.separate_device else None
        self.host_weights = self.take_host("host_weights")
        self.trained = {unit: self.take_host(f"trained.{unit}")[0] for unit in plan.units_with_family}
        self._staging = self.take_host("staging")
        self._device_weights = [tensor.view(self.dtype) for tensor in self.take_compute("device_weights")]
        self.sources = self.take_compute("sources")
        self.visitor: int | None = None  # the unit of a head that comes for the loss, and leaves
        self.head_on_host = next(iter(self.take_host("visiting_head")), None)
        self.head_slots = [tensor.view(self.dtype) for tensor in self.take_compute("head_slots")]
        self.experts, self.cached_experts = self.take_host("experts"), self.take_host("cached_experts")
        self.device_experts = [tensor.view(self.dtype) for tensor in self.take_compute("device_experts")]
        self.kept_device_experts = [tensor.view(self.dtype) for tensor in self.take_compute("kept_device_experts")]
        self.expert_sources = self.take_compute("expert_sources")
        self.residents: dict[int, torch.Tensor] = {}
        resident, start = self.take_compute("resident_weights"), 0
        for unit in plan.resident_units:
            self.residents[unit] = resident[0][start : start + plan.slot_bytes(unit)].view(self.dtype)
            start += plan.resident_bytes(unit)

    def stored(self, unit: int, op: Op) -> Bytes:
        """Return a unit's weights in host memory, as they lie on the drive: in the slot that `op` names, or where they stay."""
        slot = op.slot(Pool.HOST_WEIGHTS)
        return self.staged(unit) if slot < 0 else self.host_weights[slot][: self._placement.stored_bytes(unit)]

    def staged(self, unit: int) -> Bytes:
        """Return host memory for a resident unit as it is stored: its own place, or on its way to that."""
        plan = self._placement
        if self._staging:
            return self._staging[0][: plan.stored_bytes(unit)]
        if plan.separate_device or plan.units[unit].is_made:
            return huge_page_buffer(round_up(plan.stored_bytes(unit), PAGE_BYTES))[: plan.stored_bytes(unit)]
        return self.residents[unit].view(torch.uint8).numpy()

    def computed(self, unit: int, op: Op) -> torch.Tensor:
        """Return the weights of a unit that compute reads: where they stay, in a slot of their own, or in their host buffer."""
        if unit in self.residents:
            return self.residents[unit]
        if (slot := op.slot(Pool.DEVICE_WEIGHTS)) >= 0:
            return self._device_weights[slot][: self._placement.slot_elements(unit)]
        return torch.from_numpy(self.stored(unit, op)).view(self.dtype)

    def take_host(self, name: str) -> list[Bytes]:
        """Return the buffers of a group in host memory; [] where the plan has no such group."""
        group = self._groups.get(name)
        if group is None:
            return []
        arena = self._shared if group.is_shared else self._host
        return [arena.take(group.num_bytes, name) for _ in range(group.count)]

    def take_compute(self, name: str) -> list[torch.Tensor]:
        """Return the buffers of a group, as tensors, in the tier that the plan says: as a rule where compute reads."""
        group = self._groups.get(name)
        if group is None or group.tier == "host" or self._device is None:
            return [torch.from_numpy(buffer) for buffer in self.take_host(name)]
        return [self._device.take(group.num_bytes) for _ in range(group.count)]


class WeightSource(Protocol):
    """Weights by unit. While it is open, nothing that it reads may change."""

    def read(self, unit: int, into: Bytes) -> None:
        """Fill `into` with a unit's bytes as they are stored."""

    def read_trained(self, memory: Mapping[int, Bytes]) -> None:
        """Fill `memory` with the trained families that lie beside frozen weights: it has room for each unit's."""

    def make(self, unit: int, stored: torch.Tensor | None, trained: torch.Tensor | None, into: torch.Tensor) -> None:
        """Make a unit's flat slot `into`. See `Maker.make`."""


class StoreSource:
    """The newest weights in a run's store, or at the `site` of far units. `maker` makes slots from several families."""

    def __init__(self, store: StateStore, maker: Maker, site: "Site | None" = None) -> None:
        self.store, self.maker, self._site = store, maker, site

    def read(self, unit: int, into: Bytes) -> None:
        """See `WeightSource.read`."""
        if self.maker.forms[unit].is_far:
            assert self._site is not None, "far units come with their site"
            self._site.pull(unit, into)
        else:
            self.store.read(unit, WEIGHTS, into).wait()

    def read_span(self, unit: int, start: int, into: Bytes) -> Ticket:
        """Start filling `into` with a part of a frozen unit's bytes, from byte `start` on; both in whole pages."""
        return self.store.read_span(unit, WEIGHTS, start, into)

    def read_trained(self, memory: Mapping[int, Bytes]) -> None:
        """See `WeightSource.read_trained`."""
        for unit, into in memory.items():
            read_completing(self.store, unit, into)

    def make(self, unit: int, stored: torch.Tensor | None, trained: torch.Tensor | None, into: torch.Tensor) -> None:
        """See `WeightSource.make`."""
        self.maker.make(unit, stored, trained, into)


class Stream(Protocol):
    """What brings weights: a plan's buffers, and where they are filled from."""

    @property
    def plan(self) -> Placement:
        """What lives where."""

    @property
    def machine(self) -> Machine:
        """The machine that copies."""

    @property
    def source(self) -> WeightSource:
        """Where weights come from."""

    @property
    def buffers(self) -> WeightBuffers:
        """Where they come to."""


def load_residents(stream: Stream, complete: Callable[[int, str, Bytes], None] = lambda unit, family, into: None) -> None:
    """Bring what stays in memory: trained families beside frozen weights, and resident units that live here.

    `complete` fills what others hold of a unit's family.
    """
    plan, buffers, source = stream.plan, stream.buffers, stream.source
    source.read_trained(buffers.trained)
    for unit, trained in buffers.trained.items():
        complete(unit, TRAINED, trained[: plan.trained_bytes(unit)])
    if buffers.head_on_host is not None:
        source.read(plan.ends[-1], buffers.head_on_host)
    for unit in sorted(set(filter(plan.slot_elements, plan.resident_units)).difference(plan.far_units)):
        into, stored = buffers.residents[unit], buffers.staged(unit)
        source.read(unit, stored)
        complete(unit, WEIGHTS, stored)
        coming = torch.from_numpy(stored)
        if plan.units[unit].is_made:
            made = torch.empty(into.numel(), dtype=into.dtype) if plan.separate_device else into
            source.make(unit, coming, _trained(stream, unit), made)
            coming = made
        if plan.separate_device:
            into.copy_(coming.view(into.dtype))


def visit(stream: Stream, unit: int) -> None:
    """Bring a head that compute has for the loss only, where compute reads it: its memory is taken now."""
    machine, buffers, num_bytes = stream.machine, stream.buffers, stream.plan.stored_bytes(unit)
    if buffers.head_on_host is None:
        memory = machine.host_buffer(round_up(num_bytes, PAGE_BYTES))[:num_bytes]
        stream.source.read(unit, memory)
        into = torch.from_numpy(memory)
    else:
        with machine.lane(Lane.COMPUTE):  # which gives the memory back
            into = torch.empty(num_bytes, dtype=torch.uint8, device=machine.device)
        machine.copy(into, torch.from_numpy(buffers.head_on_host))
    buffers.residents[unit] = into.view(buffers.dtype)


def fetch(stream: Stream, op: Op) -> None:
    """Bring a unit's newest weights into its host slot (of a resident unit: into the staging buffer)."""
    if op.unit == stream.buffers.visitor:
        visit(stream, op.unit)
        return
    stream.source.read(op.unit, stream.buffers.stored(op.unit, op))


def upload(stream: Stream, op: Op) -> None:
    """Copy a unit's weights, or a page of them, from the host to the device; if they are made there, copy their sources."""
    plan, buffers, unit, sent = stream.plan, stream.buffers, op.unit, op.slot(Pool.SOURCES)
    if unit == buffers.visitor:
        visit(stream, unit)
        return
    stored = buffers.stored(unit, op)
    parts: list[tuple[torch.Tensor, Bytes]] = []
    if sent < 0 or op.slot(Pool.DEVICE_WEIGHTS) >= 0:
        width, into, at = plan.planes.weight.bytes_per_element, buffers.computed(unit, op).view(torch.uint8), 0
        for start, stop in plan.slot_runs(unit):
            size = (stop - start) * width
            parts.append((into[at : at + size], stored[start * width :][:size]))
            at += size
    if sent >= 0:
        sources = [buffers.trained[unit]] if plan.units[unit].is_completed else []
        if plan.units[unit].stored_bytes is not None:
            sources.insert(0, stored)
        start = 0
        for each in sources:
            parts.append((buffers.sources[sent][start : start + each.size], each))
            start += each.size
    page = plan.page_bytes(unit) if op.chunk >= 0 else sum(source.size for _, source in parts)
    left, right = max(0, op.chunk) * page, (max(0, op.chunk) + 1) * page
    for into, source in parts:
        begin, end = max(0, left), min(source.size, right)
        if begin < end:
            stream.machine.copy(into[begin:end], torch.from_numpy(source[begin:end]))
        left, right = left - source.size, right - source.size


def make(stream: Stream, op: Op) -> None:
    """Make the weights that compute reads from what is in host memory or was sent to the device."""
    plan, buffers, unit, sent = stream.plan, stream.buffers, op.unit, op.slot(Pool.SOURCES)
    figures = plan.units[unit]
    stored: torch.Tensor | None
    if sent < 0:
        stored, trained = torch.from_numpy(buffers.stored(unit, op)), _trained(stream, unit)
    else:
        coded, whole = figures.stored_bytes or 0, buffers.sources[sent]
        stored = whole[:coded] if coded else None
        beside = whole[coded : coded + plan.completing_bytes(unit)]
        trained = beside.view(torch.float32) if figures.is_completed else None
    stream.source.make(unit, stored, trained, buffers.computed(unit, op))


def _trained(stream: Stream, unit: int) -> torch.Tensor | None:
    """Return what completes a unit's weights, in host memory; None where nothing does."""
    if not stream.plan.units[unit].is_completed:
        return None
    return torch.from_numpy(stream.buffers.trained[unit]).view(torch.float32)


WEIGHT_VERBS: Mapping[Verb, Callable[[Stream, Op], None]] = {
    Verb.FETCH: fetch,
    Verb.PULL: fetch,
    Verb.UPLOAD: upload,
    Verb.MAKE: make,
}
