"""Measures the loss of rows with a model of any size. The seats of its passes score rows instead of answering.

Invariant: what is scored, and how it is cut, follows from the rows and the plan; weights are only read.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from headrace.flow.step.step_batch import check_apart, checked_batch
from headrace.generate.passes.copying import Copying
from headrace.generate.passes.generator import Generator
from headrace.generate.passes.opened import GenerationModel
from headrace.generate.passes.planner import GenerationPlanner, Passes
from headrace.generate.passes.units import GenerationUnits
from headrace.generate.plan.plan import GenerationPlan
from headrace.model import IGNORED, MicroBatch, shift_labels
from headrace.model.seats.scoring import ContinuationSeat, ScoringSeat, scoring_costs
from headrace.terms.closing import Closing
from headrace.terms.events import Sink
from headrace.terms.options.generate_options import GenerateOptions

# The most tokens of a micro-batch: more make products no faster, and only take memory.
_MOST_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class LabelledRows:
    """Rows that are scored together; `batch` has tensors (rows, length) as `Engine.step` takes them."""

    batch: Mapping[str, torch.Tensor]

    @property
    def rows(self) -> torch.Tensor:
        """The rows' token ids."""
        return self.batch["input_ids"]

    @property
    def scored_tokens(self) -> int:
        """Tokens that have a label and at least one token before them."""
        return int((shift_labels(self.batch["labels"]) != IGNORED).sum())


@dataclass(frozen=True, slots=True)
class Continuations:
    """Rows of token ids (b, C), and the `targets` (b, C) that follow their positions, IGNORED where nothing is scored."""

    rows: torch.Tensor
    targets: torch.Tensor


class Evaluator(Closing):
    """Scores with one model. Use as a context manager, or `close` it."""

    def __init__(
        self,
        model: GenerationModel,
        options: GenerateOptions,
        length: int,
        *,
        interpreter: str = "overlapped",
        sink: Sink | None = None,
        copying: Copying | None = None,
    ) -> None:
        """Score rows of up to `length` tokens with `model`, which is closed with it. `options` are as for a `Generator`;
        `copying` says whether its weights are copied first.
        """
        self.model, self.length = model, length
        units = GenerationUnits(tuple(model.source.figures), notes=model.notes)
        passes = Passes(costs=scoring_costs, most_rows=max(1, _MOST_TOKENS // length), chunks=())
        options = replace(options, packed_products=False, narrow_products=False)
        self._planner = GenerationPlanner(model.chain, units, model.machine, options, passes)
        self._generator = Generator(model, self._planner, interpreter, sink, copying)

    def prepare(self, rows: int) -> GenerationPlan:
        """Return the plan for so many rows, after making its buffers.

        Raises:
            PlanInfeasible: a budget is too small; nothing has been allocated.
        """
        plan = self._planner.plan(rows, self.length, 1)
        self._generator.use(plan)
        return plan

    def losses(self, batches: Iterable[Mapping[str, torch.Tensor]]) -> Iterator[tuple[LabelledRows, float]]:
        """Yield the rows of batches that are scored, with the sum of their tokens' losses in nats; at most as many as planned.

        Raises:
            DataError: `Engine.step` would not accept a batch.
            StepFailed: a lane failed.
        """

        def checked(batch: Mapping[str, torch.Tensor]) -> LabelledRows:
            found = checked_batch(batch, self.model.chain.vocabulary)
            check_apart(found, self.model.chain)
            return LabelledRows(found)

        def sit(item: LabelledRows) -> ScoringSeat:
            return ScoringSeat(self.model.chain, MicroBatch(**item.batch))

        for rows, seat in self._generator.through(map(checked, batches), sit):
            yield rows, seat.loss_sum

    def continuations(self, batches: Iterable[Continuations]) -> Iterator[tuple[Continuations, ContinuationSeat]]:
        """Yield each of `batches` with its seat, which has the scores of its rows; at most as many rows as planned.

        Raises:
            StepFailed: a lane failed.
        """

        def sit(item: Continuations) -> ContinuationSeat:
            return ContinuationSeat(self.model.chain, MicroBatch(item.rows, item.targets), item.targets)

        yield from self._generator.through(batches, sit)

    @property
    def bytes_read(self) -> int:
        """Bytes of weights read so far."""
        return self.model.source.bytes_read

    def close(self) -> None:
        """Free buffers and close the model's files."""
        self._generator.close()
