"""The model's computation: prologue, blocks and epilogue forward, then backward. Each block is recomputed from its input.

All micro-batches pass through one block before the next (block-major; GreedySnake calls it vertical), so a block's weights are
bound once per pass. No autograd graph outlives an operation, so a slot may be refilled as soon as its operations are done.
"""

from contextlib import ExitStack, nullcontext
from typing import Any

import torch

from headrace.flow.step_state import Package, StepState
from headrace.model import BlockResult, Record, Replay, ReplayMismatch, block_seed
from headrace.terms.forms import Form
from headrace.terms.layout import ParameterSpec
from headrace.terms.program import Op, Pool
from headrace.terms.summing import SEQUENTIAL, branches_before, merges_after, place_of
from headrace.update.wire import BesideWire, Gradients, Moment, Proposal, Wire
from headrace.update.wires import DenseWire

# Units that are trained in place have gradients of their own elements, whatever the run's wire is.
_DENSE: Wire = DenseWire()


def prologue(state: StepState, op: Op) -> None:
    """Micro-batch -> input of the first block, and what else each block is called with."""
    _seed(state, 0, op.micro)
    with torch.no_grad(), _Bound(state, op, 0, gradients=False):
        result = state.parts.chain.prologue(state.batch.micro_batches[op.micro])
    state.calls[op.micro] = result.calls
    state.inputs[1, op.micro] = result.hidden


def forward(state: StepState, op: Op) -> None:
    """Block input -> block output, without a graph; the input and the chosen operator outputs are left for backward."""
    plan, block = state.plan, op.unit - 1
    hidden = state.inputs.pop((op.unit, op.micro))
    _seed(state, op.unit, op.micro)
    record = Record(frozenset(plan.kept[block])) if state.learns and (plan.kept[block] or plan.skipped[block]) else None
    with torch.no_grad(), _Bound(state, op, op.unit, gradients=False), record or nullcontext():
        result = state.parts.chain.block(block, hidden, state.calls[op.micro][block])
    state.inputs[op.unit + 1, op.micro] = result.hidden
    if not state.learns:
        return
    package = Package(hidden, {})
    # The ordinals were chosen for one sequence of operators; a device that runs another one gets a plain recompute.
    if record is not None and tuple(record.names) == plan.operators[block]:
        package = Package(hidden, record.kept, frozenset(plan.skipped[block]))
    elif record is not None:
        state.not_kept.add(op.unit)
    if result.asides:
        state.asides[op.unit, op.micro] = result.asides
    waiting = state.recalled if plan.stash_tiers[block] == "device" else state.packages
    waiting[op.unit, op.micro] = package


def epilogue(state: StepState, op: Op) -> None:
    """Final hidden states -> loss and its gradient, a chunk of positions at a time: the logits never exist whole."""
    parts, plan = state.parts, state.plan
    hidden = state.inputs.pop((plan.num_blocks + 1, op.micro))
    batch, targets = state.batch.micro_batches[op.micro], state.batch.targets[op.micro]
    gradient = torch.zeros_like(hidden)
    positions = max(1, plan.loss_chunk_tokens // hidden.shape[0])
    _seed(state, plan.num_blocks + 1, op.micro)  # a head's adapter may have dropout
    with torch.enable_grad(), _Bound(state, op, 0, gradients=plan.tied), _Bound(state, op, plan.num_blocks + 1, gradients=True):
        for start in range(0, hidden.shape[1], positions):
            span = slice(start, start + positions)
            if not any(state.batch.trained_columns[op.micro][span]):
                continue  # no loss and no gradient, because nothing is trained here
            part = hidden[:, span].detach().requires_grad_()
            loss = parts.chain.loss_sum(batch.input_ids[:, span], part, targets[:, span])
            (loss * state.loss_multiplier).backward()  # type: ignore[no-untyped-call]
            assert part.grad is not None
            gradient[:, span] = part.grad
            total = loss.detach().double()
            state.loss_sum = total if state.loss_sum is None else state.loss_sum + total
        if state.asides and op.micro == len(state.batch.micro_batches) - 1:
            _aside_gradients(state)
    state.hidden_gradients[op.micro] = gradient


def score(state: StepState, op: Op) -> None:
    """Final hidden states -> the loss of what has labels; without labels, the logits of each row's last position."""
    plan, chain = state.plan, state.parts.chain
    hidden, batch = state.inputs.pop((plan.num_blocks + 1, op.micro)), state.batch.micro_batches[op.micro]
    positions = max(1, plan.loss_chunk_tokens // hidden.shape[0])
    with torch.no_grad(), _Bound(state, op, 0, gradients=False), _Bound(state, op, plan.num_blocks + 1, gradients=False):
        if not state.batch.trained_tokens:
            state.logits[op.micro] = chain.last_logits(batch.input_ids[:, -1:], hidden[:, -1:])
        for start in range(0, hidden.shape[1] if state.batch.trained_tokens else 0, positions):
            span = slice(start, start + positions)
            if any(state.batch.trained_columns[op.micro][span]):
                loss = chain.loss_sum(batch.input_ids[:, span], hidden[:, span], state.batch.targets[op.micro][:, span])
                state.loss_sum = loss.double() if state.loss_sum is None else state.loss_sum + loss.double()
    del state.calls[op.micro]


def backward(state: StepState, op: Op) -> None:
    """Recompute a block from its input, then make gradients: of the input for the block before, of the weights for the sink.

    Kept outputs are handed back instead of computed; outputs that no gradient depends on are not computed at all. For rows
    whose samples are run by themselves, gradients are made sample by sample, too, and nothing is kept.
    """
    package = state.recalled.pop((op.unit, op.micro))
    gradients = [state.hidden_gradients.pop(op.micro), *state.aside_gradients.pop((op.unit, op.micro), ())]
    with torch.enable_grad(), _Bound(state, op, op.unit, gradients=True):
        if (call := state.calls[op.micro][op.unit - 1]).samples:
            _seed(state, op.unit, op.micro)
            found = state.parts.chain.block_gradient(op.unit - 1, package.hidden, call, gradients)
            state.hidden_gradients[op.micro] = found
            return
        hidden, result = _recomputed(state, op, package)
        del package
        outputs = [result.hidden, *result.asides]
        del result
        torch.autograd.backward(outputs[: len(gradients)], gradients)
    assert hidden.grad is not None
    state.hidden_gradients[op.micro] = hidden.grad


def _recomputed(state: StepState, op: Op, package: Package) -> tuple[torch.Tensor, BlockResult]:
    """Return a block's input, as a leaf, and its results with a graph."""

    def run() -> tuple[torch.Tensor, BlockResult]:
        hidden = package.hidden.detach().requires_grad_()
        _seed(state, op.unit, op.micro)
        return hidden, state.parts.chain.block(op.unit - 1, hidden, state.calls[op.micro][op.unit - 1])

    if package.kept or package.skipped:
        try:
            with Replay(package.kept, package.skipped, names=state.plan.operators[op.unit - 1]):
                return run()
        except ReplayMismatch:  # the plan expected other operators than this device runs: proceed as if nothing had been kept
            state.not_kept.add(op.unit)
    return run()


def prologue_backward(state: StepState, op: Op) -> None:
    """Gradient of the first block's input -> gradients of the embedding."""
    _seed(state, 0, op.micro)
    with torch.enable_grad(), _Bound(state, op, 0, gradients=True):
        result = state.parts.chain.prologue(state.batch.micro_batches[op.micro])
        gradient = state.hidden_gradients.pop(op.micro)
        if result.hidden.requires_grad:
            result.hidden.backward(gradient)  # type: ignore[no-untyped-call]
    del state.calls[op.micro]


class _Bound:
    """While in the context, a unit's parameters are views of the slot that compute reads. With `gradients`, the wire adds their
    gradients to the accumulator, if anything of the unit is trained.

    Where gradients are made in place, the accumulator is the drained gradient's own buffer.
    """

    def __init__(self, state: StepState, op: Op, unit: int, *, gradients: bool) -> None:
        self._state, self._op, self._unit = state, op, unit
        self._exists = unit < len(state.plan.units)
        self._gradients = gradients and self._exists and state.plan.units[unit].is_trained
        self._catching = ExitStack()
        self._leaf: set[str] | None = None  # for a tree's sum: the parameters that have a gradient in this leaf

    def __enter__(self) -> None:
        parts, unit = self._state.parts, self._unit
        if not self._exists:
            return
        flat, form = self._weights(), parts.forms[unit]
        if form.is_beside:
            parts.chain.bind(unit, flat, None)
            self._bind_beside(form, flat.device)
            return
        if not self._gradients or form.trained is None:
            parts.chain.bind(unit, flat, None)
            return
        basis, moment = self._basis(flat.device), self._moment()
        delivered = self._delivered()
        gradients = Gradients(form.trained, self._accumulator(), delivered, basis, moment)
        wire = parts.wire if form.has_own_family else _DENSE
        caught = self._catching.enter_context(wire.catch(unit, form.layout, flat, gradients))
        parts.chain.bind(unit, flat, caught.sink, lambda spec: spec.name not in form.left and caught.wanted(spec))

    def __exit__(self, *failure: Any) -> None:
        if self._exists:
            self._state.parts.chain.release(self._unit)
            self._catching.__exit__(*failure)
            if self._leaf is not None and not any(failure):
                self._add_leaf(self._leaf)

    def _bind_beside(self, form: Form, device: torch.device) -> None:
        """Let the unit compute with what is trained beside its weights; the weights themselves have no gradient."""
        wire, unit = self._state.parts.wire, self._unit
        assert isinstance(wire, BesideWire), "what is trained beside weights has a wire for it"
        assert form.trained is not None, "and a layout"
        sink = None
        if self._gradients:
            delivered = self._delivered()
            gradients = Gradients(form.trained, self._accumulator(), delivered)

            def sink(spec: ParameterSpec, gradient: torch.Tensor) -> None:
                gradients.add(spec.name, gradient)

        trained = torch.from_numpy(self._state.parts.buffers.trained[unit]).view(torch.float32)
        wire.bind(unit, form.trained, trained.to(device), sink)
        self._catching.callback(wire.release, unit)

    def _weights(self) -> torch.Tensor:
        buffers, plan = self._state.parts.buffers, self._state.plan
        if self._unit in plan.resident_units:
            return buffers.resident_weights[self._unit]
        return buffers.computed(self._unit, self._op.slot(Pool.HOST_WEIGHTS), self._op.slot(Pool.DEVICE_WEIGHTS))

    def _basis(self, device: torch.device) -> torch.Tensor | None:
        """Return the basis of the unit's trained family, on the device that computes."""
        state, unit = self._state, self._unit
        if not state.plan.basis_bytes(unit):
            return None
        whole = torch.from_numpy(state.parts.buffers.trained[unit][state.plan.trained_bytes(unit) :])
        return whole.view(torch.float32).to(device)

    def _moment(self) -> Moment | None:
        state, unit = self._state, self._unit
        if not state.plan.basis_bytes(unit):
            return None

        def propose(proposal: Proposal) -> None:
            state.verdict.proposals[unit] = proposal

        return Moment(
            step=state.verdict.step,
            unit=unit,
            micro=self._op.micro,
            num_micro=len(state.batch.micro_batches),
            seed=state.parts.seed,
            kept=state.caught[unit],
            propose=propose,
        )

    def _delivered(self) -> set[str]:
        """Return the set that notes which gradients exist. A leaf of a tree begins with none, or with those of the other use of
        a tied matrix.
        """
        state = self._state
        if state.plan.gradient_sum == SEQUENTIAL or not state.plan.accumulate:
            return state.delivered[self._unit]
        self._leaf = state.waiting_leaves.pop(self._op.micro, set()) if self._waits else set()
        return self._leaf

    @property
    def _waits(self) -> bool:
        """Whether the leaves of the unit wait for the second use of a tied matrix, each in a place of its own."""
        return self._state.plan.tied and self._unit == 0

    def _add_leaf(self, leaf: set[str]) -> None:
        """Add a micro-batch's gradient to those of its branch of the tree, once the branch is whole."""
        state, unit, micro = self._state, self._unit, self._op.micro
        if unit != self._op.unit:
            state.waiting_leaves[micro] = leaf
            return
        state.delivered[unit] |= leaf
        top = place_of(micro)
        places = (*branches_before(micro), micro) if self._waits else range(top + 1)
        sums = [self._partial(place) for place in places]
        for spec in state.trained_layout(unit).parameters:
            if spec.name not in leaf:
                sums[top][spec.offset : spec.offset + spec.num_elements] = 0
        for _ in range(merges_after(micro, len(state.batch.micro_batches))):
            sums[top - 1] += sums[top]
            top -= 1

    def _partial(self, partial: int) -> torch.Tensor:
        found = self._state.parts.buffers.accumulator(self._unit, self._op.slot(Pool.ACCUMULATOR), partial)
        assert found is not None, "what has several micro-batches has accumulators"
        return found

    def _accumulator(self) -> torch.Tensor:
        buffers = self._state.parts.buffers
        if self._leaf is None:
            partial = 0
        else:
            partial = self._op.micro if self._waits else place_of(self._op.micro)
        accumulator = buffers.accumulator(self._unit, self._op.slot(Pool.ACCUMULATOR), partial)
        return buffers.gradient_tensor(self._unit, self._op.slot(Pool.GRADIENT)) if accumulator is None else accumulator


def _aside_gradients(state: StepState) -> None:
    """Compute the auxiliary loss over the whole step, so that any split into micro-batches gives the same loss."""
    micros = range(len(state.batch.micro_batches))
    blocks = sorted({block for block, _ in state.asides})
    leaves = {key: tuple(aside.detach().requires_grad_() for aside in asides) for key, asides in state.asides.items()}
    masks = [mask.flatten() for batch in state.batch.micro_batches if (mask := batch.counted) is not None]
    mask = torch.cat(masks) if masks else None
    with torch.enable_grad():
        joined = [
            torch.cat(routers) for block in blocks for routers in zip(*(leaves[block, micro] for micro in micros), strict=True)
        ]
        loss = state.parts.chain.aside_loss(joined, mask)
        scale = state.verdict.loss_scale.scale if state.verdict.loss_scale else 1.0
        (loss * scale).backward()  # type: ignore[no-untyped-call]
    state.aside_loss = loss.detach()
    for key, tensors in leaves.items():
        state.aside_gradients[key] = tuple(
            torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in tensors
        )
    state.asides.clear()


def _seed(state: StepState, unit: int, micro: int) -> None:
    """Seed by the place, so that dropout draws the same numbers in forward and recompute, whatever ran in between."""
    if state.parts.chain.has_dropout:
        torch.manual_seed(block_seed(state.parts.seed, state.verdict.step, unit, state.first_micro + micro))
