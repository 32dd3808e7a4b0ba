"""Evaluation within a run: when, over which rows, and what follows from it.

Everything follows from the step and from the recorded evaluations. So a resumed run does an evaluation that was broken off
again before its next step, and stops at the same step.
Invariant: an evaluation changes nothing of training; what it records is of a durable step.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from headrace.ask.between_steps import Evaluating
from headrace.data import Batch
from headrace.data.batches.batches import Batches
from headrace.data.batches.held_out import HeldOutRows
from headrace.data.batches.open_data import step_tensors_of
from headrace.report.metrics import Record, evaluations_since_best
from headrace.runs.protocols import RunningEngine
from headrace.terms.events import Evaluated, Notice, Sink
from headrace.terms.options.run_options import RunOptions


@dataclass(frozen=True)
class Evaluations:
    """The evaluations of a run of `total_steps` steps: after which steps they are, and their rows."""

    config: RunOptions
    stream: Batches
    total_steps: int

    @cached_property
    def rows(self) -> HeldOutRows | None:
        """The rows that are evaluated; None if there are none."""
        return HeldOutRows(self.stream.held_out, self.stream.spec) if self.stream.held_out is not None else None

    def due(self, step: int) -> bool:
        """Return whether held-out rows are evaluated after `step`: by the interval, else after an epoch; and after the last."""
        if self.rows is None or step == 0:
            return False
        if step == self.total_steps:
            return True
        if self.config.eval_steps is not None:
            return step % self.config.eval_steps == 0
        return self.ends_epoch(step)

    def ends_epoch(self, step: int) -> bool:
        """Return whether a pass over the data ends in `step`."""
        return self.stream.epochs_ended(step) > self.stream.epochs_ended(step - 1)

    @property
    def count(self) -> int:
        """How many evaluations the whole run has."""
        if self.rows is None:
            return 0
        every = self.config.eval_steps
        return (self.total_steps - 1) // every + 1 if every is not None else self.epochs

    @property
    def epochs(self) -> int:
        """How many steps end a pass over the data, or the run."""
        before_last = self.total_steps - 1
        return min(before_last, self.stream.epochs_ended(before_last)) + 1

    def asked(self) -> Evaluating | None:
        """Return the run's evaluations, for its plan; None if there are none."""
        if self.rows is None:
            return None
        return Evaluating(times=self.count, rows=len(self.rows), passes=self.rows.num_batches)

    def over(self, evaluations: Sequence[Record]) -> bool:
        """Return whether the run stops early, because of what these evaluations say."""
        patience = self.config.early_stopping_patience
        return patience is not None and evaluations_since_best(evaluations) >= patience


@dataclass(frozen=True)
class RunEvaluator:
    """Evaluates the model of `engine` between steps.

    `evaluations` are the records so far; `sink` gets new ones, and adds them. `heed` says whether to break off. `tensors` makes
    of a batch what the engine takes.
    """

    plan: Evaluations
    engine: RunningEngine
    evaluations: Sequence[Record]
    sink: Sink
    heed: Callable[[], bool]
    tensors: Callable[[Batch], Mapping[str, torch.Tensor]] = step_tensors_of

    def evaluate_if_due(self) -> None:
        """Evaluate after the newest step if that is due and not done.

        Raises:
            StepFailed: a lane failed; the last committed step is untouched.
        """
        step = self.engine.step_index
        if not self.plan.due(step) or (self.evaluations and self.evaluations[-1]["step"] >= step):
            return
        self.engine.flush()  # what the step still moves belongs to it
        if (found := self._evaluated(step)) is None:
            return
        self.sink(found)
        if not math.isfinite(found.loss):
            self.sink(Notice(text=f"the evaluation after step {step} has no finite loss"))

    def _evaluated(self, step: int) -> Evaluated | None:
        """Return the mean loss over all held-out tokens or pairs; None if it was broken off."""
        assert self.plan.rows is not None, "an evaluation that is due has rows"
        started, total, shares, tokens = time.perf_counter(), 0.0, 0, 0
        for batch in self.plan.rows.batches():
            if self.heed():
                return None
            found = self.engine.evaluate(self.tensors(batch))
            share = found.rows if self.plan.config.loss else found.tokens  # a loss of pairs is their mean
            total, shares, tokens = total + found.loss * share, shares + share, tokens + found.tokens
        return Evaluated(step=step, loss=total / shares, tokens=tokens, seconds=time.perf_counter() - started)
