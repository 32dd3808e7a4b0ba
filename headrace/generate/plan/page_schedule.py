"""Weights in a pass of a generation: in pages (`plan/schedules/pages.py`).

Blocks that stay in memory from pass to pass are spread evenly among the others. So links and drives always have work: while
such a block is computed, the next of the others is brought.
"""

from headrace.generate.plan.plan import GenerationPlan
from headrace.plan.schedules.ledger import Snapshot
from headrace.plan.schedules.pages import WeightPages


class PagedWeights(WeightPages):
    """Emits what brings weights, and chooses which blocks stay."""

    def __init__(self, plan: GenerationPlan, before: Snapshot) -> None:
        super().__init__(plan, before)
        self._is_first = not before.known

    def victim(self, slots: range) -> int:
        """See `Weights.victim`. The first pass decides which blocks stay: it lets go of evenly spread ones."""
        found = super().victim(slots)
        if not self._is_first or found not in self.contents:
            return found
        going = [
            slot for slot in slots if self.contents[slot] not in self.acquired and self._goes(self.contents[slot], len(slots))
        ]
        return max(going, key=lambda slot: (self.uses_until(self.contents[slot]), -slot), default=found)

    def _goes(self, block: int, slots: int) -> bool:
        """Return whether a block is one of those, as many as so many slots do not hold, that are spread evenly."""
        going = self.blocks - slots + 1
        return block * going // self.blocks > (block - 1) * going // self.blocks
