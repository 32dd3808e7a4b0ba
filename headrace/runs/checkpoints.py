"""Models that a run keeps while it goes on: when they are written, as `checkpoint-N/`, and which of them go again.

Everything follows from the step, the recorded evaluations and the directories that are there. So a resumed run writes a
checkpoint that was broken off again before its next step.
Invariant: a checkpoint is whole or not there. What others put into the run directory stays.
"""

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from headrace.ask.between_steps import BesideSteps, Keeping, Pacing
from headrace.data.batches.open_data import read_model_config
from headrace.files.durable import appearing
from headrace.files.scratch import remove_tree
from headrace.report.metrics import Record, best_of, lowest_so_far
from headrace.runs.evaluating import Evaluations
from headrace.runs.protocols import RunningEngine
from headrace.runs.signals import SaveRequest
from headrace.store.run_directory import RunDirectory
from headrace.terms.errors import ExportFailed, ModelError, RunDirectoryError
from headrace.terms.events import Notice, Sink
from headrace.terms.json_text import parse_json
from headrace.terms.options.run_options import RunOptions
from headrace.terms.provenance import PROVENANCE_NAME
from headrace.terms.saving import Saving


@dataclass(frozen=True)
class Checkpoints:
    """Which models a run keeps."""

    config: RunOptions
    evaluations: Evaluations

    @cached_property
    def saves(self) -> bool:
        """Whether models are kept during the run."""
        return self.config.saves

    def due(self, step: int) -> bool:
        """Return whether the model after `step` is kept: by the interval, else with each evaluation or epoch; and the last."""
        if not self.saves or step == 0:
            return False
        if step == self.evaluations.total_steps:
            return True
        if self.config.save_steps is not None:
            return step % self.config.save_steps == 0
        return self.evaluations.due(step) if self.config.evaluates else self.evaluations.ends_epoch(step)

    @property
    def count(self) -> int:
        """How many models the whole run keeps, besides those asked for and the best."""
        total, every = self.evaluations.total_steps, self.config.save_steps
        if every is not None:
            return -(-total // every)
        return self.evaluations.count if self.config.evaluates else self.evaluations.epochs

    def between_steps(self) -> list[BesideSteps]:
        """Return what the run does besides its steps, for its plan."""
        keeping = [keeping_of(self.config, self.count)] if self.saves else []
        pacing = Pacing.asked(self.config.max_write_per_day)
        return [each for each in (self.evaluations.asked(), *keeping, *pacing) if each is not None]

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


@dataclass
class CheckpointWriter:
    """Keeps models of `engine` in the run's directory; `close` it after the last step.

    `evaluations` are the records so far; `request` says whether somebody asks for one now. `begin` begins to write the newest
    model into a directory, which appears whole. At most one is `under_way`, while the next step is.
    """

    plan: Checkpoints
    engine: RunningEngine
    directory: RunDirectory
    evaluations: Sequence[Record]
    sink: Sink
    request: SaveRequest
    begin: Callable[[Path], Saving]
    under_way: tuple[Path, Saving] | None = None

    def keep_if_due(self) -> None:
        """Keep the newest model if that is due, or asked for, or if it is the best one; those that it supersedes go once it is
        whole.

        A checkpoint that cannot be written is reported, and training goes on: the state is as it was.

        Raises:
            StepFailed: a lane failed; the last committed step is untouched.
            ExportFailed: the best model cannot be written, which the run is to end with.
        """
        if self.under_way is not None and self.under_way[1].done:
            self.close()
        step = self.engine.step_index
        if step == 0 or not (self._is_asked() or self._is_best(step) or self.plan.due(step) or self._is_over()):
            return
        self.close()
        kept = self.directory.checkpoint(step)
        with self._reported(kept):
            if provenance_of(kept) != self.engine.provenance:
                self.under_way = kept, self.begin(kept)
                if self.under_way[1].done:
                    self.close()
            else:
                self._remove_superseded()

    def close(self) -> None:
        """Wait for the checkpoint that is under way. Raises as `keep_if_due`."""
        if self.under_way is None:
            return
        (kept, saving), self.under_way = self.under_way, None
        with self._reported(kept):
            saving.wait()
            self.sink(Notice(text=f"model kept: {kept}", level="info"))
            self._remove_superseded()

    @contextmanager
    def _reported(self, kept: Path) -> Iterator[None]:
        """Report that a checkpoint cannot be written; raise it, if the run is to end with this one."""
        try:
            yield
        except (ExportFailed, RunDirectoryError) as error:
            if self._is_best(int(kept.name.rpartition("-")[2])):
                words = f"{error}. All steps are committed: `headrace resume {self.directory.path}` goes on"
                raise ExportFailed(words) from error
            self.sink(Notice(text=f"{kept.name} was not written, and training goes on: {error}"))

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

    def _is_over(self) -> bool:
        """Return whether the run stops early, and its last model is kept."""
        return self.plan.saves and self.plan.evaluations.over(self.evaluations)

    def _remove_superseded(self) -> None:
        remove_superseded(self.directory, self.engine.provenance["run_id"], self.plan, self.evaluations)


def keeping_of(options: RunOptions, times: int | None = None) -> Keeping:
    """Return the models that a run keeps, for its plan. Without `times`, the steps say how many, where they are known."""
    if times is None and options.save_steps is not None and options.max_steps is not None:
        times = -(-options.max_steps // options.save_steps)
    with suppress(ModelError):
        values = read_model_config(options.model)
        return Keeping(times=times, weight_bytes=4 if "float32" in (values.get("dtype"), values.get("torch_dtype")) else 2)
    return Keeping(times=times)


def provenance_of(model: Path) -> object:
    """Return what the model in a directory says it is; None if there is none, or it says nothing."""
    try:
        return parse_json((model / PROVENANCE_NAME).read_text(encoding="utf-8"))
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
