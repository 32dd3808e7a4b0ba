"""The engine of a stage: it steps with whole batches through its own blocks (AxoNN), and holds the states of these alone.

Stage 0 is driven as any engine; the others follow it, as ranks do.
"""

import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from headrace.engine.beginning import Run
from headrace.engine.trainer import Engine
from headrace.flow.step.step_batch import StepBatch, checked_batch
from headrace.flow.step.steps import ProgramBuilders
from headrace.peers.ranks.sharded import ShardedEngine
from headrace.peers.stages.line import Line
from headrace.peers.stages.steps import StagedSteps
from headrace.plan.value.plan import Plan
from headrace.terms.errors import DataError, PeerLost, StepFailed
from headrace.terms.events import Evaluation, StepResult
from headrace.update.combinations import refuse_in_stages


class StagedEngine(ShardedEngine):
    """An engine whose `seams` have a line of stages. Only stage 0's is driven by others than `follow`."""

    _kind_of_steps = StagedSteps

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._said: Sequence[Mapping[str, float]] = ()
        self._schedule = ProgramBuilders(tail=partial(StagedSteps.finish, line=self._line))
        self._closers.callback(self._line.close)

    _check = staticmethod(refuse_in_stages)

    @property
    def _line(self) -> Line:
        line = self._fleet
        assert isinstance(line, Line), "a staged engine has stages"
        return line

    def _own_words(self) -> dict[str, Any]:
        return super()._own_words() | {"transfer_seconds": self._line.transfer_seconds}

    def _hear(self, found: Sequence[Mapping[str, Any]], *, learns: bool) -> None:
        self._said = [
            {"compute_seconds": each["lanes"]["compute_seconds"], "transfer_seconds": each["transfer_seconds"]}
            for each in found
        ]

    def step(
        self, batch: Mapping[str, torch.Tensor], *, position: Any = None, learning_rate: float | None = None
    ) -> StepResult:
        """See `ShardedEngine.step`; stage 0 notes how busy each stage was."""
        result = super().step(batch, position=position, learning_rate=learning_rate)
        if self._line.leads:
            self._line.stage_shares.add(self._said, result.seconds)
        return result

    def _for_all(self, batch: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        sequences, length = checked_batch(batch, self.chain.vocabulary)["input_ids"].shape
        plan = self.plan
        assert plan is not None, "stages begin with a plan"
        num_micro = -(-sequences // plan.batch.micro_batch_sequences)
        if length > plan.batch.sequence_length or num_micro > plan.batch.num_micro_batches:
            raise DataError(f"batch: {sequences} rows of {length} tokens are more than the run was planned for")
        return batch

    def _share_of(self, data: StepBatch) -> tuple[StepBatch, int]:
        return data, 0

    def _rows(self, plan: Plan, sequences: int, length: int) -> int:
        return plan.batch.micro_batch_sequences

    def close(self) -> None:
        """See `Engine.close`. Where a stage is lost and cannot be told, this one ends all the same."""
        try:
            super().close()
        except PeerLost:
            with contextlib.suppress(PeerLost, StepFailed):
                Engine.close(self)

    def evaluate(self, batch: Mapping[str, torch.Tensor]) -> Evaluation:
        """See `Engine.evaluate`."""
        with self._together("evaluate", self._for_all(batch)):
            return super(ShardedEngine, self).evaluate(batch)
