"""How an option is declared: once, as a field of a frozen dataclass, with everything that is known about it.

To add an option, add one field to a class of options (`terms/options/method_options.py` and its neighbours):

    momentum: float = option(0.9, Number(0, 1), "How much of the last update stays.")

Its name is the key of the YAML file and, with `-` for `_`, the option on the command line. Its kind reads and checks values
from any source. Its help stands in `--help`, in the section of its `group`, and in docs/options.md, where `row` may say more.
Where several options of a file share a section, a partial `option` says it once.
What a run was begun with is written into its record and must not change in `config.yaml`, unless the option is declared with
`fixed=False`.
Invariant: an instance that exists is valid in itself.
"""

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from headrace.terms.errors import ConfigError
from headrace.terms.options.option_kinds import OptionKind, Text

_KEY = "option"


class Group(StrEnum):
    """The sections of `--help`, in the order in which they are shown."""

    OFTEN = "Most used"
    DATA = "Model and data"
    SERVER = "Server"
    PROMPTS = "Prompts and answers"
    SAMPLING = "Sampling"
    DRAFTS = "Drafting"
    RESULT = "Result"
    CALIBRATION = "Calibration"
    MEMORY = "Memory"
    LEARNING = "Learning"
    EVALUATION = "Evaluation"
    METHOD = "Method"
    RUN = "Run"
    CLUSTER = "Several machines"
    OTHER = "Other options"


@dataclass(frozen=True, slots=True)
class Setting:
    """The key of transformers' GenerationConfig that an option of generation sets.

    `samples`: it acts on sampling alone, which it turns on. `by_line`: a line of a file of prompts may give its own.
    """

    key: str
    samples: bool = False
    by_line: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """One option: what it is called, what it may be, and how it is explained.

    `default` is None where the program chooses, and `default_words` say what it chooses; `required`: there is no default at
    all. `flag` is its name on the command line, None for a key of the file only. `plan`: it changes what `headrace plan` says.
    `setting`: what it sets of a generation. `group` is its section of `--help`; those that are used
    `often` stand above all sections.
    """

    key: str
    kind: OptionKind
    help: str
    row: str
    default: Any
    default_words: str
    required: bool
    optional: bool
    on_command_line: bool
    plan: bool
    fixed: bool
    group: Group
    often: bool
    setting: Setting | None

    @property
    def word(self) -> str:
        """What the user calls it as a setting of something with a name; `from_` is `from`, which Python keeps for itself."""
        return self.key.rstrip("_")

    @property
    def flag(self) -> str | None:
        """The option on the command line."""
        return f"--{self.key.replace('_', '-')}" if self.on_command_line and self.kind.cli is not None else None

    @property
    def section(self) -> Group:
        """Its section of `--help`."""
        return Group.OFTEN if self.often else self.group

    @property
    def docs_row(self) -> str:
        """The line of the table in the docs."""
        begins = self.help[:1] if self.help[1:2].isupper() else self.help[:1].lower()  # "GPU memory" keeps its capitals
        meaning = self.row or begins + self.help[1:].rstrip(".")
        return f"| `{self.word}` | {self.default_words} | {meaning} |"

    @property
    def command_help(self) -> str:
        """What `--help` says."""
        plain = self.default_words.replace("`", "")
        return f"{self.help} Default: {plain}." if plain != "-" else self.help

    def read(self, value: Any) -> Any:
        """Return `value`, checked; ConfigError says key, what was expected, and what was found."""
        return None if value is None and self.optional else self.kind.read(value, self.key)


def option(
    default: Any = dataclasses.MISSING,
    kind: OptionKind = Text(),  # noqa: B008 (frozen, and without fields)
    help: str = "",
    *,
    row: str = "",
    words: str | None = None,
    factory: Callable[[], Any] | None = None,
    optional: bool = False,
    cli: bool = True,
    plan: bool = False,
    fixed: bool = True,
    group: Group = Group.OTHER,
    often: bool = False,
    setting: Setting | None = None,
) -> Any:
    """Return the dataclass field of an option.

    `help` is for the command line, `row` for the docs where that says more; `words` say the default where the value does not.
    `optional`: None may be given although it is not the default. `cli=False`: a key only. `plan`: it
    changes what `headrace plan` says. `fixed=False`: it may change when the run goes on. `group` and `often` say where
    `--help` has it, `setting` what it sets of a generation.
    """
    metadata = {
        _KEY: {
            "kind": kind,
            "help": help,
            "row": row,
            "words": words,
            "optional": optional or default is None,
            "on_command_line": cli,
            "plan": plan,
            "fixed": fixed,
            "group": group,
            "often": often,
            "setting": setting,
        }
    }
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def option_as(declared: "type[Declared]", key: str, **changes: Any) -> Any:
    """Return the dataclass field of an option that another class declares. `changes` are those arguments of `option` that
    differ here. `plan` and `fixed` are not taken over: say them here again where they are not the default.
    """
    origin = next(each for each in dataclasses.fields(declared) if each.name == key)
    default = changes.pop("default", origin.default)
    metadata = {_KEY: {**origin.metadata[_KEY], "plan": False, "fixed": True, **changes}}
    if origin.default_factory is not dataclasses.MISSING:
        return field(default_factory=origin.default_factory, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Declared:
    """The base of classes whose fields are options: reads each value by its declaration, and refuses unknown keys."""

    def __post_init__(self) -> None:
        wrong = []
        for each in self.declarations():
            try:
                object.__setattr__(self, each.key, each.read(getattr(self, each.key)))  # frozen: set once, here
            except ConfigError as error:
                wrong.append(str(error))
        if wrong:
            raise ConfigError("; ".join(wrong))

    @classmethod
    def declarations(cls) -> tuple[Declaration, ...]:
        """Return the options in the order in which people read them: first those without a default."""
        return tuple(sorted(_declarations(cls), key=lambda each: not each.required))

    @classmethod
    def keys(cls) -> tuple[str, ...]:
        """Return the keys of all options."""
        return tuple(each.key for each in cls.declarations())

    @classmethod
    def of(cls, values: Mapping[str, Any], *, source: str = "options") -> Self:
        """Return the options in `values`; `source` is named in errors.

        Raises:
            ConfigError: an unknown key (names the nearest), a missing one, or a value that is not understood.
        """
        refuse_unknown_keys(values, cls.keys(), source)
        missing = [f"{each.key} is missing" for each in cls.declarations() if each.required and each.key not in values]
        if missing:
            raise ConfigError(f"{source}: {'; '.join(missing)}")
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from error

    def to_json(self) -> dict[str, Any]:
        """Return all options as plain JSON values, which `of` reads back to equal ones."""
        return {each.key: _plain(getattr(self, each.key)) for each in self.declarations()}


def _declarations(cls: type[Declared]) -> Iterator[Declaration]:
    for each in fields(cls):
        values = dict(each.metadata[_KEY])
        missing, words = dataclasses.MISSING, values.pop("words")
        default = None if each.default is missing else each.default
        required = each.default is missing and each.default_factory is missing
        yield Declaration(
            key=each.name,
            default=default,
            required=required,
            default_words="-" if required else _words_of(default) if words is None else words,
            **values,
        )


def _words_of(default: Any) -> str:
    if default is None or isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, str):
        return f"`{default}`"
    if isinstance(default, tuple):
        return f"({', '.join(_words_of(each) for each in default)})" if default else "none"
    return f"{default:g}".replace("e-0", "e-") if isinstance(default, float) else str(default)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "to_json"):
        return value.to_json()
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


# Names that other trainers have for an option. difflib alone would not find these.
_ELSEWHERE = {
    "adam_beta1": "optimizer",
    "adam_beta2": "optimizer",
    "adam_betas": "optimizer",
    "adam_epsilon": "optimizer",
    "batch_size": "tokens_per_step",
    "chat_template_path": "chat_template",
    "cutoff_len": "sequence_length",
    "dataset": "data",
    "dataset_name": "data",
    "datasets": "data",
    "dtype": "compute_dtype",
    "eval_dataset": "eval_data",
    "eval_file": "eval_data",
    "eval_strategy": "eval_steps",
    "evals_per_epoch": "eval_steps",
    "evaluation_strategy": "eval_steps",
    "gradient_accumulation_steps": "tokens_per_step",
    "lr": "learning_rate",
    "lr_scheduler_type": "lr_schedule",
    "max_length": "sequence_length",
    "max_seq_length": "sequence_length",
    "model_name_or_path": "model",
    "moments": "optimizer",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "optim": "optimizer",
    "output_dir": "output",
    "per_device_train_batch_size": "tokens_per_step",
    "precision": "compute_dtype",
    "save_strategy": "save_steps",
    "saves_per_epoch": "save_steps",
    "test_datasets": "eval_data",
    "val_set_size": "eval_split",
    "val_size": "eval_split",
    "validation_file": "eval_data",
    "validation_split": "eval_split",
}


_NAMED_KEYS = 12  # in a message: one line that a person reads to its end, however many options there are


def refuse_unknown_keys(values: Mapping[str, Any], known: Iterable[str], source: str) -> None:
    """Raise ConfigError for the first key of `values` that is not in `known`, naming the nearest that is."""
    known = tuple(known)
    for key in values:
        if key in known:
            continue
        plain = str(key).replace("-", "_").lower()
        elsewhere = _ELSEWHERE.get(plain)
        near = [elsewhere] if elsewhere in known else difflib.get_close_matches(plain, known, n=1, cutoff=0.5)
        nearest = difflib.get_close_matches(plain, known, n=_NAMED_KEYS, cutoff=0.0)
        hint = f"did you mean {near[0]!r}?" if near else f"{len(known)} keys are known, {', '.join(nearest)} among them"
        raise ConfigError(f"{source}: unknown key {key!r}; {hint}")
