"""Gradients of a block that comes in parts leave the device one by one, as backward makes them, and are summed in host memory.

Each is copied into one of a few slots there; it is added to its sum when its slot is wanted again, or the operation ends.
Invariant: a sum is of the same numbers in the same order as one on the device, and so has the same bits.
"""

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from headrace.machine.protocol import DeviceEvent, Machine
from headrace.terms.lanes import Lane
from headrace.terms.layout import UnitLayout
from headrace.update.wires.wire import UnitGradients


class LeavingGradients(UnitGradients):
    """As `UnitGradients`, of one operation; `flat` is in host memory, and so are the `slots`, in the dtype of gradients."""

    def __init__(
        self, trained: UnitLayout, flat: Tensor, delivered: set[str], slots: Sequence[Tensor], machine: Machine
    ) -> None:
        super().__init__(trained, flat, delivered)
        self._slots, self._machine = deque(slots), machine
        self._leaving: deque[tuple[str, Tensor, int, DeviceEvent | None]] = deque()

    def add(self, name: str, gradient: Tensor, start: int = 0) -> None:
        """Take a gradient, which may change once this lane goes on."""
        if len(self._leaving) == len(self._slots):
            self._add_first()
        slot = self._slots[0][: gradient.numel()]
        self._slots.rotate(-1)
        self._machine.copy(slot, gradient.reshape(-1))
        self._leaving.append((name, slot, start, self._machine.record(Lane.COMPUTE)))

    def _add_first(self) -> None:
        name, slot, start, left = self._leaving.popleft()
        if left is not None:
            left.synchronize()
        super().add(name, slot, start)

    def finish(self) -> None:
        """Add what is on its way."""
        while self._leaving:
            self._add_first()
