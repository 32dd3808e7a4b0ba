"""What lies where in a run directory, and when a directory may become one.

    config.yaml          every option as it was resolved
    chat_template.jinja  the chat template that was given in place of the tokenizer's
    metrics.jsonl        one line for each step, and one for each evaluation
    completions.jsonl    what the model wrote, where a reward function logs columns
    trainer_state.json   the same in Hugging Face's form
    plan.json            the plan that the engine ran inside
    summary.json         planned beside measured figures, after the last step
    lanes.jsonl          what each lane did, one line for each step
    timeline.json        the operations of the last two steps
    report.html          on request: `headrace report`
    tensorboard/, trace.json    on request
    checkpoint-N/        the model after step N (save_steps, load_best_model_at_end, or on request)
    save                 somebody makes this file to ask for a checkpoint-N; it goes
    final/               the finished model, an ordinary Hugging Face directory

The engine keeps its records beside these. Invariant: a directory that contains anything is never taken for a new run.
"""

import contextlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.files.durable import no_link, write_new, write_whole
from headrace.files.model_directory import CHAT_TEMPLATE_NAME
from headrace.files.yaml_options import from_yaml, to_yaml
from headrace.plan.value.results import PLAN_NAME
from headrace.terms.errors import HeadraceError, InputError, RunDirectoryError, StorageError, unwritten
from headrace.terms.options.run_options import RunOptions


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The paths in the run directory `path`."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved options."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """The record of steps."""
        return self.path / "metrics.jsonl"

    @property
    def trainer_state(self) -> Path:
        """The record of steps in Hugging Face's form."""
        return self.path / "trainer_state.json"

    @property
    def plan(self) -> Path:
        """The plan that the engine ran inside."""
        return self.path / PLAN_NAME

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's event files."""
        return self.path / "tensorboard"

    @property
    def final(self) -> Path:
        """The finished model."""
        return self.path / "final"

    @property
    def save_request(self) -> Path:
        """The file with which somebody asks for a checkpoint."""
        return self.path / "save"

    def checkpoint(self, step: int) -> Path:
        """The model after `step`, where a run keeps it."""
        return self.path / f"checkpoint-{step}"

    def checkpoints(self) -> dict[int, Path]:
        """Return the models that are kept, by step."""
        found = (re.fullmatch(r"checkpoint-([0-9]+)", path.name) for path in self.path.iterdir() if path.is_dir())
        return {int(name[1]): self.path / name[0] for name in found if name}

    @property
    def chat_template(self) -> Path:
        """The chat template that was given in place of the tokenizer's."""
        return self.path / CHAT_TEMPLATE_NAME

    def trace(self, done_steps: int) -> Path:
        """The timeline; a resumed run writes another file and leaves the first."""
        return self.path / ("trace.json" if done_steps == 0 else f"trace-from-step-{done_steps}.json")

    def check_new(self) -> None:
        """Raise RunDirectoryError unless the directory is missing or empty."""
        if self.path.exists() and not self.path.is_dir():
            raise RunDirectoryError(f"output: {self.path} is a file; name a directory that does not exist yet")
        if self.path.is_dir() and any(self.path.iterdir()):
            found = f"a run{self._of_model()}" if self.config.exists() else "other files"
            advice = f"`headrace resume {self.path}` resumes it, or " if self.config.exists() else ""
            raise RunDirectoryError(
                f"output: {self.path} exists and holds {found}; {advice}name another directory with --output"
            )

    def _of_model(self) -> str:
        try:
            return f" of {self.read_config().model}"
        except InputError:
            return ""  # written by another version, or damaged, but still a run

    def read_config(self) -> RunOptions:
        """Return the options of the run.

        Raises:
            RunDirectoryError: the directory is missing, or no run.
        """
        if not self.path.is_dir():
            raise RunDirectoryError(f"{self.path}: no such directory; give the directory that `headrace train` wrote")
        if not self.config.exists():
            raise RunDirectoryError(
                f"{self.path}: no run ({self.config.name} is missing); give a directory that `headrace train` wrote"
            )
        return from_yaml(self.config)

    def write_config(self, config: RunOptions) -> tuple[Path, ...]:
        """Make the directory, write the options, and return the directories that had to be made, the innermost first.

        Raises:
            RunDirectoryError: the directory cannot be made or written to, or another run has taken it since `check_new`.
        """
        self.check_new()
        made = tuple(path for path in (self.path, *self.path.parents) if not path.exists())
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if config.chat_template is not None:
                shutil.copyfile(config.chat_template, self.chat_template)
                config = replace(config, chat_template=self.chat_template)
            write_new(self.config, to_yaml(config))
        except FileExistsError:
            self.check_new()
            raise
        except OSError as error:
            self._remove(made)
            raise RunDirectoryError(
                f"output: {self.path} cannot be written ({error.strerror}); name another directory with --output"
            ) from error
        return made

    def write_plan(self, values: Mapping[str, Any]) -> None:
        """Write the plan's plain values, for `headrace report`."""
        with self.writing():
            write_whole(self.plan, json.dumps(values) + "\n")

    def write_machine(self, values: Mapping[str, Any]) -> None:
        """Write the ceilings for which the plan was made, for `headrace report`."""
        with self.writing():
            write_whole(self.path / "machine.json", json.dumps(values) + "\n")

    def write_summary(self, values: Mapping[str, Any]) -> None:
        """Write planned beside measured figures, for scripts and for `headrace report --json`."""
        with self.writing():
            write_whole(no_link(self.path / "summary.json"), json.dumps(values, indent=2) + "\n")

    def add_to_summary(self, values: Mapping[str, Any]) -> None:
        """Add to what `write_summary` wrote; a run that has not written it gets nothing."""
        with contextlib.suppress(FileNotFoundError):
            summary = json.loads((self.path / "summary.json").read_text(encoding="utf-8"))
            self.write_summary({**summary, **values})

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turn the system's refusal to write a file of the run into `unwritable`."""
        try:
            yield
        except OSError as error:
            raise error if isinstance(error, HeadraceError) else self.unwritable(error) from error

    def unwritable(self, error: OSError) -> StorageError:
        """Return the error for a run whose own files (not its state) could not be written."""
        then = f"resume with: headrace resume {self.path}"
        return unwritten(error.filename or self.path, error, then, safe="the last committed step is safe: ")

    def forget(self, made: Sequence[Path]) -> None:
        """Undo `write_config`, which returned `made`, after the run could not be started. Nothing else is touched: if there is
        more than the options, another process has begun the run with them.
        """
        with contextlib.suppress(OSError):
            if {path.name for path in self.path.iterdir()} <= {self.config.name, self.chat_template.name}:
                self.config.unlink()
                self.chat_template.unlink(missing_ok=True)
                self._remove(made)

    @staticmethod
    def _remove(made: Sequence[Path]) -> None:
        with contextlib.suppress(OSError):
            for directory in made:
                directory.rmdir()
