"""The weights and gradients of a unit while a micro-batch passes it.

Invariant: nothing refers to a unit's slots after its context, so they may be refilled.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from headrace.flow.step_state import StepState
from headrace.terms.program import Op, Pool
from headrace.update.wire import Caught, Gradients, Moment, Proposal, Wire
from headrace.update.wires import DenseWire

# Units that are trained in place have gradients of their own elements, whatever the run's wire is.
_DENSE: Wire = DenseWire()


@contextmanager
def bound(state: StepState, op: Op, unit: int, caught: Caught | None = None) -> Iterator[None]:
    """Have a unit's parameters be views of the slot that compute reads. Their gradients go where they are `caught`."""
    if unit >= len(state.plan.units):
        yield
        return
    chain, form, flat = state.parts.chain, state.parts.forms[unit], _weights(state, op, unit)
    sink = caught.sink if caught else None
    beside: AbstractContextManager[None] = nullcontext()
    if form.is_beside or caught is None:  # what is trained beside weights is no parameter of the unit
        chain.bind(unit, flat, None)
    else:
        chain.bind(unit, flat, sink, lambda spec: spec.name not in form.left and caught.wanted(spec))
    if form.is_beside:
        assert form.trained is not None, "what is trained beside weights has a layout"
        trained = torch.from_numpy(state.parts.buffers.trained[unit]).view(torch.float32)
        beside = state.parts.wire.beside(unit, form.trained, trained.to(flat.device), sink)
    with beside:
        try:
            yield
        finally:
            chain.release(unit)


@contextmanager
def catching(state: StepState, op: Op, unit: int) -> Iterator[None]:
    """As `bound`; and if anything of the unit is trained, the wire takes its gradients and adds them to the step's."""
    parts = state.parts
    if unit >= len(state.plan.units) or not state.plan.units[unit].is_trained:
        with bound(state, op, unit):
            yield
        return
    form, trained, flat = parts.forms[unit], state.trained_layout(unit), _weights(state, op, unit)
    basis, moment = _basis(state, unit, flat.device), _moment(state, op, unit)
    wire = parts.wire if form.has_own_family else _DENSE
    with (
        state.sums.leaf(op, unit, trained) as (total, delivered),
        wire.catch(unit, form.layout, flat, Gradients(trained, total, delivered, basis, moment)) as caught,
        bound(state, op, unit, caught),
    ):
        yield


def _weights(state: StepState, op: Op, unit: int) -> torch.Tensor:
    buffers = state.parts.buffers
    if unit in state.plan.resident_units:
        return buffers.resident_weights[unit]
    return buffers.computed(unit, op.slot(Pool.HOST_WEIGHTS), op.slot(Pool.DEVICE_WEIGHTS))


def _basis(state: StepState, unit: int, device: torch.device) -> torch.Tensor | None:
    """Return the basis of the unit's trained family, on the device that computes."""
    if not state.plan.basis_bytes(unit):
        return None
    whole = torch.from_numpy(state.parts.buffers.trained[unit][state.plan.trained_bytes(unit) :])
    return whole.view(torch.float32).to(device)


def _moment(state: StepState, op: Op, unit: int) -> Moment | None:
    if not state.plan.basis_bytes(unit):
        return None

    def propose(proposal: Proposal) -> None:
        state.verdict.proposals[unit] = proposal

    return Moment(
        step=state.verdict.step,
        unit=unit,
        micro=op.micro,
        num_micro=len(state.batch.micro_batches),
        seed=state.parts.seed,
        kept=state.caught[unit],
        propose=propose,
    )
