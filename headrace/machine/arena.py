"""One arena per tier: a single mapping of exactly the planned size, cut into page-aligned buffers.

Invariant: what a tier's planned buffers take can never exceed the plan, because there is nowhere else to take from.
"""

from collections.abc import Callable

from headrace.machine.host_memory import Bytes
from headrace.terms.errors import PlanInfeasible
from headrace.terms.sizes import format_bytes, round_up

PAGE_BYTES = 4096


class Arena:
    """Hands out page-aligned parts of one buffer, in order; nothing is ever given back before the arena is dropped."""

    def __init__(self, tier: str, capacity_bytes: int, allocate: Callable[[int], Bytes]) -> None:
        self.tier = tier
        self.capacity_bytes = round_up(max(capacity_bytes, PAGE_BYTES), PAGE_BYTES)
        self.used_bytes = 0
        self._memory = allocate(self.capacity_bytes)

    def take(self, num_bytes: int, purpose: str) -> Bytes:
        """Return the next `num_bytes` (rounded up to a page) as a uint8 array of exactly `num_bytes`.

        Raises:
            PlanInfeasible: the arena is used up; the plan promised otherwise.
        """
        start, stop = self.used_bytes, self.used_bytes + round_up(num_bytes, PAGE_BYTES)
        if stop > self.capacity_bytes:
            raise PlanInfeasible(
                f"{self.tier} arena: asked {format_bytes(num_bytes)} for {purpose}, "
                f"but {format_bytes(self.used_bytes)} of the planned {format_bytes(self.capacity_bytes)} are taken",
                tier=self.tier,
                needed_bytes=stop,
                allowed_bytes=self.capacity_bytes,
            )
        self.used_bytes = stop
        return self._memory[start : start + num_bytes]
