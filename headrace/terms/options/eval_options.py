"""The options of measuring a model's loss, each declared once (`terms/options/declared.py` says how to add one)."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from headrace.terms.errors import ConfigError
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.options.budget import Budget
from headrace.terms.options.declared import Declared, Group, option, option_as
from headrace.terms.options.generate_options import NO_PLACE, GenerateOptions
from headrace.terms.options.option_kinds import Flag, Listed, PathOf, PlaceOrName, Text, Whole
from headrace.terms.options.run_options import RunOptions

_data = partial(option, group=Group.DATA)


@dataclass(frozen=True, kw_only=True)
class EvalOptions(Declared):
    """What `headrace eval` works by. Sizes are bytes, lengths are tokens. None stands for "choose for me"."""

    data: tuple[str, ...] = _data(
        (),
        kind=Listed(PlaceOrName()),
        help="Held-out data; may be given twice.",
        row="one or more files, as for training: samples are marked, cut and packed as there",
        words="-",
        often=True,
    )
    tasks: str | None = _data(
        None,
        Text(),
        "Tasks of lm-eval instead of data, such as arc_easy,hellaswag.",
        row="tasks of lm-eval instead of data, such as `arc_easy,hellaswag`; names may have `*`",
        words="-",
        often=True,
    )
    num_fewshot: int | None = _data(None, Whole(0), "Examples before each question of a task.", words="the task's")
    limit: int | None = _data(None, Whole(), "Questions of each task: the first ones.", words="all")
    apply_chat_template: bool = _data(False, Flag(), "Ask tasks as a conversation, by the chat template.")
    include_path: Path | None = _data(None, PathOf(), "Directory with tasks of your own, as lm-eval has them.", words="-")
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
        if bool(self.data) == bool(self.tasks):
            raise ConfigError("data: give --data FILE or --tasks NAMES, and not both")
        if self.tasks is None:
            for key in ("num_fewshot", "limit", "apply_chat_template", "include_path"):
                if getattr(self, key):
                    raise ConfigError(f"{key}: is for tasks; give --tasks NAMES as well")

    @property
    def task_names(self) -> list[str]:
        """The names of tasks."""
        return [name for each in (self.tasks or "").split(",") if (name := each.strip())]

    @property
    def budget(self) -> Budget:
        """The budget of each tier."""
        return Budget(device=self.device_memory, host=self.host_memory)
