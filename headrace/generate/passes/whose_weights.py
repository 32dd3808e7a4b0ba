"""Whose weights a generation uses: those of a model directory, of a finished run, or of an unfinished run's last checkpoint."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from headrace.data.batches.turn_end import ends_of_run
from headrace.generate.passes.generator import Generator
from headrace.generate.passes.opened import GenerationModel
from headrace.model.seats.generation_check import check_generation
from headrace.store.model_here import Kind, model_at, options_of
from headrace.store.run_directory import RunDirectory
from headrace.terms.events import Sink
from headrace.terms.options.budget import Budget
from headrace.terms.options.generate_options import GenerateOptions


def open_whose_model(
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
    here = model_at(place, adapter)
    if here.kind is not Kind.RUN:
        return GenerationModel.of_directory(here, budget, compute_dtype, sink, check)
    found = GenerationModel.of_store(here, budget, compute_dtype, sink, check)
    if (options := options_of(RunDirectory(place))) is not None:
        ends, note = ends_of_run(options)
        if ends is not None:
            found.generation_config.eos_token_id = ends
        found.notes += (note,) if note else ()
    return found


def open_generator(place: Path, options: GenerateOptions, sink: Sink | None) -> Generator:
    """Return the generator of the model at `place`. See `open_whose_model`."""
    opened = partial(open_whose_model, adapter=None if options.adapter is None else Path(options.adapter))
    return Generator.open(place, options=options, sink=sink, opened=opened)
