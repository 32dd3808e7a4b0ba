"""Slots where compute finds the weights of a block that comes in parts: those of a module are there while it computes.

What autograd saves of a part is packed as a place in it, and looked up again in backward. Then the part comes again, if another
one has its slot. So slots may be refilled while the block's graph lives. Hooks see weights alone (decision 0005): anything else
that is saved stays as it is. While a part computes, the one that followed it last time comes into the other slot.

Invariant: an operator reads the same numbers as with whole blocks, so the bits are the same.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headrace.machine.protocol import Machine
from headrace.model.blocks.binding import GradientSink, hand_over
from headrace.terms.errors import StepFailed
from headrace.terms.lanes import Lane
from headrace.terms.layout import ParameterSpec
from headrace.terms.shelf import Part, Shelf
from headrace.terms.sizes import round_up

# Parameters begin at multiples of so many elements of a slot.
_ALIGNMENT = 64
# Says which gradients of a unit are wanted, and takes them; None: none are.
Catch = Callable[[ParameterSpec], GradientSink | None]


@dataclass(frozen=True, eq=False)
class Weight:
    """A parameter of a part: the attribute that has it, its place in its unit, and where it begins in a slot."""

    attribute: str
    spec: ParameterSpec
    in_slot: int


@dataclass(frozen=True, eq=False)
class ModulePart:
    """The weights of a module, which has no modules of its own: a `part` of its unit, which takes `elements` of a slot."""

    module: nn.Module
    part: Part
    weights: tuple[Weight, ...]

    @property
    def elements(self) -> int:
        """Elements of a slot."""
        return max(round_up(each.in_slot + each.spec.num_elements, _ALIGNMENT) for each in self.weights)

    @classmethod
    def of(cls, unit: int, module: nn.Module, specs: Mapping[str, ParameterSpec]) -> "ModulePart":
        """Return the part of a module whose parameters have these places in a unit."""
        weights, at = [], 0
        for attribute, _ in module.named_parameters(recurse=False):
            weights.append(Weight(attribute, specs[attribute], at))
            at += round_up(specs[attribute].num_elements, _ALIGNMENT)
        spans = tuple((each.spec.offset, each.spec.offset + each.spec.num_elements) for each in weights)
        return cls(module, Part(unit, spans), tuple(weights))


@dataclass(frozen=True)
class _Saved:
    """What autograd saved of a part, which comes from `flat`."""

    part: ModulePart
    flat: Tensor
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(eq=False)
class Slot:
    """A slot: the part that it has, and where that comes from; what waits for it, if compute has not done so."""

    memory: Tensor
    part: ModulePart | None = None
    flat: Tensor | None = None
    coming: Callable[[], None] | None = None


class PartSlots:
    """A shelf where compute reads parts, filled by a machine's copies. It belongs to one thread at a time.

    The part that was used last is held until the next one is. `num_copied` counts the elements that came.
    """

    def __init__(self, slots: Sequence[Tensor], machine: Machine) -> None:
        self._slots, self._shelf = [Slot(memory) for memory in slots], Shelf(len(slots), "last-used")
        self._machine = machine
        self._next: dict[tuple[str, ModulePart], ModulePart] = {}  # which part followed another, when it was in this phase
        self._latest: tuple[str, ModulePart, Tensor] | None = None
        self.num_copied = 0

    def bring(self, part: ModulePart, flat: Tensor, phase: str) -> Tensor:
        """Return the slot that has a part of a unit, whose weights in host memory are `flat`. Bring it, if none has it, and
        begin to bring the one that is expected after it in this `phase`.
        """
        before = self._latest
        if before is not None:
            self._shelf.release([before[1].part])
        slot, is_there = self._held(part)
        self._arrived(slot)  # what was expected in another part's slot comes no more
        if not is_there:
            self._copy(slot, part, flat)
        if before is not None and before[1] is not part and before[2] is flat:
            self._next[before[:2]] = part
        self._latest = phase, part, flat
        follows = self._next.get((phase, part))
        if follows is not None:
            ahead, is_there = self._held(follows)
            if not is_there:
                self._copy_ahead(ahead, follows, flat)
            self._shelf.release([follows.part])
        return slot.memory

    def _held(self, part: ModulePart) -> tuple[Slot, bool]:
        """Hold a part; return its slot, and whether it is there or on its way. Whoever calls copies it at once."""
        place = self._shelf.hold(part.part)
        assert place is not None, "one part is held, and there is a slot for another"
        self._shelf.arrived([part.part])
        return self._slots[place.slot], place.is_there

    def _copy(self, slot: Slot, part: ModulePart, flat: Tensor) -> None:
        slot.part, slot.flat = None, flat
        for each in part.weights:
            into = slot.memory[each.in_slot :][: each.spec.num_elements]
            self._machine.copy(into, flat[each.spec.offset :][: each.spec.num_elements])
            self.num_copied += each.spec.num_elements
        slot.part = part

    def _copy_ahead(self, slot: Slot, part: ModulePart, flat: Tensor) -> None:
        """Copy a part beside compute, as soon as that has done with what the slot had."""
        machine, lane = self._machine, Lane.HOST_TO_DEVICE
        if (used := machine.record(Lane.COMPUTE)) is not None:
            machine.wait(used, lane)
        with machine.lane(lane):
            self._copy(slot, part, flat)
            if (copied := machine.record(lane)) is not None:
                slot.coming = partial(machine.wait, copied, Lane.COMPUTE)

    def _empty(self) -> None:
        """Forget what the slots have: the weights may change before they are next used."""
        for slot in self._slots:
            self._arrived(slot)
            slot.part = slot.flat = None
        if self._latest is not None:
            self._shelf.release([self._latest[1].part])
        self._shelf.clear()
        self._latest = None

    def _arrived(self, slot: Slot) -> None:
        """Have compute wait for what is on its way into a slot."""
        if slot.coming is not None:
            slot.coming()
            slot.coming = None

    def place_of(self, tensor: Tensor) -> _Saved | None:
        """Return where a tensor lies in a part that is here; None where it lies elsewhere."""
        at = tensor.data_ptr()
        for slot in self._slots:
            memory = slot.memory
            offset, size = at - memory.data_ptr(), memory.numel() * memory.element_size()
            if 0 <= offset < size and tensor.device == memory.device:
                if slot.part is None or slot.flat is None or tensor.dtype != memory.dtype:
                    found = f"a weight of a part was saved as {tensor.dtype}, and is {memory.dtype}"
                    raise StepFailed(f"{found}: this block cannot come in parts")
                return _Saved(slot.part, slot.flat, offset // memory.element_size(), tuple(tensor.shape), tensor.stride())
        return None

    @contextmanager
    def coming(self, parts: Sequence[ModulePart], flat: Tensor, catch: Catch | None = None) -> Iterator[None]:
        """Have the modules of `parts` compute in this context with weights that come from `flat`, in host memory. Their
        gradients go where `catch` says.
        """

        def pack(tensor: Tensor) -> Tensor | _Saved:
            return self.place_of(tensor) or tensor

        def unpack(saved: Tensor | _Saved) -> Tensor:
            if isinstance(saved, Tensor):
                return saved
            memory = self.bring(saved.part, saved.flat, "backward")
            return memory.as_strided(saved.shape, saved.stride, memory.storage_offset() + saved.offset)

        with ExitStack() as stack:
            stack.callback(self._empty)
            for part in parts:
                self._attend(part, flat, catch, stack)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, unpack))
            yield

    def _attend(self, part: ModulePart, flat: Tensor, catch: Catch | None, stack: ExitStack) -> None:
        """Have a part there while its module runs, until `stack` is closed."""
        away = {each.attribute: part.module._parameters[each.attribute] for each in part.weights}
        sinks = {each.attribute: catch(each.spec) if catch else None for each in part.weights}

        def arrive(module: nn.Module, args: Any) -> None:
            memory = self.bring(part, flat, "recompute" if torch.is_grad_enabled() else "forward")
            for each in part.weights:
                view = memory.detach()[each.in_slot :][: each.spec.num_elements].view(each.spec.shape)
                sink = sinks[each.attribute]
                parameter = nn.Parameter(view, requires_grad=sink is not None)
                if sink is not None:
                    parameter.register_post_accumulate_grad_hook(hand_over(each.spec, sink))  # type: ignore[no-untyped-call]
                module._parameters[each.attribute] = parameter

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            module._parameters.update(away)

        # Hooks that read the weights, as adapters' do, were there before: they run between these.
        before = part.module.register_forward_pre_hook(arrive, prepend=True)
        after = part.module.register_forward_hook(leave, always_call=True)
        stack.callback(before.remove)
        stack.callback(after.remove)
        stack.callback(part.module._parameters.update, away)
