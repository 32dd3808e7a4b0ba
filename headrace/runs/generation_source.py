"""Which weights a generation is of: a model directory's."""

from pathlib import Path

from headrace.engine.generator import Generator
from headrace.terms.ceilings import Ceilings
from headrace.terms.events import Sink
from headrace.terms.generate_options import GenerateOptions


def open_generator(place: Path, options: GenerateOptions, ceilings: Ceilings | None, sink: Sink | None) -> Generator:
    """Return the generator of a model directory.

    Raises:
        InputError: it cannot be used.
    """
    return Generator.open(
        place,
        options.budget,
        compute_dtype=options.compute_dtype,
        machine=ceilings,
        rows=options.rows,
        seats=options.seats,
        sink=sink,
    )
