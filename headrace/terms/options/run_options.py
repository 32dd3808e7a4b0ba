"""The options of a whole run, and of a node that keeps its state."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from headrace.terms.errors import ConfigError
from headrace.terms.options.border import APART, JOINT
from headrace.terms.options.contradictions import (
    refuse_packed_pairs,
    refuse_two_held_out,
    refuse_unstreamed,
    refuse_without_rewards,
)
from headrace.terms.options.data_source import DEFAULT_SPLIT, DataSource, SourceKind, source_of
from headrace.terms.options.declared import Group, option
from headrace.terms.options.local_options import LocalOptions
from headrace.terms.options.muster import Muster
from headrace.terms.options.option_kinds import Day, Flag, Listed, Number, OneOf, PathOf, Size, Span, Text, Whole
from headrace.terms.options.options import Options
from headrace.terms.options.summing import SEQUENTIAL, TREE

_data = partial(option, group=Group.DATA)
_evaluation = partial(option, group=Group.EVALUATION)
_run = partial(option, group=Group.RUN)
_cluster = partial(option, group=Group.CLUSTER)

_OF_DATASET = ("dataset_config", "dataset_train_split", "dataset_test_split")


@dataclass(frozen=True, kw_only=True)
class RunOptions(Options):
    """What `headrace train` runs with: an engine's options, and what is trained, for how long, and what is left at the end.

    The `config.yaml` of a run directory has what was chosen where an option is None.
    """

    model: Path = _data(
        kind=PathOf(),
        help="Model directory, or OWNER/NAME on the Hub.",
        row="model directory, or `OWNER/NAME` on the Hub, which is fetched into `HF_HOME`",
        cli=False,
    )
    data: tuple[str | DataSource, ...] = _data(
        kind=Listed(SourceKind(), 1),
        help="Data to train on: files, directories or data sets.",
        row="one or more files, directories or data sets of the Hub (`owner/name`), or mappings of `path`, `name`, `split`, "
        "`weight`, `columns`, `streaming` ([data](data.md#several-sources))",
        cli=False,
    )
    epochs: float | None = option(
        None,
        Number(0, 1e9, above=True),
        "Passes over the data.",
        words="1",
        plan=True,
        group=Group.LEARNING,
        often=True,
    )
    packing: bool | None = _data(
        None,
        Flag(),
        "Put several samples into one row.",
        row="put several samples into one row; they do not see one another",
        words="where the model can",
        plan=True,
    )
    border: str | None = _data(
        None,
        OneOf((JOINT, APART)),
        "Tokens at the border of prompt and completion: joint or apart.",
        row="texts whose tokens cross the border of prompt and completion: `joint`, as TRL, tokenises both together and trains "
        "from where the tokens part; `apart` keeps the prompt's own tokens ([data](data.md#forms)). A run keeps its own",
        words="`joint` with `loss`, else `apart`",
        plan=True,
    )
    reward: tuple[str, ...] = _data(
        (),
        Listed(Text()),
        "FILE.py:NAME, a function that rewards completions, for --loss grpo; repeatable.",
        row="with `loss: grpo`: a function of a Python file that gives each completion a number ([rewards](rewards.md)); the "
        "sum counts of several",
    )
    streaming: bool = _data(
        False,
        Flag(),
        "Read the data as they come; needs max_steps.",
        row="read the data as they come, and keep no tokens; needs `max_steps`. One entry of `data` with `streaming: true` "
        "does the same ([data](data.md#streaming))",
        plan=True,
    )
    buffer_size: int | None = _data(
        None,
        Whole(),
        "Rows that streaming reads, shuffles and packs at once.",
        row="rows that `streaming` reads at once, and shuffles and packs among themselves",
        words="those of 16 million tokens",
        plan=True,
    )
    shuffle: bool = _data(True, Flag(), "Take the data in another order in each pass.", cli=False)
    eval_split: float | None = _evaluation(
        None,
        Number(0, 1e9, above=True),
        "Hold out this share of the samples (0.02), or this many (200), for evaluation.",
        row="hold out this share of the samples (0.02), or this many (200), and measure their loss during the run. Samples are "
        "drawn by `seed`, before packing, and never trained",
        plan=True,
    )
    eval_data: tuple[str | DataSource, ...] = _evaluation(
        (),
        Listed(SourceKind()),
        "Held-out data to evaluate on during the run; may be given twice.",
        row="one or more files whose loss is measured during the run, in the forms of `data`",
        plan=True,
    )
    eval_steps: int | None = _evaluation(
        None,
        Whole(),
        "Evaluate every so many steps, and at the last step.",
        row="evaluate every so many steps, and at the last step",
        words="at the end of each epoch and of the run",
        plan=True,
    )
    load_best_model_at_end: bool = _evaluation(
        False,
        Flag(),
        "Make final/ the model with the lowest evaluation loss.",
        row="`final/` is the model with the lowest evaluation loss. Until the end it lies in the run directory as "
        "`checkpoint-N`, which takes space for two models",
        plan=True,
    )
    save_steps: int | None = _run(
        None,
        Whole(),
        "Keep the model as checkpoint-N every so many steps, and at the last step.",
        row="keep the model after every so many steps, and after the last, as an ordinary directory `checkpoint-N` "
        "([checkpoints](checkpoints.md))",
        words="none are kept",
        plan=True,
    )
    save_total_limit: int | None = _run(
        None,
        Whole(),
        "Keep at most so many checkpoint-N; alone, one for each evaluation or epoch.",
        row="keep the newest so many `checkpoint-N`, and among them the one with the lowest evaluation loss (two, if that is "
        "older). Without `save_steps` there is one for each evaluation, else for each epoch",
        words="all",
        plan=True,
    )
    early_stopping_patience: int | None = _evaluation(
        None,
        Whole(),
        "Stop after so many evaluations in a row without a lower loss.",
        row="stop after so many evaluations in a row without a lower loss",
        words="never",
    )
    dataset_config: str | None = _data(
        None,
        Text(),
        "Configuration of the Hub data set in DATA.",
        row="configuration of the only data set in `data`, as `name` of an entry",
    )
    dataset_train_split: str | None = _data(
        None,
        Text(),
        "Split of the data set in DATA to train on.",
        row="split of the only data set in `data` to train on, as `split` of an entry",
        words="`train`",
    )
    dataset_test_split: str | None = _evaluation(
        None,
        Text(),
        "Split of the data set in DATA to evaluate on during the run.",
        row="split of the only data set in `data` that becomes `eval_data`",
    )
    chat_template: Path | None = _data(
        None,
        PathOf(),
        "File with a chat template, in place of the tokenizer's.",
        row="file with a chat template (Jinja), in place of the tokenizer's; the run and `final/` keep it",
        words="the tokenizer's",
    )
    template_date: str | None = _data(
        None,
        Day(),
        "Give this day, YYYY-MM-DD, to a chat template that asks for it.",
        row="the day, YYYY-MM-DD, for chat templates that ask for the date; a run keeps its day",
        words="today",
    )
    report_to: tuple[str, ...] = _run(
        (),
        Listed(OneOf(("tensorboard", "trace", "trackio", "wandb", "mlflow"))),
        "Also report to tensorboard, trackio, wandb or mlflow, or write a trace; repeatable.",
        row="`tensorboard`, `trackio`, `wandb`, `mlflow`, `trace` (timeline for ui.perfetto.dev); several may be given",
    )
    run_name: str | None = _run(None, Text(), "Name of the run for trackers.", words="that of the run directory")
    measure: bool = _run(
        True,
        Flag(),
        "Measure this machine once, before a long run.",
        row="measure this machine before a run with a forecast of over two minutes, unless figures exist. It takes at most "
        "ten seconds; `cache` keeps the figures for later runs. A long run also takes another plan, twice at most, where its "
        "own steps show that it is a tenth faster: same bits, same budgets. Under a given `plan` it never does",
    )
    max_write_per_day: int | None = _run(
        None,
        Size(),
        "Write at most this much to the SSDs in 24 hours, such as 500GB; steps wait.",
        row="most bytes that steps write to the SSDs in any 24 hours, such as `500GB`, all drives together. Steps wait so that "
        "it holds; the plan says how long. The import of the model and `checkpoint-N` do not count",
        words="no limit",
        plan=True,
    )
    keep_state: bool = _run(False, Flag(), "Keep the state on the SSDs after the end.")
    cache: Path = _data(
        kind=PathOf(),
        help="Directory for tokenised data.",
        row="directory of tokenised data, and of the measurements of this machine",
        words="`~/.cache/headrace`",
        cli=False,
        factory=lambda: Path.home() / ".cache" / "headrace",
        plan=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._take_splits()
        refuse_two_held_out(self.eval_split, self.eval_data)
        refuse_packed_pairs(self)
        refuse_without_rewards(self)
        refuse_unstreamed(self, self.streams)

    @property
    def streams(self) -> bool:
        """Whether data are read as they come."""
        return self.streaming or any(source_of(entry).streaming for entry in self.data)

    def _take_splits(self) -> None:
        """Let the names that TRL's command line has for parts of a data set become those of the entry."""
        given = {each: getattr(self, each) for each in _OF_DATASET if getattr(self, each) is not None}
        if not given:
            return
        changes: dict[str, Any] = dict.fromkeys(_OF_DATASET)
        if self.data:  # a plan needs none
            changes |= self._with_splits(given)
        for key, value in changes.items():
            object.__setattr__(self, key, value)  # frozen: set once, here

    def _with_splits(self, given: Mapping[str, str]) -> dict[str, Any]:
        flag = next(iter(given))
        if len(self.data) != 1:
            raise ConfigError(f"{flag}: data has {len(self.data)} entries; give `name` and `split` of each one in a YAML file")
        entry, (name, train, test) = source_of(self.data[0]), (given.get(each) for each in _OF_DATASET)
        if (name and entry.name not in (None, name)) or (train and entry.split not in (DEFAULT_SPLIT, train)):
            raise ConfigError(f"{flag}: the entry of data says otherwise ({entry}); keep one of them")
        if test and self.eval_data:
            raise ConfigError("dataset_test_split and eval_data: both say what is held out; give one of them")
        entry = replace(entry, name=name or entry.name, split=train or entry.split)
        held_out = (SourceKind().read(replace(entry, split=test, weight=1.0), "eval_data"),) if test else self.eval_data
        return {"data": (SourceKind().read(entry, "data"),), "eval_data": held_out}

    @property
    def evaluates(self) -> bool:
        """Whether held-out data are evaluated during the run."""
        return self.eval_split is not None or bool(self.eval_data)

    @property
    def saves(self) -> bool:
        """Whether models are kept during the run, whatever becomes of them."""
        return self.save_steps is not None or self.save_total_limit is not None

    @property
    def may_replan(self) -> bool:
        """Whether another plan may be taken: who says how, or that nothing is to be measured, gets what was said."""
        return self.measure and self.plan is None

    @property
    def models_at_once(self) -> int:
        """How many finished models lie beside the state at most: a new one is whole before another goes, `final/` is the last.
        Without a limit and a number of steps, it is unknown how many are kept: two count.
        """
        best, most, every = int(self.load_best_model_at_end), self.save_total_limit, self.save_steps
        if most is not None:
            most = max(most, 2) if self.evaluates else most
        kept = -(-(self.max_steps or every) // every) if every else most
        return 1 + best if kept is None else min(kept + best, most or kept + best) + 1


@dataclass(frozen=True, kw_only=True)
class NodeOptions(LocalOptions, RunOptions):
    """What `headrace node` runs with: a run's options, and where workers come to. Budgets and SSDs are the node's own."""

    listen: str = _cluster(
        "127.0.0.1:29500",
        Text(),
        "Address HOST:PORT that workers connect to.",
        row="address for workers, HOST:PORT; any but 127.0.0.1 needs a `secret`",
        fixed=False,
    )
    workers: int | str = _cluster(
        1,
        Span(4096),
        "Number of workers N, or MIN:MAX to begin with MIN and take in up to MAX.",
        row="workers that the run waits for; others wait joined, as spares. `MIN:MAX`: begin once MIN are there, take in up to "
        "MAX, go on with those that are left; needs `gradient_sum: tree`, which is then the default",
        fixed=False,
    )
    grace: float = _cluster(
        10.0,
        Number(0, 1e6),
        "Seconds to wait for who is missing before the run goes on with fewer.",
        row="seconds that a run with `workers: MIN:MAX` waits for a lost worker, before it goes on with fewer; with "
        "`local_steps`, that a merge with a quorum waits for the others",
        fixed=False,
    )
    secret: Path | None = _cluster(None, PathOf(), "File with the secret that workers must have too.", fixed=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.muster.is_elastic and self.gradient_sum == SEQUENTIAL:
            raise ConfigError(
                f"gradient_sum: sequential rounds otherwise for each number of workers, and workers is {self.workers}; give "
                f"gradient_sum {TREE}, or one number of workers"
            )

    @classmethod
    def of(cls, values: Mapping[str, Any], *, source: str = "options") -> Self:
        """Return the options in `values`. A number of workers that may change takes the tree, unless a sum is given."""
        if ":" in str(values.get("workers", "")):
            values = {"gradient_sum": TREE, **values}
        return super().of(values, source=source)

    @property
    def muster(self) -> Muster:
        """How many workers the node begins with, takes in, and goes on with."""
        return Muster.of(self.workers, self.grace)
