"""Weights come: SSD -> host slot -> device slot. Weights of both families are made there from what was read."""

import torch

from headrace.flow.step_state import StepState
from headrace.terms.families import WEIGHTS
from headrace.terms.program import Op, Pool


def fetch(state: StepState, op: Op) -> None:
    """Read a unit's newest weights into its host slot (of a resident unit: into the staging buffer)."""
    state.parts.store.read(op.unit, WEIGHTS, state.parts.buffers.stored(op.unit, op.slot(Pool.HOST_WEIGHTS))).wait()


def pull(state: StepState, op: Op) -> None:
    """Bring a far unit's newest weights into its host slot (of a resident unit: into the staging buffer)."""
    state.parts.far_site.pull(op.unit, state.parts.buffers.stored(op.unit, op.slot(Pool.HOST_WEIGHTS)))


def upload(state: StepState, op: Op) -> None:
    """Copy a unit's weights from the host to the device; if they are made there, copy their sources."""
    parts, unit, slot = state.parts, op.unit, op.slot(Pool.DEVICE_WEIGHTS)
    buffers, sent = parts.buffers, op.slot(Pool.SOURCES)
    stored = buffers.stored(unit, op.slot(Pool.HOST_WEIGHTS))
    if sent >= 0:
        sources = [buffers.trained[unit]] if state.plan.units[unit].is_completed else []
        if state.plan.units[unit].stored_bytes is not None:
            sources.insert(0, stored)
        start = 0
        for source in sources:
            parts.machine.copy(buffers.sources[sent][start : start + source.size], torch.from_numpy(source))
            start += source.size
    if sent < 0 or slot >= 0:
        into = buffers.resident_weights[unit] if slot < 0 else buffers.computed(unit, -1, slot)
        parts.machine.copy(into, torch.from_numpy(stored).view(buffers.dtype))


def make(state: StepState, op: Op) -> None:
    """Make the weights that compute reads from what is in host memory or was sent to the device."""
    parts, plan, unit = state.parts, state.plan, op.unit
    buffers, sent = parts.buffers, op.slot(Pool.SOURCES)
    into, figures = buffers.computed(unit, -1, op.slot(Pool.DEVICE_WEIGHTS)), plan.units[unit]
    stored: torch.Tensor | None
    if sent < 0:
        stored = torch.from_numpy(buffers.stored(unit, op.slot(Pool.HOST_WEIGHTS)))
        trained = torch.from_numpy(buffers.trained[unit]) if figures.is_completed else None
    else:
        coded, whole = figures.stored_bytes or 0, buffers.sources[sent]
        stored = whole[:coded] if coded else None
        trained = whole[coded : coded + plan.completing_bytes(unit)] if figures.is_completed else None
    parts.maker.make(unit, stored, None if trained is None else trained.view(torch.float32), into)
