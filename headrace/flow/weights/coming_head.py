"""A frozen head of which compute has a range of rows at a time: they come from the drives or host memory, one after the other.

What else is in its unit, such as a norm, comes with the first loss and stays.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from headrace.flow.weights.buffers import Buffers
from headrace.flow.weights.weights import StoreSource
from headrace.machine.protocol import Machine
from headrace.model import Chain
from headrace.model.streams.stored_experts import without
from headrace.plan.value.plan import Plan
from headrace.terms.sizes import PAGE_BYTES, round_up


class ComingHead:
    """The head of `chain` under a plan with a slot for it."""

    def __init__(self, plan: Plan, chain: Chain, machine: Machine, buffers: Buffers, source: StoreSource) -> None:
        self._chain, self._machine, self._buffers, self._source = chain, machine, buffers, source
        self.unit, self._unit_bytes = plan.ends[-1], plan.stored_bytes(plan.ends[-1])
        weight, layout = chain.model.get_output_embeddings().weight, chain.layouts[self.unit]
        name = next(str(name) for name, each in chain.model.named_parameters() if each is weight)
        self._head = next(spec for spec in layout.parameters if spec.name == name)
        self._others = [spec for spec in layout.parameters if spec.name != name]
        self._rest = without(layout, frozenset({name}))
        self._flat: torch.Tensor | None = None
        self._there: tuple[int, torch.Tensor] | None = None  # the first row of the range in the slot, and the range

    @contextmanager
    def bound(self) -> Iterator[None]:
        """While entered, the unit is bound to all but the head, whose ranges come as they are asked for."""
        if self._flat is None:
            self._flat = self._read_others()
        chain = self._chain
        chain.bind(self.unit, self._flat, None, rest=self._rest)
        chain.bring_by_rows(self._head.name, self._bring)
        try:
            yield
        finally:
            chain.release(self.unit)

    def _bring(self, start: int, stop: int) -> torch.Tensor:
        if self._there is None or self._there[0] != start:
            slot = self._buffers.head_slot
            assert slot is not None, "the plan has a slot for it"
            width = self._head.num_elements // self._head.shape[0]
            found = self._read(self._head.offset + start * width, (stop - start) * width, slot)
            self._there = start, found.view(stop - start, width)
        return self._there[1]

    def _read_others(self) -> torch.Tensor:
        machine, dtype = self._machine, self._buffers.dtype
        flat = torch.zeros(self._rest.num_elements, dtype=dtype, device=machine.device)
        for own, spec in zip(self._rest.parameters, self._others, strict=True):
            room = round_up(spec.num_elements * dtype.itemsize, PAGE_BYTES) + 2 * PAGE_BYTES
            if self._buffers.head_on_host is None:
                slot = torch.from_numpy(machine.host_buffer(room))
            else:
                slot = torch.empty(room, dtype=torch.uint8, device=machine.device)
            flat[own.offset : own.offset + own.num_elements] = self._read(spec.offset, spec.num_elements, slot)
        return flat

    def _read(self, first: int, count: int, slot: torch.Tensor) -> torch.Tensor:
        """Return `count` elements of the unit from element `first` on, which come into `slot` (uint8)."""
        width = self._buffers.dtype.itemsize
        start, stop = first * width, (first + count) * width
        if (on_host := self._buffers.head_on_host) is not None:
            self._machine.copy(slot[: stop - start], torch.from_numpy(on_host[start:stop]))
            return slot[: stop - start].view(self._buffers.dtype)
        page = start // PAGE_BYTES * PAGE_BYTES
        end = min(round_up(stop, PAGE_BYTES), round_up(self._unit_bytes, PAGE_BYTES))
        self._source.read_span(self.unit, page, slot[: end - page].numpy())
        return slot[start - page : stop - page].view(self._buffers.dtype)
