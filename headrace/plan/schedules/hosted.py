"""Hidden states that wait in host memory between two blocks, and their gradients: to the device before use, away from it after.

A block's output is the next block's input, so one copy serves both that forward and its backward. It lies where this input
waits for backward; if that is on the drives, it passes through a buffer of its micro-batch. In backward gradients have these
buffers. Slots on the device bound what comes and what goes: compute waits where too much is under way.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

from headrace.plan.schedules.ledger import Ledger
from headrace.plan.value.plan import Plan
from headrace.terms.lanes import Lane
from headrace.terms.program import Pool, Verb, Waiting, buffer

_COMING, _GOING, _BETWEEN = buffer(Pool.COMING), buffer(Pool.GOING), buffer(Pool.BETWEEN)
_HOST_STASH, _SSD_STASH = buffer(Pool.HOST_STASH), buffer(Pool.SSD_STASH)


class HostedStates:
    """Emits these copies into `ledger`, for a pass of `num_micro` micro-batches; nothing where hidden states stay.

    Everything is used in the order in which it was made. `spills`: inputs that wait for backward on the drives go there.
    """

    def __init__(self, plan: Plan, ledger: Ledger, num_micro: int, *, spills: bool = True) -> None:
        self._plan, self._hosted, self._ledger, self._num_micro, self._spills = plan, plan.hosted, ledger, num_micro, spills
        self._away: deque[tuple[int, dict[str, Any]]] = deque()  # what was not brought back yet: where it is, and what it is
        self._used = self._brought = self._made = 0

    def arrive(self, group: range) -> dict[int, tuple[int, ...]]:
        """Bring what a group of micro-batches reads next, and what is read then, as far as there are slots beside the group.
        Return by micro-batch the slot that compute reads.
        """
        if self._hosted is None:
            return dict.fromkeys(group, ())
        slots, first = self._plan.coming_slots, self._used
        self._used += len(group)
        while self._away and self._brought < first + slots:
            place, what = self._away.popleft()
            self._ledger.op(Verb.IN, Lane.HOST_TO_DEVICE, (place,), (_COMING + self._brought % slots,), **what)
            self._brought += 1
        return {micro: (_COMING + use % slots,) for use, micro in enumerate(group, start=first)}

    def going(self) -> tuple[int, ...]:
        """Return the slot in which compute leaves what it makes next."""
        if self._hosted is None:
            return ()
        self._made += 1
        return (_GOING + self._made % self._hosted.going,)

    def leave(self, unit: int, micro: int, made: Sequence[int]) -> None:
        """Take the input of a unit, which compute `made`, to host memory; and on to the drives, where it waits there."""
        if self._hosted is None:
            return
        block = unit if unit <= self._plan.num_blocks else 0
        tier = self._plan.stash.tiers[block - 1] if block else ""
        waiting = unit * self._num_micro + micro
        place = _HOST_STASH + waiting if tier == "host" else _BETWEEN + micro
        what: dict[str, Any] = {"unit": unit, "micro": micro, "num_bytes": self._plan.hidden_bytes}
        self._ledger.op(Verb.OUT, Lane.DEVICE_TO_HOST, made, (place,), waiting=Waiting.HIDDEN, **what)
        if tier == "ssd" and self._spills:
            self._ledger.op(Verb.OUT, Lane.SSD_WRITE, (place,), (_SSD_STASH + waiting,), waiting=Waiting.INPUT, **what)
        self._away.append((place, what | {"num_bytes": self._moved_bytes, "waiting": Waiting.HIDDEN}))

    def keep(self, unit: int, micro: int) -> None:
        """Have the input of a unit, which was read, be read once more; it is still in the buffer of its micro-batch."""
        if self._hosted is not None:
            what = {"unit": unit, "micro": micro, "num_bytes": self._plan.hidden_bytes, "waiting": Waiting.HIDDEN}
            self._away.append((_BETWEEN + micro, what))

    def leave_gradient(self, unit: int, micro: int, made: Sequence[int]) -> None:
        """Take the gradient of a unit's output, which compute `made`, to host memory."""
        if self._hosted is not None:
            what: dict[str, Any] = {"unit": unit, "micro": micro, "num_bytes": self._moved_bytes}
            what["waiting"] = Waiting.HIDDEN_GRADIENT
            self._ledger.op(Verb.OUT, Lane.DEVICE_TO_HOST, made, (_BETWEEN + micro,), **what)
            self._away.append((_BETWEEN + micro, what))

    @property
    def _moved_bytes(self) -> int:
        """What stands for several blocks, in a coarse plan, moves what crosses between them, too."""
        assert self._hosted is not None, "hidden states wait on the host"
        return round(self._plan.hidden_bytes * self._hosted.blocks)
