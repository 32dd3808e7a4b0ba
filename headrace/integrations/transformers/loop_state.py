"""Where transformers' loop stands in a run, and how it goes on there.

`trainer_state.json` has the logs and the state of callbacks; the engine's newest commit says which step is the last.
Invariant: what the file says of later steps is cut before the loop reads it, because those steps are taken again.
"""

import contextlib
import gc
import json
import os
import time
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import DefaultFlowCallback, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import ExportableState

from headrace.files.durable import write_whole
from headrace.integrations.transformers.engine_run import EngineRun, Say
from headrace.runs.engines import discard, state_of
from headrace.runs.protocols import RunningEngine, StateKind
from headrace.store.lock import lock_holder
from headrace.store.run_directory import RunDirectory
from headrace.terms.errors import ConfigError, DataError, RunDirectoryError
from headrace.terms.options.border import Border, border_of
from headrace.terms.options.run_options import RunOptions

# Options that decide the state of a run, or its bits. A step is told its learning rate, so schedules may change.
_KEPT = (
    "optimizer",
    "weight_decay",
    "parameter_groups",
    "adapter",
    "max_grad_norm",
    "compute_dtype",
    "seed",
    "router_aux_loss_coef",
)

# What the loop has counted up to a step.
COUNTED = ("total_flos", "num_input_tokens_seen")


def check_asked(asked: str | bool, output: Path) -> None:
    """Refuse to resume from anything but the newest commit of the run in `output`.

    Raises:
        ConfigError: a checkpoint of another step is asked for, or of another run.
    """
    if asked is True:
        return
    path = Path(str(asked)).absolute()
    if path.resolve() in (output.resolve(), _newest(output)):
        return
    raise ConfigError(
        f"resume_from_checkpoint: {asked} is not the newest step of the run in {output}; True goes on after that. To begin at "
        "an older checkpoint, give it as model, with another output_dir"
    )


def _newest(output: Path) -> Path | None:
    """Return the checkpoint of the newest step that the logs know, if it is kept."""
    try:
        steps = json.loads((output / "trainer_state.json").read_text(encoding="utf-8"))["global_step"]
    except (OSError, ValueError, KeyError):
        return None
    found = RunDirectory(output).checkpoints()
    return found[steps].resolve() if steps in found and max(found) == steps else None


def resumed(output: Path, say: Say) -> EngineRun | None:
    """Return the run in `output` at its newest commit; None if it was killed before the first, and begins again.

    A trainer of this process that nothing holds any more lets its run go first.

    Raises:
        RunDirectoryError: there is no run, or it cannot be resumed.
    """
    gc.collect()  # trainers and their callbacks hold one another
    if lock_holder(output) == os.getpid():
        raise RunDirectoryError(
            f"resume_from_checkpoint: another HeadraceTrainer of this process has the run in {output}; call its trainer.end() "
            "first, or delete what holds it"
        )
    kind = state_of(output)
    if kind is StateKind.COMMITTED:
        return EngineRun.resume(output, say)
    directory = RunDirectory(output)
    if not directory.config.exists():
        raise RunDirectoryError(f"resume_from_checkpoint: {output} holds no run; leave it out to begin one")
    if directory.metrics.exists():
        raise RunDirectoryError(f"resume_from_checkpoint: the state of the run in {output} is gone; begin another one")
    discard(output)
    return None


def cut_to_commit(output: Path, engine: RunningEngine) -> None:
    """Let `trainer_state.json` end with the newest commit."""
    step, path = engine.step_index, RunDirectory(output).trainer_state
    state = TrainerState()
    with contextlib.suppress(OSError, ValueError, TypeError):
        state = TrainerState.load_from_json(str(path))
    state.log_history = [entry for entry in state.log_history if entry.get("step", 0) <= step]
    state.global_step = step
    for name in COUNTED:
        setattr(state, name, (engine.position or {}).get(name, getattr(state, name)))
    write_whole(path, json.dumps(vars(state), indent=2, sort_keys=True) + "\n")


def keep_loop_state(state: TrainerState, callbacks: Iterable[Any], directory: RunDirectory) -> None:
    """Write the loop's state, with that of the callbacks which have one."""
    kept: dict[str, Any] = {}
    for each in callbacks:
        if isinstance(each, ExportableState):
            name, own = type(each).__name__, each.state()
            if name in kept:  # several of one kind
                kept[name] = [*(kept[name] if isinstance(kept[name], list) else [kept[name]]), own]
            else:
                kept[name] = own
    state.stateful_callbacks = kept
    with directory.writing():
        write_whole(directory.trainer_state, json.dumps(vars(state), indent=2, sort_keys=True) + "\n")


def refuse_another_state(run: EngineRun, asked: RunOptions, identity: dict[str, Any]) -> None:
    """Refuse to go on with other data, or with options that the state was not made with.

    Raises:
        DataError: the samples differ, or the number of rows in a step.
        ConfigError: an option differs.
    """
    begun = run.engine.position or {}
    for name, now in identity.items():
        if name in begun and begun[name] != now:
            raise DataError(
                f"resume_from_checkpoint: {name} was {begun[name]}, now it is {now}; give the data and batch sizes "
                "that the run began with"
            )
    for name in _KEPT:
        if (then := getattr(run.config, name)) != (now := getattr(asked, name)):
            raise ConfigError(f"resume_from_checkpoint: {name} was {then}, now it is {now}; a run keeps it")


def advance(scheduler: Any, state: TrainerState, metric: str | None) -> None:
    """Bring a new schedule to where it was after the steps and evaluations of `state`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no optimizer has stepped
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            name = metric if str(metric).startswith("eval_") else f"eval_{metric}"
            for entry in state.log_history:
                if name in entry:
                    scheduler.step(entry[name])
        else:
            for _ in range(state.global_step):
                scheduler.step()


def day_of(output: Path) -> str | None:
    """Return the day that the chat template of a run in `output` was told; None if there is none."""
    directory = RunDirectory(output.absolute())
    return directory.read_config().template_date if directory.config.exists() else None


def border_of_run(output: Path) -> Border | None:
    """Return the rule by which a run in `output` parts prompts and completions; None if there is none."""
    directory = RunDirectory(output.absolute())
    return border_of(directory.read_config().border, None) if directory.config.exists() else None


class GoOn(TrainerCallback):  # type: ignore[misc]
    """Goes on within what a killed process had begun: averages of logs, an evaluation, a checkpoint."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Do what was broken off."""
        trainer, step = self._trainer, state.global_step
        if step == 0:
            return
        state.epoch, ended = trainer.epoch_after(step)
        logged = max((entry["step"] for entry in state.log_history if "loss" in entry), default=0)
        for record in trainer.records:
            if logged < record["step"] <= step and record["loss"] is not None:
                trainer._tr_loss += record["loss"]
        trainer._globalstep_last_logged = logged
        flags, flow = TrainerControl(), DefaultFlowCallback()
        flow.on_step_end(args, state, flags)
        if ended:
            flow.on_epoch_end(args, state, flags)
        scores = [entry for entry in state.log_history if entry.get("step") == step and "eval_" in "".join(entry)]
        sets = len(trainer.eval_dataset) if isinstance(trainer.eval_dataset, Mapping) else 1
        if flags.should_evaluate and len(scores) < sets:
            state.log_history = [entry for entry in state.log_history if entry not in scores]
            control.should_evaluate = True
        control.should_log = flags.should_log and logged < step
        control.should_save = flags.should_save and not (Path(args.output_dir) / f"checkpoint-{step}").exists()
        last = trainer.records[-1] if trainer.records else {}
        of_step = trainer._tr_loss, last.get("grad_norm"), trainer.model
        trainer._maybe_log_save_evaluate(*of_step, None, state.epoch, None, time.time(), learning_rate=last.get("lr"))
