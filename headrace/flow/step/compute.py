"""The model's computation: prologue, blocks and epilogue forward, then backward. Each block is recomputed from its input.

All micro-batches pass through one block before the next (block-major; GreedySnake calls it vertical), so a block's weights are
bound once per pass. No autograd graph outlives an operation, so a slot may be refilled as soon as its operations are done.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch

from headrace.flow.step.stash import leave_hosted
from headrace.flow.step.step_state import Package, StepState
from headrace.flow.step.whole_loss import read_log_probs, spans_of, take_loss
from headrace.flow.weights.leaving import LeavingGradients
from headrace.model import BlockResult, Record, Replay, ReplayMismatch, block_seed
from headrace.terms.forms import Form
from headrace.terms.layout import ParameterSpec
from headrace.terms.program import Op
from headrace.update.wires import DenseWire
from headrace.update.wires.wire import Catching, Moment, Proposal, Sink, UnitGradients, Wire

# The ordinal of what experts made, where they are parts: below those of operators.
OF_EXPERTS = -1
# Units that are trained in place have gradients of their own elements, whatever the run's wire is.
_DENSE: Wire = DenseWire()


def prologue(state: StepState, op: Op) -> None:
    """Micro-batch -> input of the first block, and what else each block is called with."""
    seed(state, 0, op.micro)
    with torch.no_grad(), bound(state, op, 0):
        result = state.parts.chain.prologue(state.batch.micro_batches[op.micro])
    state.calls[op.micro] = result.calls
    state.inputs[1, op.micro] = result.hidden


def forward(state: StepState, op: Op) -> None:
    """Block input -> block output, without a graph; the input and the chosen operator outputs are left for backward."""
    stash, block = state.plan.stash, op.unit - 1
    hidden = state.inputs.pop((op.unit, op.micro))
    if op.micro in state.at_experts.walks:
        _leave_experts(state, op, hidden)
        return
    seed(state, op.unit, op.micro)
    record = Record(frozenset(stash.kept[block])) if state.learns and (stash.kept[block] or stash.skipped[block]) else None
    with torch.no_grad(), bound(state, op, op.unit), record or nullcontext():
        result = state.parts.chain.block(block, hidden, state.calls[op.micro][block])
    state.inputs[op.unit + 1, op.micro] = result.hidden
    _catch_asides(state, op, result)
    if not state.learns:
        return
    package = Package(hidden, {})
    # The ordinals were chosen for one sequence of operators; a device that runs another one gets a plain recompute.
    if record is not None and tuple(record.names) == stash.operators[block]:
        package = Package(hidden, record.kept, frozenset(stash.skipped[block]))
    elif record is not None:
        state.left.not_kept.add(op.unit)
    _left_behind(state, op, package)


def _catch_asides(state: StepState, op: Op, result: BlockResult) -> None:
    """Note what a block hands aside for the router's loss, unless rows without labels are scored, which have none."""
    if result.asides and (state.learns or state.batch.trained_tokens):
        state.asides.outputs[op.unit, op.micro] = result.asides


def _left_behind(state: StepState, op: Op, package: Package) -> None:
    """Note what a block leaves for its backward."""
    if state.plan.hosted and not state.plan.stash.kept_bytes[op.unit - 1]:
        leave_hosted(state, op, package)
        return
    waiting = state.left.recalled if state.plan.stash.tiers[op.unit - 1] == "device" else state.left.packages
    waiting[op.unit, op.micro] = package


def _leave_experts(state: StepState, op: Op, hidden: torch.Tensor) -> None:
    """As `forward`, for a micro-batch that waits at the block's experts, which have all come; what they made is left, too."""
    walk = state.at_experts.walks.pop(op.micro)
    with bound(state, op, op.unit):
        result = walk.leave()
    state.inputs[op.unit + 1, op.micro] = result.hidden
    _catch_asides(state, op, result)
    if state.learns:
        assert walk.output is not None, "all experts were there"
        _left_behind(state, op, Package(hidden, {OF_EXPERTS: ("experts", walk.output)}))


def epilogue(state: StepState, op: Op) -> None:
    """Final hidden states -> loss and its gradient, a chunk of positions at a time: the logits never exist whole."""
    parts, plan = state.parts, state.plan
    hidden = state.inputs.pop((plan.num_blocks + 1, op.micro))
    batch, targets = state.batch.micro_batches[op.micro], state.batch.targets[op.micro]
    gradient = torch.zeros_like(hidden)
    whole = state.log_prob_gradients.pop(op.micro).to(hidden.device) if plan.batch.head_passes > 1 else None
    seed(state, plan.num_blocks + 1, op.micro)  # a head's adapter may have dropout
    of_embedding = (catching if plan.tied else bound)(state, op, 0)
    with torch.enable_grad(), of_embedding, catching(state, op, plan.num_blocks + 1):
        if parts.parted.head is not None:
            _losses_by_ranges(state, op.micro, hidden, gradient)
        # Elsewhere is no loss and no gradient, because nothing is trained.
        for span in spans_of(state, op.micro, hidden) if parts.parted.head is None else ():
            part = hidden[:, span].detach().requires_grad_()
            chunk = batch.input_ids[:, span], part, targets[:, span]
            if whole is not None:
                parts.chain.label_log_probs(*chunk).backward(whole[:, span])  # type: ignore[no-untyped-call]
            else:
                loss = parts.chain.loss_sum(*chunk)
                (loss * state.loss_multiplier).backward()  # type: ignore[no-untyped-call]
                total = loss.detach().double()
                state.loss_sum = total if state.loss_sum is None else state.loss_sum + total
            assert part.grad is not None
            gradient[:, span] = part.grad
        if state.asides.outputs and op.micro == len(state.batch.micro_batches) - 1:
            _aside_gradients(state)
    state.hidden_gradients[op.micro] = gradient
    _head_leaves(state, op)


def _losses_by_ranges(state: StepState, micro: int, hidden: torch.Tensor, gradient: torch.Tensor) -> None:
    """As `epilogue` does chunk by chunk; all chunks pass a range of the head before the next one comes."""
    batch, targets, spans = state.batch.micro_batches[micro], state.batch.targets[micro], list(spans_of(state, micro, hidden))
    chunks = [(batch.input_ids[:, span], hidden[:, span], targets[:, span]) for span in spans]
    for span, (loss, found) in zip(spans, state.parts.chain.losses_by_ranges(chunks, state.loss_multiplier), strict=True):
        gradient[:, span] = found
        total = loss.double()
        state.loss_sum = total if state.loss_sum is None else state.loss_sum + total


def log_probs(state: StepState, op: Op) -> None:
    """Final hidden states -> log-probabilities of labels; with the last micro-batch the loss of the whole step is called."""
    place = state.plan.num_blocks + 1, op.micro
    hidden = state.inputs.pop(place) if state.plan.hosted else state.inputs[place]
    seed(state, state.plan.num_blocks + 1, op.micro)
    with torch.no_grad(), bound(state, op, 0), bound(state, op, state.plan.num_blocks + 1):
        state.scored[op.micro] = read_log_probs(state, op.micro, hidden)
    if op.micro == len(state.batch.micro_batches) - 1:
        take_loss(state)


def score(state: StepState, op: Op) -> None:
    """Final hidden states -> the loss of what has labels; without labels, the logits of each row's last position."""
    plan, chain = state.plan, state.parts.chain
    hidden, batch = state.inputs.pop((plan.num_blocks + 1, op.micro)), state.batch.micro_batches[op.micro]
    with torch.no_grad(), bound(state, op, 0), bound(state, op, plan.num_blocks + 1):
        if not state.batch.trained_tokens:
            state.scored[op.micro] = chain.logits(batch.input_ids[:, -1:], hidden[:, -1:])[:, -1]
        elif state.batch.whole:
            state.scored[op.micro] = read_log_probs(state, op.micro, hidden)
        else:
            for span in spans_of(state, op.micro, hidden):
                loss = chain.loss_sum(batch.input_ids[:, span], hidden[:, span], state.batch.targets[op.micro][:, span])
                state.loss_sum = loss.double() if state.loss_sum is None else state.loss_sum + loss.double()
        if state.asides.outputs and op.micro == len(state.batch.micro_batches) - 1:
            state.asides.loss = _router_loss(state, state.asides.outputs)
            state.asides.outputs.clear()
    del state.calls[op.micro]
    _head_leaves(state, op)


def _head_leaves(state: StepState, op: Op) -> None:
    """Give back the memory of a head that was there for the loss, after the last micro-batch's."""
    buffers = state.parts.buffers
    if buffers.visitor is not None and op.micro == len(state.batch.micro_batches) - 1:
        buffers.residents[buffers.visitor] = torch.empty(0, dtype=buffers.dtype, device=state.parts.machine.device)


def backward(state: StepState, op: Op) -> None:
    """Recompute a block from its input, then make gradients: of the input for the block before, of the weights for the sink.

    Kept outputs are handed back instead of computed; outputs that no gradient depends on are not computed at all. For rows
    whose samples are run by themselves, gradients are made sample by sample, too, and nothing is kept.
    """
    if op.micro in state.at_experts.recomputed:
        _backward_around_experts(state, op)
        return
    package = state.left.recalled.pop((op.unit, op.micro))
    gradients = [state.hidden_gradients.pop(op.micro), *state.asides.gradients.pop((op.unit, op.micro), ())]
    with torch.enable_grad(), catching(state, op, op.unit):
        if (call := state.calls[op.micro][op.unit - 1]).samples:
            seed(state, op.unit, op.micro)
            _hand_back(state, op, state.parts.chain.block_gradient(op.unit - 1, package.hidden, call, gradients))
            return
        hidden, result = _recomputed(state, op, package)
        del package
        outputs = [result.hidden, *result.asides]
        del result
        torch.autograd.backward(outputs[: len(gradients)], gradients)
    _hand_back(state, op, hidden.grad)


def _hand_back(state: StepState, op: Op, gradient: torch.Tensor | None) -> None:
    """Leave the gradient of a block's input for what comes before it, unless nothing there is trained."""
    assert gradient is not None
    if op.unit > 1 or state.plan.learns_prologue:
        state.hidden_gradients[op.micro] = gradient


def _backward_around_experts(state: StepState, op: Op) -> None:
    """As `backward`, for a micro-batch that was recomputed already, and was back at the block's experts."""
    block = state.at_experts.recomputed.pop(op.micro).block()
    del state.hidden_gradients[op.micro]
    with torch.enable_grad(), caught(state, op, op.unit) as found:
        block.sink.to = found.sink if found else None
        torch.autograd.backward(block.outputs, block.gradients)
    _hand_back(state, op, block.hidden.grad)


def _recomputed(state: StepState, op: Op, package: Package) -> tuple[torch.Tensor, BlockResult]:
    """Return a block's input, as a leaf, and its results with a graph."""

    def run() -> tuple[torch.Tensor, BlockResult]:
        hidden = package.hidden.detach().requires_grad_()
        seed(state, op.unit, op.micro)
        return hidden, state.parts.chain.block(op.unit - 1, hidden, state.calls[op.micro][op.unit - 1])

    if package.kept or package.skipped:
        try:
            with Replay(package.kept, package.skipped, names=state.plan.stash.operators[op.unit - 1]):
                return run()
        except ReplayMismatch:  # the plan expected other operators than this device runs: proceed as if nothing had been kept
            state.left.not_kept.add(op.unit)
    return run()


def prologue_backward(state: StepState, op: Op) -> None:
    """Gradient of the first block's input -> gradients of the embedding."""
    seed(state, 0, op.micro)
    with torch.enable_grad(), catching(state, op, 0):
        result = state.parts.chain.prologue(state.batch.micro_batches[op.micro])
        gradient = state.hidden_gradients.pop(op.micro)
        if result.hidden.requires_grad:
            result.hidden.backward(gradient)  # type: ignore[no-untyped-call]
    del state.calls[op.micro]


@contextmanager
def bound(state: StepState, op: Op, unit: int, found: Catching | None = None) -> Iterator[None]:
    """Have a unit's parameters be views of the slot that compute reads. Their gradients go where they are caught."""
    if unit >= len(state.plan.units):
        yield
        return
    if (head := state.parts.parted.head) is not None and unit == head.unit:
        with head.bound():
            yield
        return
    chain, form, flat = state.parts.chain, state.parts.forms[unit], _weights(state, op, unit)
    sink = found.sink if found else None
    beside: AbstractContextManager[None] = nullcontext()
    rest = state.parts.parted.cut.rests[unit] if state.parts.parted.cut and state.parts.parted.cut.parts[unit] else None
    if form.is_beside or found is None:  # what is trained beside weights is no parameter of the unit
        chain.bind(unit, flat, None, rest=rest)
    else:
        takes = partial(_is_wanted, form, found)
        chain.bind(unit, flat, sink, takes, rows=found.rows, rest=rest)
    if form.is_beside:
        assert form.trained is not None, "what is trained beside weights has a layout"
        trained = torch.from_numpy(state.parts.buffers.trained[unit]).view(torch.float32)
        there = state.at_experts.beside(unit, trained, flat.device) if state.plan.experts else trained.to(flat.device)
        beside = state.parts.wire.beside(unit, form.trained, there, sink)
    with beside, _coming(state, op, unit, None if form.is_beside else found):
        try:
            yield
        finally:
            chain.release(unit)


def _coming(state: StepState, op: Op, unit: int, found: Catching | None) -> AbstractContextManager[None]:
    """Have the parts of a unit come from host memory as modules compute with them, if it has any."""
    cut, buffers = state.parts.parted.cut, state.parts.buffers
    if cut is None or not cut.parts[unit]:
        return nullcontext()

    form = state.parts.forms[unit]

    def catch(spec: ParameterSpec) -> Sink | None:
        return found.sink if found is not None and _is_wanted(form, found, spec) else None

    flat = torch.from_numpy(buffers.stored(unit, op)).view(buffers.dtype)
    return buffers.part_slots.coming(cut.parts[unit], flat, catch)


def _is_wanted(form: Form, found: Catching, spec: ParameterSpec) -> bool:
    return spec.name not in form.left and found.wanted(spec)


@contextmanager
def catching(state: StepState, op: Op, unit: int) -> Iterator[None]:
    """As `bound`; and if anything of the unit is trained, the wire takes its gradients and adds them to the step's."""
    with caught(state, op, unit) as found, bound(state, op, unit, found):
        yield


@contextmanager
def caught(state: StepState, op: Op, unit: int) -> Iterator[Catching | None]:
    """Make the context in which the wire takes a unit's gradients and adds them to the step's; None if nothing is trained."""
    parts = state.parts
    if unit >= len(state.plan.units) or not state.plan.units[unit].is_trained:
        yield None
        return
    form, trained, flat = parts.forms[unit], state.summed_layout(unit), _weights(state, op, unit)
    wire, moment = parts.wire if form.has_own_family else _DENSE, _moment(state, op, unit, flat.device)
    leaving = parts.buffers.leaving_gradients if unit not in state.plan.ends and form.in_place else ()
    with state.sums.leaf(op, unit, trained) as (total, delivered):
        if leaving:
            gradients: UnitGradients = LeavingGradients(trained, total, delivered, leaving, parts.machine)
        else:
            gradients = UnitGradients(trained, total, delivered, moment)
        with wire.catch(unit, form.layout, flat, gradients) as found:
            yield found
        gradients.finish()


def _weights(state: StepState, op: Op, unit: int) -> torch.Tensor:
    return state.parts.buffers.computed(unit, op)


def _moment(state: StepState, op: Op, unit: int, device: torch.device) -> Moment | None:
    """Return when a unit with a basis is caught, None for another one; the basis is on the device that computes."""
    if not state.plan.basis_bytes(unit):
        return None
    basis = torch.from_numpy(state.parts.buffers.trained[unit][state.plan.trained_bytes(unit) :])

    def propose(proposal: Proposal) -> None:
        state.verdict.proposals[unit] = proposal

    return Moment(
        step=state.verdict.step,
        unit=unit,
        micro=op.micro,
        num_micro=len(state.batch.micro_batches),
        seed=state.parts.seed,
        basis=basis.view(torch.float32).to(device),
        kept=state.caught[unit],
        propose=propose,
    )


def _aside_gradients(state: StepState) -> None:
    """Compute the router's loss over the whole step, so that any split into micro-batches gives the same loss."""
    leaves = {key: tuple(aside.detach().requires_grad_() for aside in asides) for key, asides in state.asides.outputs.items()}
    with torch.enable_grad():
        loss = _router_loss(state, leaves)
        scale = state.verdict.loss_scale.scale if state.verdict.loss_scale else 1.0
        (loss * scale).backward()  # type: ignore[no-untyped-call]
    state.asides.loss = loss.detach()
    for key, tensors in leaves.items():
        state.asides.gradients[key] = tuple(
            torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in tensors
        )
    state.asides.outputs.clear()


def _router_loss(state: StepState, asides: Mapping[tuple[int, int], tuple[torch.Tensor, ...]]) -> torch.Tensor:
    """Return the router's loss of all rows: the mean over batches of `StepBatch.router_rows` rows."""
    micros, blocks, chain = range(len(state.batch.micro_batches)), sorted({block for block, _ in asides}), state.parts.chain
    joined = [
        torch.cat(routers) for block in blocks for routers in zip(*(asides[block, micro] for micro in micros), strict=True)
    ]
    masks = [mask.flatten() for batch in state.batch.micro_batches if (mask := batch.counted) is not None]
    mask = torch.cat(masks) if masks else None
    rows = sum(batch.input_ids.shape[0] for batch in state.batch.micro_batches)
    if not 0 < state.batch.router_rows < rows:
        return chain.aside_loss(joined, mask)
    tokens = state.batch.router_rows * state.batch.micro_batches[0].input_ids.shape[1]
    parts = zip(*(torch.split(each, tokens) for each in joined), strict=True)
    counted = torch.split(mask, tokens) if mask is not None else (None,) * -(-rows // state.batch.router_rows)
    return torch.stack([chain.aside_loss(part, own) for part, own in zip(parts, counted, strict=True)]).mean()


def seed(state: StepState, unit: int, micro: int) -> None:
    """Seed by the place, so that dropout draws the same numbers in forward and recompute, whatever ran in between."""
    if state.parts.chain.has_dropout:
        torch.manual_seed(block_seed(state.parts.seed, state.verdict.step, unit, state.first_micro + micro))
