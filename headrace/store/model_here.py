"""What is at a path that a command is given: a model, an adapter and its model, both in one directory, or a run.

Invariant: all commands see the same there. What an adapter brings goes before its model's: template, tokenizer, settings of
generation. Weights that lie there act, or are refused; none is passed over in silence.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from headrace.files.model_directory import (
    ADAPTER_CONFIG,
    GENERATION_CONFIG,
    has_adapter,
    has_vocabulary,
    is_adapter_directory,
    is_whole_model,
    named_base,
    refuse_no_model,
    template_in,
)
from headrace.store.manifest import MANIFEST_NAME
from headrace.store.run_directory import RunDirectory
from headrace.terms.errors import ConfigError, InputError, ModelError, RunDirectoryError
from headrace.terms.options.run_options import RunOptions


class Kind(StrEnum):
    """What gives the weights: a model's files, these and an adapter's beside them, or the last commit of a run."""

    MODEL, ADAPTER, RUN = "model", "adapter", "run"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelHere:
    """A model on this machine. `directory` has its weights and configuration; of kind RUN it is the run's.

    `tokenizer` and `generation_config` are the directories whose files count. `template`: the file with the chat template, None
    where it is the tokenizer's. A run has a `template_date`, the day for templates that ask for it, and a `border`, its
    rule for tokens of prompt and completion.
    """

    directory: Path
    kind: Kind
    adapter: Path | None = None
    template: Path | None = None
    tokenizer: Path
    generation_config: Path
    template_date: str | None = None
    border: str | None = None
    notes: tuple[str, ...] = ()


def model_at(place: Path, adapter: Path | None = None) -> ModelHere:
    """Return what is at `place`: a directory, or a run, of which the finished model counts, or else the last commit. With an
    `adapter`, it is that beside the model.

    Raises:
        ModelError: there is no model, or an adapter whose model is not here.
        ConfigError: there would be two adapters.
        RunDirectoryError: the run has committed nothing yet.
    """
    run = RunDirectory(place)
    if not run.config.exists():
        return directory_at(place, adapter)
    options = options_of(run)
    if options is None:
        day = template = border = None
    else:
        day, template, border = options.template_date, options.chat_template, options.border
    if adapter is not None or run.final.is_dir():
        return replace(directory_at(run.final, adapter), template_date=day, border=border)
    if not (place / MANIFEST_NAME).exists():
        raise RunDirectoryError(f"{place}: the run has committed nothing yet; `headrace resume {place}` resumes it")
    return ModelHere(
        directory=place,
        kind=Kind.RUN,
        template=template,
        tokenizer=place,
        generation_config=place,
        template_date=day,
        border=border,
    )


def directory_at(directory: Path, adapter: Path | None = None) -> ModelHere:
    """Return what is in a directory, and with an `adapter` that beside it.

    Raises:
        ModelError, ConfigError: as `model_at`.
    """
    if adapter is not None and (is_adapter_directory(directory) or has_adapter(directory)):
        raise ConfigError(f"adapter: {directory} is an adapter itself; give the model directory that both are of")
    base = directory
    if is_adapter_directory(directory):
        base, adapter = named_base(directory), directory
        if has_adapter(base):
            raise ModelError(f"model: {base}, of which {directory} is an adapter, has one beside its weights: {_MERGE}")
    elif has_adapter(directory):
        adapter = directory
    else:
        refuse_no_model(directory)
    notes = lone_configuration(base)
    kind = Kind.MODEL if adapter is None else Kind.ADAPTER
    if adapter is None or adapter == base:
        return ModelHere(directory=base, kind=kind, adapter=adapter, tokenizer=base, generation_config=base, notes=notes)
    return ModelHere(
        directory=base,
        kind=kind,
        adapter=adapter,
        template=template_in(adapter),
        tokenizer=adapter if has_vocabulary(adapter) else base,
        generation_config=adapter if (adapter / GENERATION_CONFIG).exists() else base,
        notes=notes,
    )


def whole_model_at(directory: Path) -> ModelHere:
    """Return the model in a directory, for those who change or train all that it computes.

    Raises:
        ModelError: there is none, or an adapter acts beside it.
    """
    refuse_no_model(directory)
    if has_adapter(directory):
        raise ModelError(f"model: {directory}: holds a model and an adapter, which acts beside it: {_MERGE}")
    return directory_at(directory)


def lone_configuration(directory: Path) -> tuple[str, ...]:
    """Return a note on an adapter's configuration beside a whole model, without the adapter's weights; else nothing."""
    if not ((directory / ADAPTER_CONFIG).is_file() and is_whole_model(directory)):
        return ()
    return (f"{directory}: {ADAPTER_CONFIG} has no adapter's weights beside it; the model is taken as it is",)


def options_of(run: RunDirectory) -> RunOptions | None:
    """Return the options of a run; None where a program began it, or another version, whose options cannot be read."""
    try:
        return run.read_config()
    except InputError:
        return None


_MERGE = "merge them (merge_and_unload of PEFT), or keep them in directories of their own, and give the one that you mean"
