"""A frozen head that compute has for the loss only: it comes before the first micro-batch's loss, and leaves after the last."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from headrace.flow.step.step_state import StepState
from headrace.terms.program import Op
from headrace.terms.sizes import PAGE_BYTES, round_up


@contextmanager
def head_there(state: StepState, op: Op, *, stays: bool = False) -> Iterator[None]:
    """While entered, compute has the head. It `stays` where another operation on it follows the last micro-batch's."""
    if state.plan.visiting_head is None or state.parts.head is not None:  # ranges come by themselves
        yield
        return
    residents, unit = state.parts.buffers.residents, state.plan.ends[-1]
    away = residents[unit][:0]
    if not residents[unit].numel():
        residents[unit] = _brought(state, unit)
    yield
    if not stays and op.micro == len(state.batch.micro_batches) - 1:
        residents[unit] = away


def _brought(state: StepState, unit: int) -> torch.Tensor:
    parts, plan = state.parts, state.plan
    dtype, num_bytes = parts.buffers.dtype, plan.stored_bytes(unit)
    if plan.visiting_head == "host":
        into = torch.empty(num_bytes, dtype=torch.uint8, device=parts.machine.device)
        parts.machine.copy(into, torch.from_numpy(parts.buffers.head_on_host))
        return into.view(dtype)
    memory = parts.machine.host_buffer(round_up(num_bytes, PAGE_BYTES))[:num_bytes]
    parts.source.read(unit, memory)
    return torch.from_numpy(memory).view(dtype)
