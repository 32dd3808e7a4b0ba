"""A `transformers.Trainer` whose step is the engine's.

transformers' own loop runs: data loaders, callbacks with their flags, strategies, logs. The engine takes the place of forward,
backward, clipping and update. `trainer.model` is a skeleton without weights, `trainer.optimizer` says what is asked for.
Invariant: the position of the loop is committed with the step. So a resumed run goes on after its newest step.
"""

import math
import weakref
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Self

import torch
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput, TrainOutput, has_length
from transformers.utils import logging

from headrace.data.batches.open_data import MissingTokenizer, tokenizer_for_data
from headrace.integrations.transformers import loop_state
from headrace.integrations.transformers.adapters import with_adapters
from headrace.integrations.transformers.arguments import check_arguments, check_methods, refusing_method
from headrace.integrations.transformers.batches import collated_tensors_of, joined_batches, slices
from headrace.integrations.transformers.engine_run import EngineRun, refuse_taken
from headrace.integrations.transformers.optimizers import options_of, schedule_of
from headrace.integrations.transformers.options import (
    PLACEMENT,
    compute_dtype_of,
    model_directory,
    router_coefficient_of,
    run_options,
)
from headrace.integrations.transformers.rows import Reading, RightPadding, TokenRows, longest_of
from headrace.integrations.transformers.saved import write_model
from headrace.model import Checkpoint
from headrace.model.blocks.skeleton import build_skeleton
from headrace.plan.value.plan import Plan
from headrace.terms.errors import ConfigError
from headrace.terms.options.run_options import RunOptions

logger = logging.get_logger("transformers.headrace")
_FIRST_ROWS = 1024  # they say how many samples rows hold


def _say(text: str, level: str = "info") -> None:
    (logger.warning if level == "warning" else logger.info)(text)


class HeadraceTrainer(Trainer):  # type: ignore[misc]
    """Trains a model that is larger than memory under transformers' own loop (docs/trainer.md).

    `model` is a directory, or a name on the Hub. `args.output_dir` is the run directory. `ssd`, `host_memory`,
    `device_memory`, `machine`, `plan` and `cache` are as in `headrace.RunOptions`; `sequence_length` cuts rows. Data sets
    have the columns that `headrace train` reads, unless a `data_collator` is given, whose batches are taken as they are.

    Raises:
        InputError: model, data or an argument cannot be used; the message names it.
    """

    control: Any
    lr_scheduler: Any

    def __init__(
        self,
        model: str | Path,
        args: TrainingArguments | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        peft_config: Any = None,
        **given: Any,
    ) -> None:
        check_methods(type(self), HeadraceTrainer)
        args = args or TrainingArguments(output_dir="tmp_trainer")
        self._placement = {name: given.pop(name, None) for name in PLACEMENT}
        notes = check_arguments(args, given)
        args._n_gpu, args.dataloader_pin_memory = min(1, args.n_gpu), False  # one GPU computes; the engine reads from the host
        self._directory = directory = model_directory(model, _say)
        checkpoint = Checkpoint.open(directory, decode=True)
        self._dtype = compute_dtype_of(args, checkpoint.main_dtype)
        self._router_coefficient = router_coefficient_of(args, checkpoint.config)
        skeleton, self._adapter = build_skeleton(checkpoint.config, getattr(torch, self._dtype)), None
        if peft_config is not None:
            skeleton, self._adapter = with_adapters(skeleton, peft_config)
        else:
            for parameter in skeleton.parameters():
                parameter.requires_grad_(parameter.is_floating_point())
        self._run: EngineRun | None = None
        self._waiting: list[Mapping[str, torch.Tensor]] = []
        self._grad_norm: float | None = None
        self._best: Path | None = None
        self._batches_per_epoch = self._steps_per_epoch = 1

        self._own_tokenizer = given.pop("processing_class", None)
        tokenizer = tokenizer_for_data(directory) if self._own_tokenizer is None else self._own_tokenizer
        cache = Path(self._placement["cache"] or RunOptions(model=directory, data=("",)).cache)
        self._reading = Reading.of(args, tokenizer, directory, cache, self._placement["sequence_length"])
        if self._reading.tokenizer is not tokenizer:
            self._own_tokenizer = tokenizer = self._reading.tokenizer
        if data_collator is None:
            train_dataset, eval_dataset, data_collator = self._reading.all_rows(train_dataset, eval_dataset)
        self._pad_id = getattr(data_collator, "pad_id", None) or getattr(tokenizer, "pad_token_id", None) or 0
        super().__init__(
            skeleton,
            args,
            data_collator,
            train_dataset,
            eval_dataset,
            processing_class=None if isinstance(tokenizer, MissingTokenizer) else tokenizer,
            **given,
        )
        for note in notes:
            logger.warning(note)
        self.add_callback(loop_state.GoOn(self))

    # The run.

    @property
    def plan(self) -> Plan | None:
        """The plan that the engine runs inside; None before the run has begun."""
        return self._run.engine.plan if self._run is not None else None

    @property
    def records(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl that are of steps."""
        return self._run.records if self._run is not None else []

    def epoch_after(self, step: int) -> tuple[float, bool]:
        """Return the epoch after `step`, as logs have it, and whether one ends there."""
        full, left = divmod(step, self._steps_per_epoch)
        return full + left * self.args.gradient_accumulation_steps / self._batches_per_epoch, left == 0

    @property
    def _rows_per_step(self) -> int:
        return int(self.args.train_batch_size * self.args.gradient_accumulation_steps)

    def _options(self, steps: int) -> RunOptions:
        learned = options_of(self.optimizer, self.model)
        learned |= {"compute_dtype": self._dtype, "adapter": self._adapter}
        learned |= {"router_aux_loss_coef": self._router_coefficient}
        asked = self._placement["sequence_length"]
        shape = {
            "steps": steps,
            "rows": self._rows_per_step,
            "length": int(asked or longest_of(self.train_dataset, self.eval_dataset)),
        }
        learned |= (
            {"template_date": self._reading.dated, "border": self._reading.border.value}
            if isinstance(self.train_dataset, TokenRows)
            else {}
        )
        return run_options(self._directory, self.args, self._placement, learned=learned, **shape)

    def _opened(self, steps: int | None = None) -> EngineRun:
        """Return the run, begun if it is not."""
        if self._run is None:
            if steps is None:  # evaluated before it is trained
                self.create_optimizer()
                loader = self.get_train_dataloader() if self.train_dataset is not None else None
                steps = self.set_initial_training_values(self.args, loader)[-1] if loader is not None else 1
            rows = self.train_dataset
            packed = rows.first(_FIRST_ROWS) if isinstance(rows, TokenRows) else None
            self._run = self._taken(EngineRun.begin(self._options(steps), _say, packed))
        return self._run

    def _taken(self, run: EngineRun) -> EngineRun:
        """Return `run`, which is let go with this trainer; and say what it trains."""
        self._letting_go = weakref.finalize(self, run.close)
        self._letting_go.atexit = False
        if run.router_note is not None:
            logger.warning(run.router_note)
        return run

    def train(self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, **given: Any) -> TrainOutput:
        """Train; with `resume_from_checkpoint=True`, go on after the newest step of the run in `output_dir`.

        Raises:
            InputError: `output_dir` holds something else, or the run began with other data or options.
            PlanInfeasible: the budgets are too small.
            StorageError, StepFailed: the run broke, or a disk is full; it can be resumed.
        """
        if trial is not None:
            raise ConfigError("trial: begin a run with an output_dir of its own for each trial")
        output = Path(self.args.output_dir).absolute()
        if not resume_from_checkpoint:
            if self._run is None:
                refuse_taken(output)
            elif self._run.engine.step_index:
                raise ConfigError("train: this run has begun; go on with train(resume_from_checkpoint=True)")
            found: str | None = None
        else:
            self.close()
            loop_state.check_asked(resume_from_checkpoint, output)
            run = loop_state.resumed(output, _say)
            self._run = self._taken(run) if run is not None else None
            found = str(output) if run is not None else None
            if run is not None:
                loop_state.cut_to_commit(output, run.engine)
        self._waiting.clear()
        result = super().train(resume_from_checkpoint=found, **given)
        self._opened().sum_up()
        self._keep_state()
        return result

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if self._run is not None:
            loop_state.refuse_another_state(self._run, self._options(max_steps), self._identity())
        run = self._opened(max_steps)
        accumulated = self.args.gradient_accumulation_steps
        batches = len(train_dataloader) if has_length(train_dataloader) else max_steps * accumulated
        self._batches_per_epoch, self._steps_per_epoch = batches, max(1, math.ceil(batches / accumulated))
        run.record(self._steps_per_epoch)
        return prepared

    def _run_epoch(self, *given: Any, **more: Any) -> None:
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(*given, **more)
        else:  # resumed when all was done
            self.control.should_training_stop = True

    def _identity(self) -> dict[str, Any]:
        """Return what must be the same when the run is resumed: the samples, and how many are in a step."""
        digest = self.train_dataset.tokens.info.digest if isinstance(self.train_dataset, TokenRows) else None
        return {"samples_digest": digest, "rows_per_step": self._rows_per_step}

    # The step.

    def training_step(self, model: Any, inputs: Mapping[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Take a step of the engine with the last micro-batch of a step; the others wait for it, and have a loss of 0."""
        self._waiting.append(collated_tensors_of(inputs))
        loss = 0.0
        if self.accelerator.sync_gradients:
            batch, run = joined_batches(self._waiting, self._pad_id), self._opened()
            self._waiting.clear()
            rate = float(self.optimizer.param_groups[0]["lr"])
            position = {**self._identity(), **self._counted(inputs)}
            together = 0 if self._router_coefficient is None else self.args.train_batch_size  # as TRL has it
            result = run.step(batch, learning_rate=rate, position=position, router_rows=together)
            loss, self._grad_norm = result.loss, result.grad_norm
        return torch.tensor(loss, device=self.args.device, dtype=torch.float32)

    def _counted(self, inputs: Mapping[str, Any]) -> dict[str, float]:
        """Return what the loop will have counted after the micro-batch `inputs`."""
        flos, seen = self.state.total_flos + self.current_flos, self.state.num_input_tokens_seen
        if self.args.include_num_input_tokens_seen != "no":
            mask = inputs.get("attention_mask") if self.args.include_num_input_tokens_seen == "non_padding" else None
            seen += inputs["input_ids"].numel() if mask is None else int(mask.sum())
        counted = flos + float(self.floating_point_ops(dict(inputs))), seen
        return dict(zip(loop_state.COUNTED, counted, strict=True))

    def _clip_grad_norm(self, model: Any) -> float | None:
        return self._grad_norm

    def _get_grad_norm(self, model: Any, grad_norm: float | None = None) -> float | None:
        return self._grad_norm

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: TrainingArguments, model: Any = None) -> tuple[Any, Any]:
        """Return the class and the settings of the optimizer, which only says what is asked for."""
        kind, settings = Trainer.get_optimizer_cls_and_kwargs(args, model)
        return kind, {name: value for name, value in settings.items() if name != "fused"}

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Return the schedule of the learning rate: the engine's own curve where it has it."""
        schedule = schedule_of(self.args, num_training_steps)
        if self.lr_scheduler is None and schedule is not None:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, schedule.factor)
            self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)

    # Evaluation.

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return batches of held-out rows. A data set that is given now is read as the others were."""
        if eval_dataset is not None and not isinstance(eval_dataset, str) and isinstance(self.data_collator, RightPadding):
            planned = self._run.config.sequence_length if self._run is not None else None
            reading = replace(self._reading, most_tokens=planned or self._reading.most_tokens)
            eval_dataset = reading.rows(eval_dataset, "eval_dataset")
        return super().get_eval_dataloader(eval_dataset)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Return the mean loss of all trained tokens, measured by passes over as many rows as a step has.

        Where a mixture's router has a part in it, a pass has the rows of a batch.
        """
        run, samples = self._opened(), 0
        self.callback_handler.eval_dataloader = dataloader

        def batches() -> Any:
            nonlocal samples
            left, rows = iter(dataloader), self._rows_per_step
            if run.adds_router_loss:  # that of a batch is no sum over its rows
                rows = max(1, self.args.eval_batch_size)
            size = max(1, rows // max(1, self.args.eval_batch_size))
            while taken := [collated_tensors_of(batch) for batch in islice(left, size)]:
                samples += sum(len(batch["input_ids"]) for batch in taken)
                yield from slices(joined_batches(taken, self._pad_id), rows)
                for _ in taken:
                    self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)

        loss, _ = run.evaluate(batches(), recorded=metric_key_prefix == "eval")
        metrics = {f"{metric_key_prefix}_loss": loss}
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=metrics, num_samples=samples)

    compute_loss, prediction_step, predict = (
        refusing_method("compute_loss"),
        refusing_method("prediction_step"),
        refusing_method("predict"),
    )
    hyperparameter_search, push_to_hub = refusing_method("hyperparameter_search"), refusing_method("push_to_hub")

    # What is written.

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the newest model, or the best one after `load_best_model_at_end`, as an ordinary model directory."""
        out = Path(output_dir or self.args.output_dir).absolute()
        talks = isinstance(self.train_dataset, TokenRows) and self.train_dataset.are_conversations
        best = None if _internal_call else self._best
        write_model(self._opened(), out, self._own_tokenizer, best=best, conversations=talks)

    def _load_best_model(self) -> None:
        self._best = Path(self.state.best_model_checkpoint)
        logger.warning(f"load_best_model_at_end: save_model() writes {self._best}; evaluate() still reads the last step")

    def _maybe_log_save_evaluate(self, *given: Any, **more: Any) -> None:
        before = len(self.state.log_history)
        super()._maybe_log_save_evaluate(*given, **more)
        if len(self.state.log_history) != before:
            self._keep_state()

    def _keep_state(self) -> None:
        loop_state.keep_loop_state(self.state, [*self.callback_handler.callbacks, self.control], self._opened().directory)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Do nothing: each step is committed in the run directory. So it is for the next ones."""

    def _save_scaler(self, output_dir: str) -> None: ...

    def _save_rng_state(self, output_dir: str) -> None: ...

    def _load_from_checkpoint(self, *given: Any, **more: Any) -> None: ...

    def _load_scaler(self, checkpoint: Any) -> None: ...

    def _load_rng_state(self, checkpoint: Any) -> None: ...

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        if checkpoint is not None:
            loop_state.advance(self.lr_scheduler, self.state, self.args.metric_for_best_model)

    # accelerate and torch are to leave the skeleton where it is.

    def _move_model_to_device(self, model: Any, device: Any) -> None: ...

    def _build_accelerator_args(self, **given: Any) -> dict[str, Any]:
        found = super()._build_accelerator_args(**given) | {"mixed_precision": "no", "device_placement": False}
        return {name: value for name, value in found.items() if name != "dynamo_plugin"}

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns = ["input_ids", "labels", "attention_mask", "position_ids", "token_mask", "label", "label_ids"]

    def end(self) -> None:
        """End the trackers and close the engine. The run can be resumed; `headrace clean` frees its state."""
        if hasattr(super(), "end"):
            super().end()
        self.close()

    def close(self) -> None:
        """Close the engine; a second call does nothing."""
        run, self._run = self._run, None
        if run is not None:
            self._letting_go.detach()
            run.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()
