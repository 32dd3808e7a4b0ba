"""The options of `headrace plan`: those of a run, so that its file can be planned, and those of a node and its workers."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from headrace.terms.errors import ConfigError
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.options.data_source import DataSource, SourceKind
from headrace.terms.options.declared import Group, option, option_as
from headrace.terms.options.local_options import LocalOptions
from headrace.terms.options.option_kinds import Either, Flag, Listed, Number, PathOf, PlaceOrName, Rate, Size, Span, Whole
from headrace.terms.options.run_options import RunOptions

_cluster = partial(option, plan=True, group=Group.CLUSTER)
_machine = partial(option, None, plan=True, group=Group.MEMORY, words="the profile's")


@dataclass(frozen=True, kw_only=True)
class PlanOptions(RunOptions):
    """What `headrace plan` is asked: all that a run is, and workers and a node, where states live on another machine than
    compute. `model` is None where a program has it already; without `data` there are no passes to count.
    """

    model: Path = option_as(RunOptions, "model", default=None, optional=True)
    data: tuple[str | DataSource, ...] = option_as(RunOptions, "data", default=(), kind=Listed(SourceKind()))

    cores: int | None = _machine(Whole(1, 4096), "Cores of --machine, if it has others than its profile.")
    ram: int | None = _machine(Size(), "Host memory that --machine has, such as 128GiB.")
    ram_rate: float | None = _machine(Rate(), "What its memory moves a second, such as 60GB.")
    ssd_rate: float | None = _machine(Rate(), "What each of its SSDs reads a second, such as 7GB.")
    ssd_write_rate: float | None = _machine(
        Rate(),
        "What each of its SSDs writes a second, for long.",
        row="what each of its SSDs writes a second for long, when its cache is full",
    )
    ssd_tbw: float | None = _machine(
        Number(above=True),
        "TBW of each of its SSDs, in TB.",
        row="the TBW in TB that the maker of each of its SSDs warrants, such as 1200",
    )

    workers: int | str | None = _cluster(
        None,
        Span(4096),
        "Number of workers that share a node, or MIN:MAX; each is a --machine.",
        row="so many workers, or `MIN:MAX`, each a `machine`, that hold nothing durable: weights and states live at a node",
        words="no node",
    )
    link: str | float | None = _cluster(
        None,
        Rate(),
        "Speed of each worker's and node's link, each way, such as 100Gbit.",
        row="what the link of each worker and of each node carries each way: `100Gbit`, `1.25GB`",
        words="10Gbit, 100Mbit with local_steps or stages",
    )
    node_ssds: int = _cluster(12, Whole(1, 1024), "Number of SSDs in each node.")
    nodes: int = _cluster(1, Whole(1, 1024), "Number of nodes; each keeps its part of every unit.")
    node_machine: str | Ceilings = _cluster(
        "luwu-node",
        Either(Ceilings, PlaceOrName()),
        "Machine profile of a node: a name or a file.",
        row="profile of a node: a name, or a file; of its SSDs the first counts, `node_ssds` times",
    )

    ranks: int | None = _cluster(
        None,
        Whole(2, 4096),
        "Number of ranks that torchrun starts, one for each GPU of this machine; with --link one on each of so many machines.",
        row="so many ranks share out every unit: GPUs of one machine, which share its drives, cores and memory; with `link` "
        "machines alike, with a GPU each",
        words="one process",
    )
    stages: str | int | None = _cluster(
        None,
        Either(int, PlaceOrName()),
        "Number of machines that have consecutive blocks each, or their names, such as rtx4090,rtx3080.",
        row="so many stages have consecutive blocks each, or their machines by name, such as `rtx4090,rtx3080`",
        words="one machine",
    )
    local_steps: int | None = option_as(
        LocalOptions,
        "local_steps",
        help="Plan a learner that trains by itself and meets others every so many steps.",
        plan=True,
    )
    exchange_dtype: str = option_as(LocalOptions, "exchange_dtype", plan=True)
    verbose: bool = option(
        False,
        Flag(),
        "Print all that the plan says, not its first ten lines.",
        row="print all that the plan says, not its first ten lines",
        plan=True,
        group=Group.OTHER,
    )
    html: Path | None = option(
        None,
        PathOf(),
        "Also draw the plan as an HTML page, into this file.",
        row="file for the plan as an HTML page: memory of each tier, and the lanes of a step",
        plan=True,
        group=Group.OTHER,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        given = {each.key for each in self.declarations() if getattr(self, each.key) != each.default}
        if self.machine is None and (changes := [key for key in MACHINE_CHANGES if key in given]):
            raise ConfigError(
                f"{', '.join(changes)}: changes a machine profile, and none is named; add --machine NAME, such as desktop-4090"
            )
        shapes = sorted(given & {"workers", "local_steps", "ranks", "stages"})
        if len(shapes) > 1:
            raise ConfigError(f"{' and '.join(shapes)}: each is another way to share out a run; give one of them")
        for key in (each for each in _OF_NODES if each in given and self.workers is None):
            if key != "link":  # a link alone asks which shape to take
                raise ConfigError(f"{key}: given without workers; say how many workers share a node, or leave it out")
        if "exchange_dtype" in given and self.local_steps is None:
            raise ConfigError("exchange_dtype: given without local_steps; say how many steps learners take alone")


# The options that change a machine profile, in the order of their words.
MACHINE_CHANGES = ("cores", "ram", "ram_rate", "ssd_rate", "ssd_write_rate", "ssd_tbw")
_OF_NODES = ("link", "node_ssds", "nodes", "node_machine")
