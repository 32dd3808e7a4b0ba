"""Rows through a block of a mixture whose experts come one at a time, in a pass without gradients: a few rows at once.

Of the block, what every token reads is bound, and one expert is in memory, whatever the number of experts. Each micro-batch
runs the block's own code in a thread, one thread at a time; all wait at their experts (`model/banks.py`), which come in
ascending order, each once for all. Invariant: each expert sees the micro-batches in their order, as if they ran one after the
other.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from headrace.model.banks import Banks, BlockExperts
from headrace.terms.errors import ModelError

# Micro-batches that wait within a block together: an expert comes once for so many.
_TOGETHER = 8


class _GivenUp(BaseException):
    """A signal, not an error: another micro-batch failed."""


class _Walk:
    """One micro-batch on its way through a block."""

    def __init__(
        self, banks: Banks, run: Callable[[], torch.Tensor], context: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self.out: torch.Tensor | None = None
        self.needs: tuple[int, ...] = ()
        self.wants, self.done = -1, False
        self._error: BaseException | None = None
        self._closed = False
        self._banks, self._run, self._context = banks, run, context
        self._go, self._parked = threading.Semaphore(0), threading.Semaphore(0)
        self._threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._serve, name="headrace rows", daemon=True)

    def go_on(self) -> None:
        """Let it run until it wants an expert, or is through. Raises whatever its code raises."""
        if self._thread.ident is None:
            self._thread.start()
        self._go.release()
        self._parked.acquire()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End it where it is."""
        self._closed = True
        if self._thread.ident is not None and not self.done:
            self._go.release()
            self._thread.join()

    def announce(self, experts: Mapping[int, int]) -> None:
        """See `Visitor`."""
        self.needs = tuple(experts)

    def wait_for(self, expert: int) -> None:
        """See `Visitor`."""
        self.wants = expert
        self._parked.release()
        self._go.acquire()
        if self._closed:
            raise _GivenUp

    def _serve(self) -> None:
        self._go.acquire()
        try:
            if not self._closed:
                torch.set_num_threads(self._threads)
                self._banks.visit(self)
                with torch.no_grad(), self._context():
                    self.out = self._run()
        except _GivenUp:
            pass
        except BaseException as error:
            self._error = error
        self.done = True
        self._parked.release()


def through_experts(
    banks: Banks,
    experts: BlockExperts,
    items: Sequence[Any],
    run: Callable[[Any], torch.Tensor],
    context: Callable[[Any], AbstractContextManager[Any]],
    load: Callable[[int], Mapping[str, torch.Tensor]],
    take: Callable[[Any, torch.Tensor], None],
) -> None:
    """Run a block on each of `items`, a few at once, and give `take` what comes of each, in order.

    `run` runs the block on an item, in the item's thread and within its `context`. `load` returns the weights of an expert by
    the attribute of its module; what it returned before is not looked at any more.

    Raises:
        ModelError: the block asks for an expert after a larger one.
        whatever `run` raises.
    """
    for start in range(0, len(items), _TOGETHER):
        some = items[start : start + _TOGETHER]
        with ExitStack() as closers:
            walks = [_Walk(banks, _bound(run, item), _bound(context, item)) for item in some]
            for walk in walks:
                closers.callback(walk.close)
            for walk in walks:
                walk.go_on()
            _bring(banks, experts, walks, load)
            for item, walk in zip(some, walks, strict=True):
                assert walk.out is not None, "it is through"
                take(item, walk.out)


def _bring(
    banks: Banks, experts: BlockExperts, walks: Sequence[_Walk], load: Callable[[int], Mapping[str, torch.Tensor]]
) -> None:
    for expert in sorted({expert for walk in walks for expert in walk.needs}):
        banks.present[expert] = load(expert)
        try:
            for walk in walks:
                if not walk.done and walk.wants == expert:
                    walk.go_on()
        finally:
            banks.present.clear()
    if late := sorted({walk.wants for walk in walks if not walk.done}):
        raise ModelError(f"{type(experts.module).__name__}: asks for experts {late[:4]} after larger ones")


def _bound(call: Callable[[Any], Any], item: Any) -> Callable[[], Any]:
    return lambda: call(item)
