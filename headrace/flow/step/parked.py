"""Sums of gradients that wait for a stage's next group of micro-batches, and the part of a tied matrix's that crosses stages.

Invariant: what waits is fp32, as where it is summed, so its way changes no bit.
"""

import torch

from headrace.flow.step.step_state import StepState
from headrace.machine.host_memory import Bytes
from headrace.plan.value.buffer_sizes import parked_bytes, parked_offset
from headrace.terms.program import Op, Pool


def sum_to_host(state: StepState, op: Op) -> None:
    """Copy what a block's gradient sums up to so far to host memory."""
    _parked(state, op).copy_(_accumulator(state, op))


def sum_to_device(state: StepState, op: Op) -> None:
    """Copy it back to where the next group's gradients are added."""
    _accumulator(state, op).copy_(_parked(state, op))


def sum_pages(state: StepState, op: Op) -> tuple[int, Bytes]:
    """Return where a sum waits on the SSD, and its buffer in host memory."""
    return parked_offset(state.plan, op.unit), _parking(state, op)


def send_tied_gradient(state: StepState, op: Op) -> None:
    """Send what the head adds to the gradient of a tied matrix to the first stage."""
    names, total = state.sums.delivered[op.unit], _accumulator(state, op)
    parts = [spec for spec in state.trained_layout(op.unit).parameters if spec.name in names]
    state.parts.line.say_names([spec.name for spec in parts])
    for spec in parts:
        state.parts.line.send_table(total[spec.offset : spec.offset + spec.num_elements])


def receive_tied_gradient(state: StepState, op: Op) -> None:
    """Receive the head's part of the tied gradient, before the prologue adds its own: the order of one process."""
    names, total = set(state.parts.line.hear_names()), _accumulator(state, op)
    for spec in state.trained_layout(op.unit).parameters:
        if spec.name in names:
            state.parts.line.receive_table(total[spec.offset : spec.offset + spec.num_elements])
    state.sums.delivered[op.unit] |= names


def _parked(state: StepState, op: Op) -> torch.Tensor:
    if op.slot(Pool.PARKING) < 0:
        return torch.from_numpy(state.parts.buffers.parked[op.unit]).view(torch.float32)
    return torch.from_numpy(_parking(state, op)).view(torch.float32)[: state.plan.units[op.unit].gradient_elements]


def _parking(state: StepState, op: Op) -> Bytes:
    return state.parts.buffers.parking[op.slot(Pool.PARKING)][: parked_bytes(state.plan, op.unit)]


def _accumulator(state: StepState, op: Op) -> torch.Tensor:
    found = state.parts.buffers.accumulator(op.unit, op.slot(Pool.ACCUMULATOR))
    assert found is not None, "several groups have an accumulator"
    return found
