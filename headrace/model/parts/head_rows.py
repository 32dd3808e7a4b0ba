"""The head by ranges of its rows: log-probabilities of labels, without logits of the whole vocabulary.

Forward takes an online log-sum-exp over the ranges. Backward takes the last range first, and hands over the gradient of its
rows before those of the next range are made. Logits of the last ranges are kept for it, in the compute dtype; those of others
are computed again, to the same bits. The model's own code runs, with the head replaced by some of its rows. Invariant: the rows
of a range follow from the model alone, never from a budget, because they decide how sums are taken.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headrace.model.blocks.binding import hand_over_rows, rows_there
from headrace.model.blocks.taps import Reached

# A range has at most so many elements: its gradient takes 16 MiB in bfloat16, and 32 in float32.
_RANGE_ELEMENTS = 8 << 20
# Logits of so many bytes are kept for backward.
_KEPT_BYTES = 48 << 20
# Rows of a range are a multiple of this, which suits products of matrices.
_ROW_ALIGNMENT = 64

RunHead = Callable[[Tensor], Tensor | None]
"""Runs what follows the blocks on final hidden states, (b, C, hidden) -> (b, C, vocabulary); None if a tap was reached."""


def rows_of_range(vocabulary: int, hidden_size: int) -> int:
    """Return how many rows of a head of this size are taken at a time, 0 where all of them are one range."""
    ranges = -(-vocabulary * hidden_size // _RANGE_ELEMENTS)
    rows = -(-vocabulary // ranges)
    return -(-rows // _ROW_ALIGNMENT) * _ROW_ALIGNMENT if ranges > 1 else 0


def kept_tokens(vocabulary: int, logit_bytes: int) -> int:
    """Return for how many positions at a time all logits of `logit_bytes` each are kept, so that none is computed again."""
    return _KEPT_BYTES // (vocabulary * logit_bytes)


def label_log_probs(module: nn.Module, rows: int, run: RunHead, hidden: Tensor, targets: Tensor) -> Tensor:
    """Return the log-probability (b, C) of each target, float32; that of a target below 0 means nothing.

    `module` is the head, taken `rows` rows at a time; `hidden` (b, C, hidden) are final hidden states. Backward takes any
    gradient. It hands over that of the head range by range, the last range first.
    """
    head = _Head(module, rows, run, hidden.detach())
    inputs = head.inputs(hidden)
    if head.learns and torch.is_grad_enabled() and not inputs.requires_grad:
        inputs = inputs.detach().requires_grad_()  # else autograd would not ask for the head's gradient
    head.keeps = torch.is_grad_enabled() and inputs.requires_grad
    found: Tensor = _LabelLogProbs.apply(inputs, targets, head)  # type: ignore[no-untyped-call]
    return found


class _Head:
    """A head `module` on a chunk of positions, `rows` rows at a time."""

    def __init__(self, module: nn.Module, rows: int, run: RunHead, hidden: Tensor) -> None:
        self._module, self._rows, self._run, self._hidden = module, rows, run, hidden
        self._own = {name: each for name, each in module._parameters.items() if each is not None}
        # Whether logits are what the head returns, so that nothing else need run; None: not known yet.
        self._is_last: bool | None = None
        self._kept: dict[int, _Range] = {}
        self.keeps = False  # whether there will be a backward

    @property
    def learns(self) -> bool:
        """Whether the head has gradients."""
        return any(each.requires_grad for each in self._own.values())

    @property
    def starts(self) -> range:
        """The first rows of the ranges."""
        return range(0, next(iter(self._own.values())).shape[0], self._rows)

    def inputs(self, hidden: Tensor) -> Tensor:
        """Return what the head is given, with a graph if gradients are enabled: mostly normed hidden states."""
        found: list[Tensor] = []

        def take(inputs: Tensor) -> Tensor:
            found.append(inputs)
            raise Reached

        with _forward_of(self._module, take):
            self._run(hidden)
        return found[0]

    def forward(self, inputs: Tensor, start: int) -> Tensor:
        """Return the logits (b, C, rows) of a range, without a graph; they are kept if there is room for all from here on."""
        remaining = len(range(start, self.starts.stop))
        if not self.keeps or inputs.shape[:-1].numel() * remaining * inputs.element_size() > _KEPT_BYTES:
            return self._logits(inputs, self._part(start, learns=False))
        self._kept[start] = found = self._with_graph(inputs, start)
        return found.logits.detach()

    def again(self, inputs: Tensor, start: int) -> "_Range":
        """Return a range with its graph: what was kept of it, or the same computed again."""
        return self._kept.pop(start, None) or self._with_graph(inputs, start)

    def _with_graph(self, inputs: Tensor, start: int) -> "_Range":
        leaf, part = inputs.detach().requires_grad_(), self._part(start, learns=True)
        with torch.enable_grad():
            return _Range(self._logits(leaf, part), leaf, {name: each for name, each in part.items() if each.requires_grad})

    def _part(self, start: int, *, learns: bool) -> dict[str, nn.Parameter]:
        """Return the parameters of a range as leaves of their own; if it `learns`, those with gradients require one."""
        stop = min(start + self._rows, self.starts.stop)
        return {
            name: nn.Parameter(rows_there(each, start, stop), requires_grad=learns and each.requires_grad)
            for name, each in self._own.items()
        }

    def _logits(self, inputs: Tensor, part: Mapping[str, nn.Parameter]) -> Tensor:
        module, own_forward, made = self._module, self._module.forward, list[Tensor]()

        def of_rows(_: Tensor) -> Tensor:
            made.append(own_forward(inputs))
            return made[0]

        module._parameters.update(part)
        try:
            if self._is_last:
                return of_rows(inputs)
            with _forward_of(module, of_rows):
                logits = self._run(self._hidden)
        finally:
            module._parameters.update(self._own)
        assert logits is not None, "no tap is reached"
        self._is_last = logits is made[0]
        return logits

    def hand_over(self, start: int, name: str, gradient: Tensor) -> None:
        """Give the gradient of a range of a parameter to whoever takes the parameter's."""
        hand_over_rows(self._own[name], start, gradient)


class _Range(NamedTuple):
    """Logits (b, C, rows) of a range with their graph, and its leaves: the inputs, and those parameters that learn."""

    logits: Tensor
    inputs: Tensor
    part: Mapping[str, nn.Parameter]


class _LabelLogProbs(torch.autograd.Function):
    """The log-probability of each target, float32, from the inputs of the head."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, targets: Tensor, head: _Head) -> Tensor:
        """Return log-probabilities like `targets`."""
        sums = _Sums(targets)
        for start in head.starts:
            sums.add(head.forward(inputs, start), start)
        found, total = sums.done()
        ctx.save_for_backward(inputs, targets, total)
        ctx.head = head
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of the inputs; those of the head have gone to whoever takes them."""
        (gradient,), (inputs, targets, total), head = gradients, ctx.saved_tensors, ctx.head
        summed: Tensor | None = None
        for start in reversed(head.starts):
            of_inputs = _backward(head, inputs, start, gradient, total, targets)
            summed = of_inputs.float() if summed is None else summed.add_(of_inputs)
        assert summed is not None, "a head has rows"
        return summed.to(inputs.dtype), None, None


class _Sums:
    """What the ranges of a head give of a chunk's `targets`, one range after the other, from the first on."""

    def __init__(self, targets: Tensor) -> None:
        self._targets = targets
        self._total: Tensor | None = None
        self._chosen: Tensor | None = None

    def add(self, logits: Tensor, start: int) -> None:
        """Take the logits (b, C, rows) of the range from row `start` on."""
        logits = logits.float()
        # Sums of a range are float32, those over ranges float64: merging them adds no error that counts.
        part = torch.logsumexp(logits, dim=-1).double()
        self._total = part if self._total is None else torch.logaddexp(self._total, part)
        inside, places = _places(self._targets, start, logits)
        found = logits.gather(-1, places).squeeze(-1)
        self._chosen = found if self._chosen is None else torch.where(inside, found, self._chosen)

    def done(self) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities, float32, and the logarithms of all sums, float64."""
        assert self._total is not None, "a head has rows"
        assert self._chosen is not None, "a head has rows"
        return (self._chosen.double() - self._total).float(), self._total


def _backward(head: _Head, inputs: Tensor, start: int, gradient: Tensor, total: Tensor, targets: Tensor) -> Tensor:
    """Return what a range gives of the gradient of the inputs; hand over that of its rows."""
    logits, leaf, part = head.again(inputs, start)
    back = _logit_gradient(logits.detach(), gradient, total, _places(targets, start, logits)).to(logits.dtype)
    of_inputs, *of_part = torch.autograd.grad(logits, (leaf, *part.values()), back)
    del logits, leaf, back
    for name, found in zip(part, of_part, strict=True):
        head.hand_over(start, name, found)
    return of_inputs


class ChunkOfHead(NamedTuple):
    """A chunk of positions: what runs the head on it, its final hidden states (b, C, hidden), its targets (b, C)."""

    run: RunHead
    hidden: Tensor
    targets: Tensor


def gradients_by_ranges(
    module: nn.Module, rows: int, chunks: Sequence[ChunkOfHead], gradient_of: Callable[[int, Tensor], Tensor]
) -> list[Tensor]:
    """Return the gradients of the hidden states of `chunks`: as `label_log_probs` gives them, chunk by chunk, bit for bit.

    All chunks pass a range before the next, so that ranges may come one after the other. Each comes twice, but for the last.
    `gradient_of` makes the gradient of a chunk's log-probabilities from these. Nothing of the ranges is kept in between.
    """
    heads = [_Head(module, rows, chunk.run, chunk.hidden.detach()) for chunk in chunks]
    with torch.no_grad():
        inputs = [head.inputs(chunk.hidden) for head, chunk in zip(heads, chunks, strict=True)]
        sums = [_Sums(chunk.targets) for chunk in chunks]
        for start in heads[0].starts if heads else ():
            for head, each, taken in zip(heads, inputs, sums, strict=True):
                taken.add(head.forward(each, start), start)
    found = [each.done() for each in sums]
    gradients = [gradient_of(number, log_probs) for number, (log_probs, _) in enumerate(found)]
    summed: list[Tensor | None] = [None] * len(chunks)
    for start in reversed(heads[0].starts) if heads else ():
        for number, head in enumerate(heads):
            of = _backward(head, inputs[number], start, gradients[number], found[number][1], chunks[number].targets)
            before = summed[number]
            summed[number] = of.float() if before is None else before.add_(of)
    return [_through_norm(*each) for each in zip(heads, chunks, summed, strict=True)]


def _through_norm(head: _Head, chunk: ChunkOfHead, summed: Tensor | None) -> Tensor:
    """Return the gradient of hidden states from that of the head's inputs, `summed` over ranges."""
    assert summed is not None, "a head has rows"
    hidden = chunk.hidden.detach().requires_grad_()
    with torch.enable_grad():
        inputs = head.inputs(hidden)
        inputs.backward(summed.to(inputs.dtype))  # type: ignore[no-untyped-call]
    assert hidden.grad is not None, "its inputs follow from hidden states"
    return hidden.grad


def logits_by_ranges(module: nn.Module, rows: int, run: RunHead, hidden: Tensor) -> Tensor:
    """Return the logits (b, C, vocabulary), float32, without gradients; ranges come one after the other."""
    head = _Head(module, rows, run, hidden.detach())
    with torch.no_grad():
        inputs = head.inputs(hidden)
        return torch.cat([head.forward(inputs, start).float() for start in head.starts], dim=-1)


def _places(targets: Tensor, start: int, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return which targets are in the range from row `start` on, and where (b, C, 1); the others have some place there."""
    places, rows = targets - start, logits.shape[-1]
    return (places >= 0) & (places < rows), places.clamp(0, rows - 1).unsqueeze(-1)


def _logit_gradient(logits: Tensor, gradient: Tensor, total: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
    """Return the gradient of a range's logits, float32: that of its labels' log-probabilities, `total` the log of all sums."""
    inside, places = labels
    softmax = torch.sub(logits, total.float().unsqueeze(-1)).exp_()
    back = softmax.mul_(-gradient.unsqueeze(-1))
    return back.scatter_add_(-1, places, torch.where(inside, gradient, 0.0).unsqueeze(-1))


@contextmanager
def _forward_of(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Have `module` run `forward` in this context. Hooks, which would see some rows only, do not run."""
    module.forward = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]
