"""A frozen head of which compute reads a range of rows at a time. Ranges are parts on a shelf: while compute reads one, the
next comes from host memory on its lane, or from the drives.

What else is in its unit, such as a norm, comes with the first loss and stays.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from headrace.files.block_file import Ticket
from headrace.flow.weights.buffers import Buffers
from headrace.flow.weights.weights import StoreSource
from headrace.machine.host_memory import Bytes
from headrace.machine.protocol import Machine
from headrace.model import Chain
from headrace.model.parts.part_slots import ModulePart, PartSlots, Slot, Weight
from headrace.model.streams.stored_experts import without
from headrace.plan.value.plan import Plan
from headrace.terms.layout import ParameterSpec
from headrace.terms.shelf import Part
from headrace.terms.sizes import PAGE_BYTES, round_up


class _ReadSlots(PartSlots):
    """Slots of parts that are read from the drives, by `read(first byte, into)`, in whole pages of `num_bytes`."""

    def __init__(self, slots: Sequence[Tensor], machine: Machine, read: Callable[[int, Bytes], Ticket], num_bytes: int) -> None:
        super().__init__(slots, machine)
        self._read, self._end = read, round_up(num_bytes, PAGE_BYTES)

    def _copy(self, slot: Slot, part: ModulePart, flat: Tensor) -> None:
        self._begin(slot, part, flat)
        self._arrived(slot)

    def _begin(self, slot: Slot, part: ModulePart, flat: Tensor) -> None:
        self._arrived(slot)  # what was expected there may still be on its way
        memory, (weight,) = slot.memory.view(torch.uint8).numpy(), part.weights
        width = slot.memory.element_size()
        first = (weight.spec.offset - weight.in_slot) * width
        stop = min(round_up((weight.spec.offset + weight.spec.num_elements) * width, PAGE_BYTES), self._end)
        slot.coming = self._read(first, memory[: stop - first]).wait
        self.num_copied += weight.spec.num_elements

    _copy_ahead = _begin


class RangedHead:
    """The head of `chain` under a plan with slots for its ranges."""

    def __init__(self, plan: Plan, chain: Chain, machine: Machine, buffers: Buffers, source: StoreSource) -> None:
        self._chain, self._device, self.unit = chain, machine.device, plan.ends[-1]
        self._module, layout = chain.model.get_output_embeddings(), chain.layouts[self.unit]
        name = next(str(name) for name, each in chain.model.named_parameters() if each is self._module.weight)
        self._head = next(spec for spec in layout.parameters if spec.name == name)
        self._others = [spec for spec in layout.parameters if spec.name != name]
        self._rest = without(layout, frozenset({name}))
        if buffers.head_on_host is None:
            self._page, self._from = PAGE_BYTES // buffers.dtype.itemsize, torch.empty(0, dtype=buffers.dtype)
            read = partial(source.read_span, self.unit)
            self.slots: PartSlots = _ReadSlots(buffers.head_slots, machine, read, plan.stored_bytes(self.unit))
        else:
            self._page, self._from = 1, torch.from_numpy(buffers.head_on_host).view(buffers.dtype)
            self.slots = PartSlots(buffers.head_slots, machine)
        self._flat: Tensor | None = None
        self._parts: dict[int, ModulePart] = {}  # by first element
        self._start, self._phase = -1, "forward"

    @contextmanager
    def bound(self) -> Iterator[None]:
        """While entered, the unit is bound to all but the head, whose ranges come as they are asked for."""
        chain = self._chain
        if self._flat is None:
            self._flat = torch.zeros(self._rest.num_elements, dtype=chain.dtype, device=self._device)
            for own, spec in zip(self._rest.parameters, self._others, strict=True):
                self._flat[own.offset : own.offset + own.num_elements] = self._bring(spec)
        chain.bind(self.unit, self._flat, None, rest=self._rest)
        chain.bring_by_rows(self._head.name, self._bring_rows)
        try:
            yield
        finally:
            chain.release(self.unit)

    def _bring_rows(self, start: int, stop: int) -> Tensor:
        if start != self._start:  # forward takes the first range first, backward the last
            self._start, self._phase = start, "forward" if start > self._start else "backward"
        width = self._head.num_elements // self._head.shape[0]
        size, first = (stop - start) * width, self._head.offset + start * width
        return self._bring(replace(self._head, shape=(stop - start, width), offset=first, num_elements=size)).view(-1, width)

    def _bring(self, spec: ParameterSpec) -> Tensor:
        first = spec.offset
        if (part := self._parts.get(first)) is None:
            weight = Weight("weight", spec, first % self._page)
            part = ModulePart(self._module, Part(self.unit, ((first, first + spec.num_elements),)), (weight,))
            self._parts[first] = part
        return self.slots.bring(part, self._from, self._phase)[part.weights[0].in_slot :][: spec.num_elements]
