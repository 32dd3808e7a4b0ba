"""How a round of experts reaches compute, in any schedule: read, sent to the device, made there from what is coded.

Experts that are trained are read with their units.
"""

from collections.abc import Sequence
from typing import Any

from headrace.plan.schedules.ledger import Ledger
from headrace.plan.value.expert_plan import ROUNDS_IN_MEMORY, ExpertParts, ExpertPlan
from headrace.plan.value.slots import SOURCE_SLOTS
from headrace.terms.lanes import Lane
from headrace.terms.layout import Plane
from headrace.terms.program import Pool, Verb, buffer

ROUTED = buffer(Pool.ROUTED)
_EXPERTS, _COMPUTED, _SOURCES = buffer(Pool.EXPERTS), buffer(Pool.DEVICE_EXPERTS), buffer(Pool.EXPERT_SOURCES)


class BringExperts:
    """Emits the operations that bring rounds into `ledger`, each into the next slot."""

    def __init__(self, plan: ExpertPlan, ledger: Ledger, weight: Plane, *, separate: bool) -> None:
        self._plan, self._ledger, self._separate = plan, ledger, separate
        self._expert_bytes = weight.num_bytes(plan.figures.elements)
        self._turn, self._in_units = 0, isinstance(plan, ExpertParts) and plan.is_trained

    def bring(self, unit: int, number: int, experts: float, reads: Sequence[int], micro: int = -1) -> int:
        """Bring round `number` of a unit, of so many experts, to where compute reads them, after `reads`; return the buffer. In
        a step they are those for the group of micro-batches that begins with `micro`. Of trained ones the unit in host memory
        is the first that is read.
        """
        plan, op, made = self._plan, self._ledger.op, self._plan.figures.is_made
        slot, source = self._turn % ROUNDS_IN_MEMORY, reads[0] if self._in_units else -1
        stored = int(experts * plan.figures.stored_bytes)
        common: dict[str, Any] = {"unit": unit, "part": number, "micro": micro}
        missing, sent = int(stored * (1 - max(plan.cached_share, plan.device_share))), 1 - plan.device_share
        if not self._in_units:
            source = _EXPERTS + slot
            op(Verb.FETCH, Lane.SSD_READ, reads, (source,), num_bytes=missing, **common)
            reads = (source,)
        if self._separate:
            source = _SOURCES + self._turn % SOURCE_SLOTS if made else _COMPUTED + slot
            op(Verb.UPLOAD, Lane.HOST_TO_DEVICE, reads, (source,), num_bytes=int(stored * sent), **common)
        if made:
            num_bytes = int(experts * sent * plan.figures.moved_bytes(self._expert_bytes))
            op(Verb.MAKE, Lane.MAKE, (source,), (_COMPUTED + slot,), num_bytes=num_bytes, **common)
            source = _COMPUTED + slot
        self._turn += 1
        return source
