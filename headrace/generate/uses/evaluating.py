"""The loss of a model, a run or a coded directory on held-out data.

Invariant: every sample of the data is scored once, whatever the plan, with the marks, cuts and rows of training.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from headrace.data import BatchStream
from headrace.data.batches.open_data import open_tokens, step_tensors_of, with_lengths
from headrace.flow.step.step_batch import filled_up
from headrace.generate.passes.copying import Copying
from headrace.generate.passes.opened import GenerationModel
from headrace.generate.passes.whose_weights import open_whose_model
from headrace.generate.plan.plan import GenerationPlan
from headrace.generate.uses.evaluator import Evaluator
from headrace.model import self_check
from headrace.model.directory.importing import refuse_not_finite
from headrace.terms.errors import ConfigError, ModelError
from headrace.terms.events import Sink
from headrace.terms.options.eval_options import EvalOptions
from headrace.terms.options.generate_options import GenerateOptions
from headrace.terms.options.run_options import RunOptions
from headrace.terms.plain_figures import plain_figure
from headrace.terms.sizes import format_bytes, format_seconds
from headrace.terms.tables import figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """What was measured: the mean `loss` of `tokens` tokens in nats; `tokens_in_rows` counts all tokens of the `rows` rows.

    `unused_tensors` are stored with the model, which has no place for them.
    """

    model: str
    data: tuple[str, ...]
    loss: float
    tokens: int
    samples: int
    rows: int
    tokens_in_rows: int
    seconds: float
    bytes_read: int
    adapter: str | None = None
    unused_tensors: tuple[str, ...] = ()

    @property
    def perplexity(self) -> float:
        """e to the power of the loss."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values; None for infinity and NaN."""
        values = figures(self, "model", "adapter", "data", "loss", "perplexity", "tokens", "samples", "rows", "tokens_in_rows")
        finite = {name: values[name] if math.isfinite(values[name]) else None for name in ("loss", "perplexity")}
        return values | {
            "data": list(self.data),
            **finite,
            **figures(self, "seconds", "bytes_read"),
            "unused_tensors": list(self.unused_tensors),
        }

    def explain(self) -> str:
        """Return it in words."""
        speed = self.tokens_in_rows / self.seconds if self.seconds else 0.0
        read = format_bytes(self.bytes_read)
        return "\n".join(
            (
                f"loss        {self.loss:.4f} nats per token",
                f"perplexity  {plain_figure(self.perplexity, 4)}",
                f"tokens      {self.tokens} scored, of {self.tokens_in_rows} in {self.rows} rows; {self.samples} samples",
                f"time        {format_seconds(self.seconds)}, {plain_figure(speed)} tokens/s, {read} of weights read",
            )
        )


@dataclass(frozen=True, slots=True)
class ScoringProgress:
    """The progress of a measurement: `done` of `rows` rows, and their mean loss."""

    done: int
    rows: int
    loss: float


def evaluate_model(
    place: Path,
    options: EvalOptions,
    *,
    sink: Sink | None = None,
    say: Callable[[str], None] = lambda text: None,
    progress: Callable[[ScoringProgress], None] = lambda found: None,
) -> Scored:
    """Return the loss of `options.data` under the model at `place`: a directory, coded or not, or a run, finished or not.

    `say` gets the plan and notes before anything is computed.

    Raises:
        InputError: model, data or an option cannot be used. Or the loss is not finite; the message then says why.
        PlanInfeasible: it does not fit; nothing has been allocated.
    """
    adapter = None if options.adapter is None else Path(options.adapter)
    model = open_whose_model(place, options.budget, options.compute_dtype, sink, self_check, adapter=adapter)
    try:
        data = _Rows(model, options)
        length = data.longest
        copying = Copying(options.ssd, options.copy_weights, sink or (lambda event: None))
        asked = GenerateOptions(
            host_memory=options.host_memory,
            device_memory=options.device_memory,
            rows=options.rows,
            seats=options.seats,
            machine=options.machine,
        )
        evaluator = Evaluator(model, asked, length, sink=sink, copying=copying)
    except BaseException:
        model.close()
        raise
    with evaluator:
        plan = evaluator.prepare(data.count)
        for line in (*data.notices, *explain_measurement(plan).splitlines()):
            say(line)
        started, total, tokens, done = time.perf_counter(), 0.0, 0, 0
        for rows, loss_sum in evaluator.losses(data.micro_batches(plan.rows)):
            if not math.isfinite(loss_sum):
                raise _no_number(model)
            total, tokens, done = total + loss_sum, tokens + rows.scored_tokens, done + len(rows.rows)
            progress(ScoringProgress(done, data.count, total / max(1, tokens)))
        return Scored(
            model=str(place),
            data=options.data,
            loss=total / tokens,
            tokens=tokens,
            samples=data.samples,
            rows=data.count,
            tokens_in_rows=data.tokens,
            seconds=time.perf_counter() - started,
            bytes_read=evaluator.bytes_read,
            adapter=None if adapter is None else str(adapter),
            unused_tensors=model.chain.unused_tensors,
        )


def _no_number(model: GenerationModel) -> ModelError:
    """Return why the loss is none: a weight that is none, or a dtype that is too narrow."""
    try:
        for directory in {model.directory, model.here.adapter or model.directory}:
            refuse_not_finite(directory)
    except ModelError as error:
        return error
    return ModelError(
        f"{model.directory}: the loss is not finite in {model.chain.compute_dtype}, though all weights are; use "
        "--compute-dtype float32"
    )


def explain_measurement(plan: GenerationPlan) -> str:
    """Return the plan of a measurement in words."""
    seats = f"{plan.seats} micro-batch{'es' if plan.seats > 1 else ''} of {plan.rows} row{'s' if plan.rows > 1 else ''}"
    lines = [f"score    {plan.prompts} rows of up to {plan.prompt_length} tokens, {seats} together", *plan.explain_memory()]
    if (found := plan.forecast) is not None:
        passes = -(-plan.prompts // (plan.rows * plan.seats))
        lines.append(
            f"time     {format_seconds(passes * found.pass_seconds)} on {found.machine}: {passes} "
            f"pass{'es' if passes > 1 else ''} of {format_seconds(found.pass_seconds)}; limited by {found.limiting}; "
            f"{format_bytes(found.read_bytes)} read for each pass"
        )
    return "\n".join([*lines, *(f"note     {note}" for note in plan.results.notes)])


class _Rows:
    """The rows of the data, in its order."""

    def __init__(self, model: GenerationModel, options: EvalOptions) -> None:
        asked = RunOptions(
            model=model.directory,
            data=options.data,
            sequence_length=options.sequence_length,
            template_date=options.template_date or model.here.template_date,
            border=model.here.border,
            cache=options.cache,
        )
        config = with_lengths(asked)
        length = config.sequence_length or 0
        packs = model.chain.packs(length)
        if options.packing and not packs:
            raise ConfigError(f"packing: the model does not keep samples of one row apart: {model.chain.packing_reason}")
        packing = packs if options.packing is None else options.packing
        config = replace(config, tokens_per_step=length, packing=packing, shuffle=False)
        tokens, spec = open_tokens(config, model.tokenizer(for_data=True))
        self._stream, self._together = BatchStream(tokens, spec), model.chain.padded_together
        self.notices = self._stream.notices
        self.count, self.samples, self.tokens = round(self._stream.steps_per_epoch), len(tokens), 0
        self.longest = length if packing else int(tokens.lengths.max())

    def micro_batches(self, rows: int) -> Iterator[Mapping[str, torch.Tensor]]:
        """Yield all rows once, up to `rows` of them together."""
        left = self.count
        while left:
            number = min(rows, left)
            left -= number
            batches = [self._stream.next_batch() for _ in range(number)]
            self.tokens += sum(batch.num_tokens for batch in batches)
            found = [step_tensors_of(batch) for batch in batches]
            for places in self._together([each["input_ids"].shape[1] for each in found]):
                part = [found[place] for place in places]
                longest = max(each["input_ids"].shape[1] for each in part)
                part = [filled_up(each, longest, needs_mask=False) for each in part]
                yield {name: torch.cat([each[name] for each in part]) for name in part[0]}
