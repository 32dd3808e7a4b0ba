"""Weights in a pass of a generation. On a separate device they come in pages, between the small copies of micro-batches.

The order is that of CGOPipe (MoE-Lightning, Cao et al. 2025, arXiv 2411.11217, section 4.1). A block's weights cross the link
in as many pages as there are micro-batches. One page crosses while each micro-batch is computed in an earlier block. What a
micro-batch waits for (its keys and values) takes its turn in between, behind one page at most. The queue is the program's, and
so the same each time.

Blocks that stay in memory from pass to pass are spread evenly among the others. So links and drives always have work: while
such a block is computed, the next of the others is brought.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from headrace.generate.plan import GenerationPlan
from headrace.plan.ledger import Snapshot
from headrace.plan.schedules.weights import NONE, Weights
from headrace.terms.lanes import Lane
from headrace.terms.program import PIECE_SHIFT, Verb


@dataclass(frozen=True, slots=True)
class _Page:
    """A page, or something else that takes one's turn: what emits it, and the block whose first use it must precede."""

    block: int
    emit: Callable[[], object]


class PagedWeights(Weights):
    """Emits what brings weights. A schedule says by `between` where pages may go, and what must have come by `settle`."""

    def __init__(self, plan: GenerationPlan, before: Snapshot) -> None:
        super().__init__(plan, before)
        self._page_bytes, self._is_first = plan.page_bytes, not before.known
        self._pages: deque[_Page] = deque()

    def upload(
        self, block: int, reads: Sequence[int], writes: Sequence[int], num_bytes: int, then: Callable[[], int] | None = None
    ) -> None:
        """See `Weights.upload`: pages wait for their turn."""
        page, op = self._page_bytes(block), self.ledger.op
        count = max(1, -(-num_bytes // page))

        def emit(number: int) -> None:
            size = min(page, num_bytes - number * page)
            pieces, chunk = writes, -1
            if count > 1:
                pieces, chunk = [each | number + 1 << PIECE_SHIFT for each in writes], number
            op(Verb.UPLOAD, Lane.HOST_TO_DEVICE, reads, pieces, unit=block, chunk=chunk, num_bytes=size)
            if then is not None and number == count - 1:
                then()

        self._pages += [_Page(block, partial(emit, number)) for number in range(count)]

    def first_of_all(self, block: int, emits: Sequence[Callable[[], object]]) -> None:
        """Let something else of `block` have the next turns."""
        self._pages.extendleft(_Page(block, emit) for emit in reversed(emits))

    def between(self) -> None:
        """Emit a page, if one waits."""
        if self._pages:
            self._pages.popleft().emit()

    def settle(self, block: int = NONE) -> None:
        """Emit all that comes before the first use of `block`, all that there is without one."""
        while self._pages and (block == NONE or any(page.block == block for page in self._pages)):
            self._pages.popleft().emit()

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
