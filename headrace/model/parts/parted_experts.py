"""Experts of a block as parts in training: each comes once for some micro-batches, forward and backward.

A block runs by its own code up to its module of experts, and stops there. The module's own code then runs with a stack of one
expert on that expert's tokens, one expert after another, one call for each micro-batch. In backward the module is cut out of
the graph. Recompute gets what forward made of it. The gradients of what it was called with are made expert by expert.

Invariant: an expert multiplies the rows that it multiplies without parts, in their order. What is summed over experts is summed
by the operators that sum it there. So the bits are those of the whole module, in whatever order experts come. `parting_check`
tries that for an architecture.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from headrace.model.blocks.parking import ParkedThread
from headrace.model.parts.banks import BlockExperts, Weights
from headrace.terms.errors import ModelError

# The way of multiplying whose sums are known: rows sorted by expert, and a sum over the choices of each token.
GROUPED = "grouped_mm"


class BesideThem(Protocol):
    """What is trained beside a block's experts."""

    @property
    def tensors(self) -> Sequence[Tensor]:
        """What has gradients, whole."""

    def of_expert(self, expert: int, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return an expert's part of each of `tensors`, which have the shapes of its own, as a view."""

    def joined(self, weights: Weights, parts: Sequence[Tensor]) -> Weights:
        """Return the weights (1, ...) with which an expert computes: its own, and the `parts` of what is trained beside."""


class Visit:
    """One micro-batch at a block's experts: what their module was called with, and what comes of it expert by expert.

    `beside` is what is trained beside the experts, None where nothing is. `trained`: their own weights are.
    """

    def __init__(
        self,
        experts: BlockExperts,
        hidden: Tensor,
        chosen: Tensor,
        weights: Tensor,
        beside: BesideThem | None,
        *,
        trained: bool = False,
    ) -> None:
        self.experts, self.hidden, self.weights, self.beside = experts, hidden, weights, beside
        self.trained = trained
        self.choices = chosen.shape[-1]
        ids, self._order = torch.sort(chosen.reshape(-1))  # as transformers sorts: equal numbers come in its order
        counts = torch.zeros(experts.num_experts, dtype=torch.int64, device=ids.device)
        self._counts = counts.scatter_add_(0, ids, torch.ones_like(ids))
        self._places: dict[int, slice] = {}
        self._rows: Tensor | None = None  # of all choices: results in their order; in backward gradients, sorted by expert
        self._gradient: Tensor | None = None
        self._of_weights: Tensor | None = None
        self._of_beside: list[Tensor] = []

    def route(self) -> dict[int, int]:
        """Return the experts that are wanted, ascending, and how often each. It waits for the router."""
        counts, start = self._counts.tolist(), 0
        for expert, count in enumerate(counts):
            if count:
                self._places[expert] = slice(start, start + count)
            start += count
        return {expert: counts[expert] for expert in self._places}

    def route_all(self) -> None:
        """Act as if each token chose the first expert: the most that one can get."""
        self._places = {0: slice(0, len(self.hidden))}

    @torch.no_grad()
    def forward(self, expert: int, weights: Weights) -> None:
        """Take the tokens of an expert through it, if it has any; its `weights` (1, ...) are given by attribute."""
        if (places := self._places.get(expert)) is None:
            return
        rows = self._order[self._as_fed(places)]
        if self.beside is not None:
            weights = self.beside.joined(weights, self.beside.of_expert(expert, self.beside.tensors))
        made = self._weighted(weights, self.hidden[rows // self.choices], self.weights.reshape(-1)[rows, None])
        if self._rows is None:
            self._rows = made.new_empty((self._order.numel(), made.shape[-1]))
        self._rows[rows] = made

    def output(self) -> Tensor:
        """Return what the module returns, once all experts were here."""
        assert self._rows is not None, "some expert has been here"
        out = self._rows.view(len(self.hidden), self.choices, -1).sum(dim=1)
        self._rows = None
        return out.to(self.hidden.dtype)

    def begin_backward(self, gradient: Tensor) -> None:
        """Take the gradient of what the module returned."""
        self._gradient = gradient
        self._rows = self.hidden.new_zeros((self._order.numel(), self.hidden.shape[-1]))
        self._of_weights = torch.zeros_like(self.weights)
        self._of_beside = [torch.zeros_like(each) for each in self.beside.tensors] if self.beside is not None else []

    def backward(self, expert: int, weights: Weights) -> Weights | None:
        """Make an expert's gradients, if it has tokens; return those of its weights (1, ...), None where it has no tokens."""
        if (places := self._places.get(expert)) is None:
            return None
        assert self._gradient is not None, "backward has begun"
        assert self._rows is not None
        assert self._of_weights is not None
        sorted_rows, beside = self._as_fed(places), self.beside
        rows = self._order[sorted_rows]
        tokens = rows // self.choices
        hidden = self.hidden[tokens].requires_grad_()
        scale = self.weights.reshape(-1)[rows, None].requires_grad_()
        own: list[Tensor] = []
        if self.trained:
            weights = {name: each.detach().requires_grad_() for name, each in weights.items()}
            own = list(weights.values())
        with torch.enable_grad():
            if beside is not None:
                own = [part.detach().requires_grad_() for part in beside.of_expert(expert, beside.tensors)]
                weights = beside.joined(weights, own)
            out = self._weighted(weights, hidden, scale)
        of_hidden, of_scale, *of_own = torch.autograd.grad(out, (hidden, scale, *own), self._gradient[tokens].to(out.dtype))
        self._rows[sorted_rows] = of_hidden
        self._of_weights.view(-1)[rows] = of_scale[:, 0]
        if beside is not None:
            for into, found in zip(beside.of_expert(expert, self._of_beside), of_own, strict=True):
                into.copy_(found)
        return dict(zip(weights, of_own, strict=True)) if self.trained else {}

    @property
    def held_bytes(self) -> int:
        """Bytes of what it holds while it waits in backward, without a graph."""
        held = (
            self.hidden,
            self.weights,
            self._order,
            self._counts,
            self._rows,
            self._gradient,
            self._of_weights,
            *self._of_beside,
        )
        storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in held if each is not None}
        return sum(storages.values())

    def gradients(self) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return the gradients of hidden states, of the router's weights, and of what is trained beside."""
        assert self._rows is not None, "backward has begun"
        assert self._of_weights is not None
        leaf = self.hidden.detach().requires_grad_()
        with torch.enable_grad():
            selected = leaf[self._order // self.choices]
        (of_hidden,) = torch.autograd.grad(selected, leaf, self._rows)
        found = of_hidden, self._of_weights, self._of_beside
        self._rows = self._gradient = self._of_weights = None
        self._of_beside = []
        return found

    def _as_fed(self, places: slice) -> Tensor:
        """Return where an expert's rows lie among all sorted ones, in an order in which its module sorts them to these places.

        Its sort need not keep equal numbers in their order, and sums over rows round by it.
        """
        count = places.stop - places.start
        order = torch.sort(torch.zeros(count, dtype=torch.int64, device=self._order.device)).indices
        fed = torch.empty_like(order)
        fed[order] = torch.arange(places.start, places.stop, device=order.device)
        return fed

    def _weighted(self, weights: Weights, hidden: Tensor, scale: Tensor) -> Tensor:
        """Run the module's own code as if it had this one expert, and weigh what it returns: there it is not rounded yet."""
        module: Any = self.experts.module
        own, count = {name: module._parameters[name] for name in weights}, module.num_experts
        chosen = torch.zeros(len(hidden), 1, dtype=torch.int64, device=hidden.device)
        module._parameters.update(weights)
        module.num_experts = 1
        try:
            made: Tensor = type(module).forward(module, hidden, chosen, hidden.new_ones(len(hidden), 1))
            return made * scale
        finally:
            module.num_experts = count
            module._parameters.update(own)


class PartedVisitor(Protocol):
    """What runs a block."""

    def at_experts(self, visit: Visit) -> Tensor:
        """Return what the module of experts returns."""


class _PartedThread(threading.local):
    visitor: PartedVisitor | None = None


class PartedExperts:
    """While installed, modules of experts ask who runs their block. `beside` gives what is trained beside a module; `trained`:
    experts are trained themselves.
    """

    def __init__(
        self,
        experts: Sequence[BlockExperts | None],
        beside: Callable[[nn.Module], BesideThem | None] = lambda module: None,
        *,
        trained: bool = False,
    ) -> None:
        self._experts, self._beside, self._trained = [each for each in experts if each is not None], beside, trained
        self._own = _PartedThread()

    def install(self) -> None:
        """Put doors where modules of experts stood."""
        for each in self._experts:
            vars(each.module)["forward"] = self._door(each)

    def remove(self) -> None:
        """Put everything back."""
        for each in self._experts:
            vars(each.module).pop("forward", None)

    def experts_of(self, block: nn.Module) -> BlockExperts | None:
        """Return the experts of a block; None where it has none that are parts."""
        modules = set(block.modules())
        return next((each for each in self._experts if each.module in modules), None)

    @contextmanager
    def visited_by(self, visitor: PartedVisitor) -> Iterator[None]:
        """Have `visitor` answer for modules that are called in this thread, in this context."""
        self._own.visitor = visitor
        try:
            yield
        finally:
            self._own.visitor = None

    def _door(self, experts: BlockExperts) -> Callable[..., Tensor]:
        def forward(hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            if self._own.visitor is None:
                raise ModelError(f"{type(experts.module).__name__} runs, and nothing is there to bring its experts")
            beside = self._beside(experts.module)
            return self._own.visitor.at_experts(Visit(experts, hidden, chosen, weights, beside, trained=self._trained))

        return forward


class Walk:
    """A micro-batch on its way forward through a block, in a thread that parks at the block's experts.

    `run` runs the block. `context` is made in that thread, for what belongs to a thread. `random`: blocks draw random numbers.
    """

    def __init__(
        self,
        parts: PartedExperts,
        run: Callable[[], Any],
        context: Callable[[], AbstractContextManager[object]],
        *,
        random: bool,
    ) -> None:
        self.output: Tensor | None = None
        self._visit: Visit | None = None
        self._parts, self._run, self._context, self._random = parts, run, context, random
        self._numbers: Tensor | None = None
        self._result: Any = None
        self._thread = ParkedThread(self._walk, "headrace block")

    @property
    def visit(self) -> Visit:
        """The micro-batch at the block's experts."""
        assert self._visit is not None, "the block has experts"
        return self._visit

    def enter(self) -> None:
        """Run up to the experts. Raises whatever the block's code raises."""
        self._thread.go_on()

    def leave(self) -> Any:
        """Run from the experts on, and return what `run` returns; `output` then is what the experts made."""
        self.output = self.visit.output()
        self._thread.go_on()
        return self._result

    def close(self) -> None:
        """End it where it is."""
        self._thread.close()

    def at_experts(self, visit: Visit) -> Tensor:
        """See `PartedVisitor`."""
        self._visit = visit
        numbers = _random_numbers(visit.hidden.device) if self._random else ()
        self._thread.park()
        if numbers:
            _draw_on(visit.hidden.device, numbers)
        assert self.output is not None, "all experts have been there"
        return self.output.clone()  # what comes after may write into it

    def _walk(self) -> None:
        with self._parts.visited_by(self), torch.no_grad(), self._context():
            self._result = self._run()


def _random_numbers(device: torch.device) -> tuple[Tensor, ...]:
    return (torch.get_rng_state(), *((torch.cuda.get_rng_state(device),) if device.type == "cuda" else ()))


def _draw_on(device: torch.device, numbers: Sequence[Tensor]) -> None:
    torch.set_rng_state(numbers[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(numbers[1], device)


class Recompute:
    """A visitor of recompute, with a graph: experts return what forward made, and their gradients come from a visit.

    Use: run the block; `begin_backward`; take the visit through its experts; then run backward as always. Where the graph
    did not stay, run the block by another one first, and let that `go_on` with the visit.
    """

    def __init__(self, output: Tensor) -> None:
        self._output: Tensor | None = output
        self._visit: Visit | None = None
        self._edge: Any = None

    @property
    def visit(self) -> Visit:
        """The micro-batch at the block's experts."""
        assert self._visit is not None, "the block has experts"
        return self._visit

    def at_experts(self, visit: Visit) -> Tensor:
        """See `PartedVisitor`."""
        beside = visit.beside.tensors if visit.beside is not None else ()
        made: Tensor = _Cut.apply(self, visit.hidden, visit.weights, *beside)  # type: ignore[no-untyped-call]
        self._edge = torch.autograd.graph.get_gradient_edge(made)
        visit.hidden, visit.weights = visit.hidden.detach(), visit.weights.detach()
        self._visit = visit
        return made

    def take(self) -> Tensor:
        """Return what forward made, once."""
        out, self._output = self._output, None
        assert out is not None, "a block has one module of experts"
        return out.clone()  # what comes after may write into it

    def begin_backward(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor], *, stays: bool = True) -> None:
        """Give the visit the gradient of what experts made. The graph of `outputs` `stays` for backward, or is done with."""
        (found,) = torch.autograd.grad(outputs, (self._edge,), gradients, retain_graph=stays)
        self.visit.begin_backward(found)

    def go_on(self, visit: Visit) -> None:
        """Have backward take what an earlier run of the same block made of its `visit`."""
        self._visit = visit


class _Cut(torch.autograd.Function):
    """What stands for the module of experts in the graph."""

    @staticmethod
    def forward(context: Any, recompute: Recompute, hidden: Tensor, weights: Tensor, *beside: Tensor) -> Tensor:
        context.recompute = recompute
        return recompute.take()

    @staticmethod
    def backward(context: Any, *given: Tensor) -> Any:
        of_hidden, of_weights, of_beside = context.recompute.visit.gradients()
        return None, of_hidden, of_weights, *of_beside


def stacked_alone(weights: Mapping[str, Tensor]) -> Weights:
    """Return an expert's weights as stacks of one."""
    return {name: each[None] for name, each in weights.items()}
