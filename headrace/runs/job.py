"""The job of a run: options as they are given become options as they are decided, and what is here for them.

Whatever a run asks of a path, a plan or data is asked here, once, and whoever works on the run takes the job.
Invariant: after `resolve` every choice is explicit and every path absolute, so `config.yaml` alone repeats the run.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.data.batches.batches import Batches
from headrace.data.batches.open_data import lengths_of, note_of_epochs, read_chat_template, total_steps
from headrace.data.batches.prompt_batches import PromptBatches
from headrace.files.model_directory import template_in
from headrace.plan.search.given import lengths_in_plan
from headrace.report.metrics import read_metrics
from headrace.runs.measuring import MachineHere
from headrace.runs.open_rows import halved, open_rows
from headrace.runs.protocols import Engines, StateKind
from headrace.runs.rewards import reward_of
from headrace.runs.rollouts import rewards_of
from headrace.store.model_here import ModelHere, whole_model_at
from headrace.store.run_directory import RunDirectory
from headrace.store.run_folders import check_directories
from headrace.terms.errors import ConfigError, RunDirectoryError
from headrace.terms.events import Event
from headrace.terms.options.adapter import Lora, adapter_of
from headrace.terms.options.border import usual_border
from headrace.terms.options.contradictions import refuse_evaluation_of_nothing
from headrace.terms.options.data_source import DataSource, source_of
from headrace.terms.options.preferences import takes_rewards
from headrace.terms.options.run_options import NodeOptions, RunOptions
from headrace.update.combinations import refuse_combination
from headrace.update.wires.going_on import going_on

_NAME_BYTES = 143  # the longest name in an encrypted home directory; elsewhere 255 bytes are allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run that is decided. `rows` are its batches, at the first row; `machine` is what is known of this one; `left` is what
    an earlier process left of its state.

    `steps` are those of the whole run, `engines` make its engine, and `notes` are for a person.
    """

    options: RunOptions
    directory: RunDirectory
    rows: Batches
    machine: MachineHere
    steps: int
    left: StateKind
    engines: Engines
    notes: tuple[str, ...]


def resolve(options: RunOptions, engines: Engines | None = None) -> Job:
    """Return the job of a new run, whose directory is still untouched. What `config.json` tells is refused before the model
    library is imported.

    Raises:
        InputError: the run directory is taken, there is no model, an SSD directory is unfit, or the model, the tokenizer, the
            data or an option cannot be used.
    """
    directory = directory_of(options)
    directory.check_new()
    refuse_evaluation_of_nothing(options)
    refuse_combination(options, at_node=isinstance(options, NodeOptions) and options.local_steps is None)
    model = whole_model_at(options.model)
    lengths = lengths_of(model.directory, *lengths_in_plan(options.plan, options.tokens_per_step, options.sequence_length))
    adapter = going_on(options.adapter)
    template = options.chat_template or _template_of_adapter(adapter, model)
    ssd = options.budget.ssd
    if ssd:
        # The engine checks again, with the space that it needs; but nobody should tokenise for an hour to hear about a misspelt
        # path.
        check_directories(ssd, [0] * len(ssd), allow_in_memory=False, sink=_said_later)
    engines = engines or _own_engines()
    # Always asked: it looks at the architecture and the weight files, which is quicker than tokenising.
    reason = engines.why_not_packed(model.directory, lengths["sequence_length"])
    if options.packing and reason:
        raise ConfigError(
            f"packing: {options.model.name} cannot keep several samples of one row of {lengths['sequence_length']} tokens "
            f"apart: {reason}; leave packing out or set it to false"
        )
    chosen: dict[str, Any] = {
        "adapter": adapter,
        "packing": not reason and options.packing is not False and options.loss is None,
        "border": options.border or usual_border(options.loss),
        "output": directory.path,
        "ssd": tuple(path.absolute() for path in ssd),
        **_absolute_paths(options, template),
    }
    decided = replace(options, **lengths, **chosen)
    for text in decided.reward:
        reward_of(text)
    if takes_rewards(decided.loss):
        decided = halved(decided)
    rows = open_rows(decided)
    if isinstance(rows, PromptBatches):
        rewards_of(decided, rows).close()  # also refuses what they take and nothing gives
    steps = total_steps(decided.max_steps, decided.epochs, rows)
    note = note_of_epochs(decided.epochs, steps, rows) if decided.max_steps is None else ""
    return Job(
        options=replace(decided, max_steps=steps, template_date=rows.spec.template_date),
        directory=directory,
        rows=rows,
        machine=MachineHere.of(decided, chosen["ssd"] or (directory.path,)),
        steps=steps,
        left=StateKind.NONE,
        engines=engines,
        notes=(*rows.notices, *([note] if note else [])),
    )


def resolve_begun(directory: RunDirectory, engines: Engines | None = None) -> Job:
    """Return the job of a run that was begun.

    Raises:
        RunDirectoryError: there is no run, it is finished, or its state is gone.
        DataError: the data is not that with which the run began.
    """
    engines = engines or _own_engines()
    options, left = directory.read_config(), engines.state_of(directory.path)
    if left is StateKind.NONE and directory.final.exists():
        engines.discard(directory.path)  # killed while it removed its state: nothing else would free the space
        raise RunDirectoryError(f"{directory.path}: the run is finished; its model is in {directory.final}")
    if left is not StateKind.COMMITTED and (done := len(read_metrics(directory.metrics))):
        raise RunDirectoryError(
            f"{directory.path}: the run had taken {done} steps, but its state is gone (for example by headrace clean "
            "--unfinished); start a new run"
        )
    rows = open_rows(options, resumed=True)
    if options.max_steps is None:
        raise RunDirectoryError(f"{directory.config}: max_steps is missing; restore the file as the run wrote it")
    return Job(
        options=options,
        directory=directory,
        rows=rows,
        machine=MachineHere.of(options, options.budget.ssd or (directory.path,)),
        steps=options.max_steps,
        left=left,
        engines=engines,
        notes=tuple(rows.notices),
    )


def _own_engines() -> Engines:
    # Late, because it imports the model library and the kernels' compiler; bad options should be refused before that.
    from headrace.runs.engines import headrace_engines

    return headrace_engines()


def _template_of_adapter(asked: str | None, model: ModelHere) -> Path | None:
    """Return the chat template beside the adapter that a run goes on from; None where it is the model's own, or none."""
    adapter = adapter_of(asked) if asked is not None else None
    if not isinstance(adapter, Lora) or adapter.from_ is None:
        return None
    own, base = (template_in(place) for place in (Path(adapter.from_), model.directory))
    alike = own is None or (base is not None and read_chat_template(own) == read_chat_template(base))
    return None if alike else own


def directory_of(config: RunOptions) -> RunDirectory:
    """Return the directory of a run: that which it names, or the usual one."""
    return RunDirectory(Path(config.output or default_output(config)).absolute())


def default_output(config: RunOptions) -> Path:
    """Return `runs/<model>-<data>`, cut to a name that every file system accepts."""
    name = os.fsencode(f"{config.model.absolute().name}-{Path(source_of(config.data[0]).path).stem}")
    return Path("runs") / (os.fsdecode(name) if len(name) <= _NAME_BYTES else name[:_NAME_BYTES].decode(errors="ignore"))


def _absolute_paths(config: RunOptions, template: Path | None) -> dict[str, Any]:
    return {
        "model": config.model.absolute(),
        "data": tuple(map(absolute, config.data)),
        "eval_data": tuple(map(absolute, config.eval_data)),
        "cache": config.cache.absolute(),
        "reward": tuple(map(_absolute_function, config.reward)),
        "chat_template": template and template.absolute(),
        "plan": config.plan and Path(config.plan).absolute(),
    }


def _absolute_function(text: str) -> str:
    path, colon, name = text.rpartition(":")
    return f"{Path(path).absolute()}{colon}{name}"


def absolute(entry: str | DataSource) -> str | DataSource:
    """Return an entry of the data with its path absolute. A name that is no path here may be a data set of the Hub."""
    if isinstance(entry, DataSource):
        return replace(entry, path=str(absolute(entry.path)))
    return str(Path(entry).absolute()) if Path(entry).exists() else entry


def _said_later(event: Event) -> None:
    """Drop the event: the engine's own check says the same when it makes the state."""
