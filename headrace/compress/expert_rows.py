"""Rows through a mixture's block, a few at a time, with experts loaded one at a time and without gradients.

What every token reads of the block is bound, and one expert is in memory, whatever the number of experts. Each micro-batch runs
the block's own code in a thread, one thread at a time. All wait at their experts (`model/parts/banks.py`), which come in
ascending order, each once for all. Invariant: each expert sees the micro-batches in their order, as if each ran alone.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from headrace.model.blocks.parking import ParkedThread
from headrace.model.parts.banks import Banks, BlockExperts, Walker, needed_by
from headrace.terms.errors import ModelError

# So many micro-batches wait within a block together, and an expert comes once for all of them.
TOGETHER = 8


class _Walk(Walker):
    """One micro-batch on its way through a block."""

    def __init__(
        self, banks: Banks, run: Callable[[], torch.Tensor], context: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self.out: torch.Tensor | None = None
        self.done = False
        self._banks, self._run, self._context = banks, run, context
        self._thread = ParkedThread(self._walk, "headrace rows")
        super().__init__(self._thread.park)

    def go_on(self) -> bool:
        """Let it run until it wants an expert or ends; return whether it ended. Raises whatever its code raises."""
        self._thread.go_on()
        return self.done

    def close(self) -> None:
        """End it where it is."""
        self._thread.close()

    def _walk(self) -> None:
        try:
            self._banks.visit(self)
            with torch.no_grad(), self._context():
                self.out = self._run()
        finally:
            self.done = True


def through_experts(
    banks: Banks,
    experts: BlockExperts,
    items: Sequence[Any],
    run: Callable[[Any], torch.Tensor],
    context: Callable[[Any], AbstractContextManager[Any]],
    load: Callable[[int], Mapping[str, torch.Tensor]],
    take: Callable[[Any, torch.Tensor], None],
) -> None:
    """Run a block on each of `items`, a few at once, and give `take` each item's result, in order.

    `run` runs the block on an item, in the item's thread and within its `context`. `load` returns the weights of an expert by
    the attribute of its module; weights that it returned before are no longer used.

    Raises:
        ModelError: the block asks for an expert after a larger one.
        Whatever `run` raises.
    """
    for start in range(0, len(items), TOGETHER):
        some = items[start : start + TOGETHER]
        with ExitStack() as closers:
            walks = [_Walk(banks, _bound(run, item), _bound(context, item)) for item in some]
            for walk in walks:
                closers.callback(walk.close)
            inside = [walk for walk in walks if not walk.go_on()]
            for expert in needed_by(walks):
                inside = banks.let_pass({expert: load(expert)}, inside, _Walk.go_on)
            if late := sorted({walk.wants for walk in inside}):
                raise ModelError(f"{type(experts.module).__name__}: asks for experts {late[:4]} after larger ones")
            for item, walk in zip(some, walks, strict=True):
                assert walk.out is not None, "it is through"
                take(item, walk.out)


def _bound(call: Callable[[Any], Any], item: Any) -> Callable[[], Any]:
    return lambda: call(item)
