"""Whether a command that is given again names the run that lies in its `output`: then it goes on."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from headrace.store.run_directory import RunDirectory
from headrace.terms.errors import ConfigError, PeerLost, RunDirectoryError, StepFailed
from headrace.terms.options.border import APART
from headrace.terms.options.data_source import DataSource, source_of
from headrace.terms.options.options import Options
from headrace.terms.options.run_options import RunOptions

_Found = TypeVar("_Found")

# Options that belong to each process: where things lie on its machine, and how much of it may be used.
WORKERS_OWN = frozenset({"ssd", "host_memory", "device_memory", "machine"})


def refuse_another_run(directory: RunDirectory, config: RunOptions) -> None:
    """Refuse to take another run for this one, or to resume it under options that would be ignored.

    Raises:
        RunDirectoryError: `output` holds a run of another model or other data, or one that began with other options.
    """
    found = directory.read_config()
    if found.model != config.model.absolute():
        raise RunDirectoryError(f"output: {directory.path} holds a run of {found.model}; name another directory with --output")
    keys = (*(key for key in Options.fixed_keys() if key not in ("machine", "max_steps")), "max_steps")
    pairs: list[tuple[str, Any, Any]] = [(key, getattr(config, key), getattr(found, key)) for key in keys]
    for key in ("data", "eval_data"):  # also files that are gone by now
        here, there = ([_lying_at(entry) for entry in getattr(each, key)] for each in (config, found))
        pairs.append((key, here, there))
    pairs.append(("eval_split", config.eval_split, found.eval_split))
    pairs.append(("border", config.border, found.border or APART))
    if found.template_date is not None:  # else no template asks
        pairs.append(("template_date", config.template_date, found.template_date))
    others = [f"{key} {now} here, {then} there" for key, now, then in pairs if now is not None and now != then]
    if others:
        raise RunDirectoryError(
            f"output: {directory.path} holds a run that began otherwise: {'; '.join(others)}; resume it with `headrace "
            f"resume {directory.path}`, or name another directory with --output"
        )


def _lying_at(entry: str | DataSource) -> object:
    source = source_of(entry)
    path = str(Path(source.path).absolute())
    return replace(source, path=path).to_json() if isinstance(entry, DataSource) else path


def refuse_other_options(asked: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Check that the node's options are those that a worker's own file asks for.

    Raises:
        ConfigError: some differ; the message names all of them.
    """
    others = [f"{key} {value!r} here, {found[key]!r} at the node" for key, value in asked.items() if value != found[key]]
    if others:
        raise ConfigError(f"node: its run is another one: {'; '.join(others)}; correct the file, or leave it out")


def lost_peer(error: BaseException) -> PeerLost | None:
    """Return the loss of a peer that led to `error`; None if it was something else."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, PeerLost):
        cause = cause.__cause__
    return cause


def until_done(work: Callable[[], _Found], on_loss: Callable[[str], None]) -> _Found:
    """Return what `work` returns; where a peer is lost meanwhile, tell `on_loss` why, and call it again."""
    while True:
        try:
            return work()
        except (PeerLost, StepFailed) as error:
            if not (words := str(lost_peer(error) or "")):
                raise
        # Outside of the handler, because the caught error holds transfers, and these hold their connections.
        on_loss(words)
