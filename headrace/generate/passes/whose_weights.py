"""Whose weights a generation uses: those of a model directory, of a finished run, or of an unfinished run's last checkpoint."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from headrace.data.batches.turn_end import ends_of_run
from headrace.generate.passes.generator import Generator
from headrace.generate.passes.opened import GenerationModel
from headrace.model.adapters.beside_files import is_adapter_directory
from headrace.model.adapters.beside_reading import read_beside
from headrace.model.seats.generation_check import check_generation
from headrace.store.manifest import MANIFEST_NAME
from headrace.store.run_directory import RunDirectory
from headrace.terms.errors import ConfigError, InputError, RunDirectoryError
from headrace.terms.events import Sink
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.options.budget import Budget
from headrace.terms.options.generate_options import GenerateOptions
from headrace.terms.options.run_options import RunOptions


def open_model(
    place: Path,
    budget: Budget,
    compute_dtype: str | None,
    sink: Sink | None,
    check: Callable[[Any], None] = check_generation,
    *,
    adapter: Path | None = None,
) -> GenerationModel:
    """Return the model of a directory, or of a run: its finished model, or else its last commit. With an `adapter`, return the
    directory's model and the adapter beside it.

    Raises:
        InputError: the place is neither, or cannot be used; or the run is in progress, or has committed nothing.
    """
    run = RunDirectory(place)
    if not run.config.exists():
        return _of_directory(place, budget, compute_dtype, sink, check, adapter)
    config = _options_of(run)
    if adapter is not None or run.final.is_dir():
        found = _of_directory(run.final, budget, compute_dtype, sink, check, adapter)
    elif (place / MANIFEST_NAME).exists():
        found = GenerationModel.of_store(place, budget, compute_dtype, sink, check)
        ends, note = (None, "") if config is None else ends_of_run(config)
        if ends is not None:
            found.generation_config.eos_token_id = ends
        found.notes += (note,) if note else ()
        found.chat_template = None if config is None else config.chat_template
    else:
        raise RunDirectoryError(f"{place}: the run has committed nothing yet; `headrace resume {place}` resumes it")
    found.template_date, found.border = (None, None) if config is None else (config.template_date, config.border)
    return found


def _of_directory(
    place: Path,
    budget: Budget,
    compute_dtype: str | None,
    sink: Sink | None,
    check: Callable[[Any], None],
    adapter: Path | None,
) -> GenerationModel:
    if adapter is None:
        return GenerationModel.of_directory(place, budget, compute_dtype, sink, check)
    if is_adapter_directory(place):
        raise ConfigError(f"adapter: {place} is an adapter itself; give the model directory that both are of")
    found = partial(read_beside, adapter)
    return GenerationModel.of_directory(place, budget, compute_dtype, sink, check, adapters=found, beside=adapter)


def _options_of(run: RunDirectory) -> RunOptions | None:
    """Return the options of a run; None where a program began it, or another version, whose options cannot be read."""
    try:
        return run.read_config()
    except InputError:
        return None


def open_generator(place: Path, options: GenerateOptions, ceilings: Ceilings | None, sink: Sink | None) -> Generator:
    """Return the generator of the model at `place`. See `open_model`."""
    opened = partial(open_model, adapter=None if options.adapter is None else Path(options.adapter))
    return Generator.open(place, options=replace(options, machine=ceilings), sink=sink, opened=opened)
