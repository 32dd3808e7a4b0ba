"""The options of measuring a model's loss, each declared once (`terms/declared.py` says how to add one)."""

from dataclasses import dataclass
from pathlib import Path

from headrace.terms.budget import Budget
from headrace.terms.ceilings import Ceilings
from headrace.terms.declared import Declared, Group, option, option_as
from headrace.terms.errors import ConfigError
from headrace.terms.generate_options import NO_PLACE, GenerateOptions
from headrace.terms.option_kinds import Listed, PlaceOrName
from headrace.terms.run_options import RunOptions


@dataclass(frozen=True, kw_only=True)
class EvalOptions(Declared):
    """What `headrace eval` works by. Sizes are bytes, lengths are tokens. None stands for "choose for me"."""

    data: tuple[str, ...] = option(
        kind=Listed(PlaceOrName(), 1),
        help="Held-out data; may be given twice.",
        row="one or more files, as for training: samples are marked, cut and packed as there",
        group=Group.DATA,
        often=True,
    )
    sequence_length: int | None = option_as(RunOptions, "sequence_length")
    template_date: str | None = option_as(
        RunOptions,
        "template_date",
        row="the day, YYYY-MM-DD, for chat templates that ask for the date",
        words="a run's own, or today",
    )
    packing: bool | None = option_as(RunOptions, "packing")
    host_memory: str | int | None = option_as(GenerateOptions, "host_memory")
    device_memory: str | int | None = option_as(GenerateOptions, "device_memory")
    ssd: tuple[Path, ...] = option_as(
        GenerateOptions,
        "ssd",
        help="Directory on an SSD for a copy of the weights; give it several times to stripe.",
        row="directories on SSDs where a copy of the weights may lie, striped",
        group=Group.MEMORY,
        often=False,
    )
    copy_weights: bool | None = option_as(GenerateOptions, "copy_weights")
    compute_dtype: str | None = option_as(GenerateOptions, "compute_dtype")
    rows: int | None = option_as(GenerateOptions, "rows")
    seats: int | None = option_as(GenerateOptions, "seats")
    adapter: str | Path | None = option_as(GenerateOptions, "adapter")
    machine: str | Ceilings | None = option_as(RunOptions, "machine")
    cache: Path = option_as(RunOptions, "cache", row="")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.copy_weights and not self.ssd:
            raise ConfigError(NO_PLACE)

    @property
    def budget(self) -> Budget:
        """The budget of each tier."""
        return Budget(device=self.device_memory, host=self.host_memory)
