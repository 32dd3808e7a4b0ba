"""Gradients leave the device: accumulator -> 16 bits in host memory. Their norm decides how they are applied."""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.flow.step.shards import add_norms, own_elements
from headrace.flow.step.step_state import StepState
from headrace.plan.value.buffer_sizes import held_gradient_bytes, held_gradient_offset
from headrace.terms.program import Op, Pool
from headrace.update import clip_factor, square_sum

# Pieces are so small that torch converts on this thread alone; compute owns the other threads.
_CONVERT_ELEMENTS = 32768
# On a GPU pieces are large enough to keep it busy, and small enough that those waiting to be copied take little memory.
_DEVICE_CONVERT_ELEMENTS = 4 << 20


def drain(state: StepState, op: Op) -> None:
    """Bring a unit's gradient into its host buffer in the drained dtype, set the rest to zero, and take its square sum."""
    parts, plan = state.parts, state.plan
    accumulator = parts.buffers.accumulator(op.unit, op.slot(Pool.ACCUMULATOR))
    slot = op.slot(Pool.GRADIENT)
    gradient = parts.buffers.gradient(op.unit, slot)
    if plan.separate_device and plan.sums_on_host and (left := parts.machine.record(op.lane)) is not None:
        left.synchronize()  # compute has copied all of it to host memory
    if accumulator is not None:
        whole, at = parts.buffers.gradient_tensor(op.unit, slot), 0
        for start, stop in plan.summed_runs(op.unit):
            _convert(state, accumulator[at : at + stop - start], whole[start:stop])
            at += stop - start
        event = parts.machine.record(op.lane) if plan.separate_device else None
        if event is not None:
            event.synchronize()  # the square sum below reads it on the host
    if parts.parted.sums is not None:
        state.sums.delivered[op.unit] |= parts.parted.sums.finish(op, len(state.batch.micro_batches))
    _zero_the_rest(state, op.unit, gradient)
    rows, form = parts.rows, parts.forms[op.unit]
    with_table = rows.square_sum_with(op.unit, form.layout, gradient) if rows is not None and form.in_place else None
    state.square_sums[op.unit] = square_sum(gradient) if with_table is None else with_table


def _convert(state: StepState, total: torch.Tensor, into: torch.Tensor) -> None:
    """Copy a sum to the host in the drained dtype, piece by piece."""
    apart = state.plan.separate_device and not (state.plan.sums_on_host and total.device.type == "cpu")
    piece = _CONVERT_ELEMENTS if total.device.type == "cpu" else _DEVICE_CONVERT_ELEMENTS
    for start in range(0, into.numel(), piece):
        part = slice(start, start + piece)
        if apart:
            state.parts.machine.copy(into[part], total[part].to(into.dtype))
        else:
            into[part].copy_(total[part])


def push(state: StepState, op: Op) -> None:
    """Give a drained gradient to the site where its unit lives."""
    site = state.parts.far_site
    site.push(op.unit, state.parts.buffers.gradient(op.unit, op.slot(Pool.GRADIENT)))


def decide(state: StepState, op: Op) -> None:
    """Global norm over all units -> clip factor, or skip. The sum has a fixed order, and so the same bits."""
    if state.parts.peers is not None:
        add_norms(state)
    if state.parts.line is not None:
        state.square_sums = state.parts.line.all_square_sums(state.square_sums)
    _decide(state)
    if (rows := state.parts.rows) is not None:
        again = state.verdict.missed and state.plan.updates.policy == "rerun"
        void = again or state.verdict.skipped is not None
        rows.conclude(None if void else state.verdict.scalars_of)
    if state.parts.site is not None:
        verdict, far = state.verdict, state.plan.far_units
        skipped = verdict.skipped is not None
        state.parts.site.conclude(None if skipped else {unit: verdict.scalars_of(unit) for unit in far})


def _decide(state: StepState) -> None:
    verdict = state.verdict
    of_rows = state.parts.rows.square_sums() if state.parts.rows is not None else []
    total = math.sqrt(math.fsum([*(state.square_sums[unit] for unit in sorted(state.square_sums)), *of_rows]))
    scale = verdict.loss_scale.scale if verdict.loss_scale else 1.0
    verdict.grad_norm = total / scale
    if verdict.redone:
        return  # the step is run again with the factor that its first run found
    factor = clip_factor(verdict.grad_norm, verdict.max_grad_norm)
    if factor is None:
        verdict.skipped = f"gradient norm is {verdict.grad_norm}" + (f" at loss scale {scale:g}" if verdict.loss_scale else "")
    elif factor != 1.0:
        verdict.clipped = True
        # Updates that have begun assumed a factor of 1. From here on none has an effect, and the engine takes them back.
        verdict.missed = state.plan.updates.policy in ("speculative", "rerun")
        verdict.gradient_scale *= factor


def _zero_the_rest(state: StepState, unit: int, gradient: NDArray[Any]) -> None:
    """Set padding, and parameters that no gradient reached, to zero: the buffer may hold an older gradient."""
    stop = 0
    delivered = state.sums.delivered[unit]
    for parameter in state.trained_layout(unit).parameters:
        gradient[stop : parameter.offset] = 0
        stop = parameter.offset + parameter.num_elements
        if parameter.name not in delivered:
            gradient[parameter.offset : stop] = 0
    gradient[stop:] = 0


def gradient_pages(state: StepState, op: Op) -> tuple[int, NDArray[np.uint8]]:
    """Return where a drained gradient waits on the SSD, and its bytes: those of a rank's own part alone."""
    plan = state.plan
    buffer, offset = state.parts.buffers.gradients[op.slot(Pool.GRADIENT)], held_gradient_offset(plan, op.unit)
    if state.parts.peers is None:
        return offset, buffer[: held_gradient_bytes(plan, op.unit)]
    own, width = own_elements(state, op.unit), plan.gradient_bytes_per_element
    return offset + own.start * width, buffer[own.start * width : own.stop * width]
