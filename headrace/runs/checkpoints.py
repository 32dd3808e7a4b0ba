"""Models that a run keeps while it goes on: when they are written, as `checkpoint-N/`, and which of them go again.

Everything follows from the step, the recorded evaluations and the directories that are there. So a resumed run writes a
checkpoint that was broken off again before its next step.
Invariant: a checkpoint is whole or not there. What others put into the run directory stays.
"""

import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.files.durable import appearing
from headrace.files.scratch import remove_tree
from headrace.report.metrics import Record, best_of, lowest_so_far
from headrace.runs.evaluating import Evaluations
from headrace.runs.protocols import RunningEngine
from headrace.runs.signals import SaveRequest
from headrace.store.run_directory import RunDirectory
from headrace.terms.errors import ExportFailed, RunDirectoryError
from headrace.terms.events import Notice, Sink
from headrace.terms.provenance import PROVENANCE_NAME
from headrace.terms.run_options import RunOptions


@dataclass(frozen=True)
class Checkpoints:
    """Which models a run keeps."""

    config: RunOptions
    evaluations: Evaluations

    def due(self, step: int) -> bool:
        """Return whether the model after `step` is kept: by the interval, else with each evaluation or epoch; and the last."""
        if not self.config.saves or step == 0:
            return False
        if step == self.evaluations.total_steps:
            return True
        if self.config.save_steps is not None:
            return step % self.config.save_steps == 0
        return self.evaluations.due(step) if self.config.evaluates else self.evaluations.ends_epoch(step)

    def superseded(self, kept: Collection[int], evaluations: Sequence[Record]) -> set[int]:
        """Return the steps of those `kept` models that go: once the best ones, and those beyond the limit. The best stays."""
        best = best_of(evaluations)
        once_best = {record["step"] for record in lowest_so_far(evaluations) if record is not best}
        going = {step for step in once_best if self.config.load_best_model_at_end and not self.due(step)} & {*kept}
        left, limit = sorted({*kept} - going), self.config.save_total_limit
        if limit is None:
            return going
        spared = best_of(record for record in evaluations if record["step"] in left)
        newest = {*left[-limit:]}
        if spared is not None and spared["step"] not in newest:
            newest = {spared["step"], *left[-max(1, limit - 1) :]}
        return going | ({*left} - newest)


@dataclass(frozen=True)
class CheckpointWriter:
    """Keeps models of `engine` in the run's directory, between steps.

    `evaluations` are the records so far; `request` says whether somebody asks for one now. `write` writes the newest model
    into a directory, which appears whole.
    """

    plan: Checkpoints
    engine: RunningEngine
    directory: RunDirectory
    evaluations: Sequence[Record]
    sink: Sink
    request: SaveRequest
    write: Callable[[Path], None]

    def keep_if_due(self) -> None:
        """Keep the newest model if that is due, or asked for, or if it is the best one; then remove those that it supersedes.

        A checkpoint that cannot be written is reported, and training goes on: the state is as it was.

        Raises:
            StepFailed: a lane failed; the last committed step is untouched.
            ExportFailed: the best model cannot be written, which the run is to end with.
        """
        step = self.engine.step_index
        if step == 0:
            return
        asked = self._is_asked()
        kept, is_best = self.directory.checkpoint(step), self._is_best(step)
        if is_best or asked or self.plan.due(step) or (self.plan.evaluations.over(self.evaluations) and self.plan.config.saves):
            if provenance_of(kept) != self.engine.provenance:
                try:
                    self.write(kept)
                except (ExportFailed, RunDirectoryError) as error:
                    if is_best:
                        raise
                    self.sink(Notice(text=f"{kept.name} was not written, and training goes on: {error}"))
                    return
            if asked:
                self.sink(Notice(text=f"saved on request: {kept}", level="info"))
            remove_superseded(self.directory, self.engine.provenance["run_id"], self.plan, self.evaluations)

    def _is_asked(self) -> bool:
        """Return whether somebody asked for a checkpoint, by signal or file; the request is taken."""
        asked, self.request.received = self.request.received, False
        try:
            self.directory.save_request.unlink()
        except OSError:
            return asked
        return True

    def _is_best(self, step: int) -> bool:
        best = best_of(self.evaluations) if self.plan.config.load_best_model_at_end else None
        return best is not None and best["step"] == step


def provenance_of(model: Path) -> object:
    """Return what the model in a directory says it is; None if there is none, or it says nothing."""
    try:
        return json.loads((model / PROVENANCE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def remove_superseded(directory: RunDirectory, run_id: str, plan: Checkpoints, evaluations: Sequence[Record]) -> None:
    """Remove those models of run `run_id` that are not kept any longer; what others put there stays. Each takes another name
    first: a checkpoint is whole or not there.
    """
    found = {step: provenance_of(path) for step, path in directory.checkpoints().items()}
    own = {step for step, values in found.items() if isinstance(values, dict) and values.get("run_id") == run_id}
    for step in plan.superseded(own, evaluations):
        path = directory.checkpoint(step)
        path.rename(path.with_name(f".{path.name}.removed"))
    for path in directory.path.glob(".checkpoint-*.removed"):
        remove_tree(path)


def link_model(kept: Path, out: Path, notes: Mapping[str, str]) -> None:
    """Make `out` the same model as `kept`, with `notes` as files. Weights are the same files where the file system has links.

    Raises:
        OSError: it cannot be made.
    """
    with appearing(out) as partial:
        shutil.copytree(kept, partial, copy_function=_link_weights, dirs_exist_ok=True)
        for name, text in notes.items():
            (partial / name).write_text(text, encoding="utf-8")


def _link_weights(source: str, target: str) -> None:
    if source.endswith(".safetensors"):
        try:
            os.link(source, target)
            return
        except OSError:
            pass  # a file system without links
    shutil.copyfile(source, target)
