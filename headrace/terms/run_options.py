"""The options of a whole run, and of a node that keeps its state."""

from dataclasses import dataclass
from pathlib import Path

from headrace.terms.declared import option
from headrace.terms.option_kinds import Day, Flag, Listed, Number, OneOf, Place, PlaceOrName, Text, Whole
from headrace.terms.options import Options


@dataclass(frozen=True, kw_only=True)
class RunOptions(Options):
    """What `headrace train` runs with: an engine's options, and what is trained, for how long, and what is left at the end.

    The `config.yaml` of a run directory has what was chosen where an option is None.
    """

    model: Path = option(kind=Place(), help="Model directory.", row="model directory", cli=False)
    data: tuple[str, ...] = option(
        kind=Listed(PlaceOrName(), 1), help="Files or directories.", row="one or more files or directories", cli=False
    )
    epochs: float | None = option(
        None, Number(0, 1e9, above=True), "Passes over the data.", row="length of the run in passes over the data", words="1"
    )
    packing: bool | None = option(
        None,
        Flag(),
        "Several samples in a row.",
        row="put several samples into one row; they do not see one another",
        words="where the model can",
    )
    shuffle: bool = option(True, Flag(), "Another order of the data in each pass.", cli=False)
    template_date: str | None = option(
        None,
        Day(),
        "The day, YYYY-MM-DD, for a chat template that asks for it.",
        row="the day, YYYY-MM-DD, that a chat template gets which asks for the date; a run keeps its own",
        words="today",
    )
    report_to: tuple[str, ...] = option(
        (),
        Listed(OneOf(("tensorboard", "trace"))),
        "tensorboard or trace; may be given twice.",
        row="`tensorboard`, `trace` (timeline for ui.perfetto.dev)",
    )
    measure: bool = option(
        True,
        Flag(),
        "Measure this machine before a long run, once.",
        row="measure this machine, if nobody has, before a run that is forecast to take over two minutes; it takes ten "
        "seconds at most, and is kept in `cache` for later runs",
    )
    keep_state: bool = option(
        False, Flag(), "Keep the state on the SSDs after the end.", row="keep the state on the SSDs after the end"
    )
    cache: Path = option(
        kind=Place(),
        help="Tokenised data.",
        row="directory of tokenised data, and of what was measured about this machine",
        words="`~/.cache/headrace`",
        cli=False,
        factory=lambda: Path.home() / ".cache" / "headrace",
    )


@dataclass(frozen=True, kw_only=True)
class NodeOptions(RunOptions):
    """What `headrace node` runs with: a run's options, and where workers come to. Budgets and SSDs are the node's own."""

    listen: str = option(
        "127.0.0.1:29500",
        Text(),
        "HOST:PORT for workers to connect to.",
        row="address for workers, HOST:PORT; any but 127.0.0.1 needs a `secret`",
        fixed=False,
    )
    workers: int = option(
        1, Whole(), "Workers to wait for.", row="workers that the run waits for; others wait joined, as spares", fixed=False
    )
    secret: Path | None = option(
        None,
        Place(),
        "File with the secret that workers must have too.",
        row="file with the secret that workers must have too",
        words="none",
        fixed=False,
    )
