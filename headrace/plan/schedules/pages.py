"""Weights that come to a separate device in pages, between the small copies of micro-batches.

The order is that of CGOPipe (MoE-Lightning, Cao et al. 2025, arXiv 2411.11217, section 4.1). A block's weights cross the link
in as many pages as there are micro-batches. One page crosses while each micro-batch is computed in an earlier block. What a
micro-batch waits for takes its turn in between, behind one page at most. The queue is the program's, and so the same each time.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from headrace.plan.schedules.ledger import Snapshot
from headrace.plan.schedules.weights import NONE, Weights
from headrace.plan.value.placement import Placement
from headrace.terms.lanes import Lane
from headrace.terms.program import PIECE_SHIFT, Verb


@dataclass(frozen=True, slots=True)
class _Page:
    """A page, or something else that takes one's turn: what emits it, and the block whose first use it must precede."""

    block: int
    emit: Callable[[], object]


class WeightPages(Weights):
    """Emits what brings weights. A schedule says by `between` where pages may go, and what must have come by `have_come`."""

    def __init__(self, plan: Placement, before: Snapshot, *, shared: bool = False, paged: bool = True) -> None:
        super().__init__(plan, before, shared=shared)
        self.paged, self._page_bytes = paged, plan.page_bytes
        self._pages: deque[_Page] = deque()

    def upload(
        self, block: int, reads: Sequence[int], writes: Sequence[int], num_bytes: int, then: Callable[[], int] | None = None
    ) -> None:
        """See `Weights.upload`: pages wait for their turn."""
        if not self.paged:
            super().upload(block, reads, writes, num_bytes, then)
            return
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

    def have_come(self, block: int = NONE) -> None:
        """Emit all that comes before the first use of `block`, all that there is without one."""
        while self._pages and (block == NONE or any(page.block == block for page in self._pages)):
            self._pages.popleft().emit()
