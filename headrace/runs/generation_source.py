"""Which weights a generation is of: a model directory's, a finished run's, or those that an unfinished run has committed."""

from pathlib import Path

from headrace.engine.generation_model import GenerationModel
from headrace.engine.generator import Generator
from headrace.runs.run_directory import RunDirectory
from headrace.store.manifest import MANIFEST_NAME
from headrace.terms.ceilings import Ceilings
from headrace.terms.errors import RunDirectoryError
from headrace.terms.events import Sink
from headrace.terms.generate_options import GenerateOptions


def open_generator(place: Path, options: GenerateOptions, ceilings: Ceilings | None, sink: Sink | None) -> Generator:
    """Return the generator of a model directory, or of a run: of its finished model, or else of its last commit.

    Raises:
        InputError: it is neither, or cannot be used; or the run is in progress, or has committed nothing.
    """
    run, opened = RunDirectory(place), None
    if run.config.exists():
        if run.final.is_dir():
            place = run.final
        elif (place / MANIFEST_NAME).exists():
            opened = GenerationModel.of_store
        else:
            raise RunDirectoryError(f"{place}: the run has committed nothing yet; `headrace resume {place}` goes on with it")
    return Generator.open(
        place,
        options.budget,
        compute_dtype=options.compute_dtype,
        machine=ceilings,
        rows=options.rows,
        seats=options.seats,
        sink=sink,
        opened=opened,
    )
