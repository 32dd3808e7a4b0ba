"""A node's side of a step: rows and weights go to workers, gradients and reports come back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from numpy.typing import NDArray

from headrace.flow.step.step_batch import StepBatch
from headrace.flow.step.step_state import StepState
from headrace.machine.host_memory import Bytes
from headrace.terms.events import OpDone
from headrace.terms.program import Op, Pool
from headrace.update import square_sum


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTask:
    """What workers are told of a step: its number, what the loss is multiplied by beside the mean, and its micro-batches. The
    learning rate is only for them to show. Where it `learns`, they push gradients; else they only score.
    """

    step: int
    loss_scale: float
    learning_rate: float
    batch: StepBatch
    learns: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What workers report of a step: the sum of token losses, the auxiliary loss if there is one, and what their lanes did, on
    the node's clock.
    """

    loss_sum: float | None
    aside_loss: float | None
    ops: Sequence[OpDone] = ()


class Workers(Protocol):
    """The workers that compute for a node. `send` and `receive` are called from lanes of their own, in the workers' order of
    turns.
    """

    def announce(self, task: StepTask) -> None:
        """Tell each worker its share of a step."""

    def send(self, unit: int, weights: Bytes) -> None:
        """Send a unit's newest weights, as bytes of the compute dtype, to all workers."""

    def receive(self, unit: int, into: NDArray[Any]) -> None:
        """Fill `into` with the sum of the workers' gradients of a unit, in NumPy's types (bfloat16 as bits)."""

    def report(self) -> Report:
        """Return the workers' report, after the last gradient."""


def announce(state: StepState, op: Op) -> None:
    """Tell workers about the step."""
    scale = state.verdict.loss_scale.scale if state.verdict.loss_scale else 1.0
    verdict = state.verdict
    step, rate = verdict.step, verdict.learning_rate
    task = StepTask(step=step, loss_scale=scale, learning_rate=rate, batch=state.batch, learns=state.learns)
    _workers(state).announce(task)


def send(state: StepState, op: Op) -> None:
    """Send a unit's weights from its host slot."""
    _workers(state).send(op.unit, state.parts.buffers.stored(op.unit, op))


def receive(state: StepState, op: Op) -> None:
    """Receive a unit's gradient into its buffer, and take its square sum."""
    gradient = state.parts.buffers.gradient(op.unit, op.slot(Pool.GRADIENT))
    _workers(state).receive(op.unit, gradient)
    state.square_sums[op.unit] = square_sum(gradient)


def report(state: StepState, op: Op) -> None:
    """Take the step's losses, and show what the workers' lanes did."""
    found = _workers(state).report()
    for each in found.ops:
        state.parts.sink(each)
    state.loss_sum = None if found.loss_sum is None else torch.tensor(found.loss_sum, dtype=torch.float64)
    state.asides.loss = None if found.aside_loss is None else torch.tensor(found.aside_loss, dtype=torch.float64)


def _workers(state: StepState) -> Workers:
    workers: Workers | None = state.parts.workers
    assert workers is not None, "a plan that serves comes with workers"
    return workers


def task_message(task: StepTask, micros: range) -> tuple[Mapping[str, Any], Mapping[str, torch.Tensor]]:
    """Return what a worker is told about its share of a step, as a JSON value, and its rows, int64 (sequences, length), by key.

    `micros` are the share's micro-batches.
    """
    mine = [task.batch.micro_batches[micro] for micro in micros]
    words = {
        "step": task.step,
        "learns": task.learns,
        "loss_scale": task.loss_scale,
        "learning_rate": task.learning_rate,
        "trained_tokens": task.batch.trained_tokens,
        "first_micro": micros.start,
        "rows": len(task.batch.micro_batches[0].input_ids),
    }
    keys = ("input_ids", "labels", "attention_mask", "position_ids", "token_mask")
    return words, {key: torch.cat([getattr(micro, key) for micro in mine]) for key in keys if getattr(mine[0], key) is not None}
