"""`RunConfig`: every option of a run, as keys of a YAML file and as options of `headrace train`.

Invariant: a `RunConfig` that exists is valid in itself. A key that is not known is refused with the nearest one that is; a
value that is not understood is refused with the key, the value, and what would do.
"""

import difflib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    model_validator,
)

from headrace.terms.budget import Budget
from headrace.terms.errors import ConfigError
from headrace.terms.optimizer import AdamW, ParameterGroup, Schedule
from headrace.terms.sizes import MOST_COUNT, parse_bytes
from headrace.terms.words import DTYPE_NAMES, MOMENTS_NAMES

DEFAULT_SEQUENCE_LENGTH = 2048
DEFAULT_ROWS_PER_STEP = 8

# What other trainers call it. difflib alone would not find these.
_ELSEWHERE = {
    "batch_size": "tokens_per_step",
    "cutoff_len": "sequence_length",
    "dataset": "data",
    "dtype": "compute_dtype",
    "gradient_accumulation_steps": "tokens_per_step",
    "lr": "learning_rate",
    "lr_scheduler_type": "lr_schedule",
    "max_length": "sequence_length",
    "max_seq_length": "sequence_length",
    "model_name_or_path": "model",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "output_dir": "output",
    "per_device_train_batch_size": "tokens_per_step",
    "precision": "compute_dtype",
    "save_steps": "checkpoint_every",
}


def _listed(value: object) -> object:
    """One path where a list is meant is a list of one."""
    return (value,) if isinstance(value, str | Path) else value


def _bytes(value: object) -> object:
    return parse_bytes(value) if isinstance(value, str | int) else value


_MOST_SHOWN_LETTERS = 120

Count = Annotated[PositiveInt, Field(le=MOST_COUNT)]
CountFromZero = Annotated[NonNegativeInt, Field(le=MOST_COUNT)]
Seed = Annotated[NonNegativeInt, Field(lt=1 << 128)]  # as many bits as numpy draws for one
Size = Annotated[int, BeforeValidator(_bytes)]
Paths = Annotated[tuple[Path, ...], BeforeValidator(_listed)]
Names = Annotated[tuple[str, ...], BeforeValidator(_listed)]


class GroupConfig(BaseModel):
    """Parameters whose name matches `pattern` (a regular expression) get their own decay and learning-rate factor."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pattern: str
    weight_decay: float | None = None
    learning_rate_scale: float = 1.0


class RunConfig(BaseModel):
    """The options of a run. Sizes are bytes (`16GiB` and the like are understood), lengths and counts are tokens or steps.

    None stands for "choose for me"; the `config.yaml` of a run directory has what was chosen.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Path
    data: Annotated[Names, Field(min_length=1)]
    output: Path | None = None
    ssd: Paths = ()
    host_memory: Size | None = None
    device_memory: Size | None = None
    tokens_per_step: Count | None = None
    sequence_length: Annotated[int, Field(ge=2, le=MOST_COUNT)] | None = None
    max_steps: Count | None = None
    epochs: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] | None = None
    learning_rate: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-5
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    adam_betas: tuple[float, float] = (0.9, 0.95)
    adam_epsilon: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-8
    parameter_groups: tuple[GroupConfig, ...] = ()
    warmup_steps: CountFromZero = 0
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    max_grad_norm: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = 1.0
    compute_dtype: Annotated[
        Literal["bfloat16", "float32", "float16"], BeforeValidator(lambda value: DTYPE_NAMES.get(str(value), value))
    ] = "bfloat16"
    moments: Annotated[
        Literal["float32", "bfloat16", "int8"], BeforeValidator(lambda value: MOMENTS_NAMES.get(str(value), value))
    ] = "float32"
    seed: Seed = 0
    shuffle: bool = True
    packing: bool | None = None
    checkpoint_every: Count | None = None
    interpreter: Literal["overlapped", "plain"] = "overlapped"
    machine: str | None = None
    plan: Path | None = None
    compile_blocks: bool = False
    liger: bool = False
    report_to: Annotated[tuple[Literal["tensorboard", "trace"], ...], BeforeValidator(_listed)] = ()
    keep_state: bool = False
    cache: Path = Field(default_factory=lambda: Path.home() / ".cache" / "headrace")

    @model_validator(mode="after")
    def _rows_are_whole(self) -> Self:
        length, tokens = self.sequence_length, self.tokens_per_step
        if length is not None and tokens is not None and tokens % length:
            nearest = max(1, round(tokens / length)) * length
            raise ConfigError(
                f"tokens_per_step: {tokens} is no multiple of sequence_length {length}; a step takes whole rows: use {nearest}"
            )
        return self

    @model_validator(mode="after")
    def _optimizer_can_be(self) -> Self:
        _ = self.optimizer  # refuses what is no rule of updates: betas, patterns, factors
        return self

    @classmethod
    def of(cls, values: Mapping[str, Any], *, source: str = "options") -> Self:
        """Return the configuration of `values`; `source` is named in errors.

        Raises:
            ConfigError: an unknown key (names the nearest), a missing one, or a value that is not understood.
        """
        refuse_unknown_keys(values, cls.model_fields, source)
        try:
            return cls(**values)
        except ValidationError as error:
            raise ConfigError(f"{source}: " + "; ".join(_words(detail) for detail in error.errors())) from error

    @classmethod
    def from_yaml(cls, path: Path, changes: Mapping[str, Any] | None = None) -> Self:
        """Return the configuration in the YAML file `path`; keys of `changes` win over the file's.

        Raises:
            ConfigError: no such file, not a YAML mapping, or see `of`.
        """
        return cls.of(read_yaml(path) | dict(changes or {}), source=str(path))

    def to_yaml(self) -> str:
        """Return all keys as YAML that `from_yaml` reads back to an equal configuration."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)

    @property
    def budget(self) -> Budget:
        """The budget of each tier."""
        return Budget(device=self.device_memory, host=self.host_memory, ssd=self.ssd)

    @property
    def optimizer(self) -> AdamW:
        """The update rule."""
        groups = tuple(ParameterGroup(**group.model_dump()) for group in self.parameter_groups)
        return AdamW(self.learning_rate, self.adam_betas, self.adam_epsilon, self.weight_decay, groups)

    def schedule(self, total_steps: int) -> Schedule:
        """Return the learning-rate schedule of a run of `total_steps`."""
        return Schedule(self.lr_schedule, self.warmup_steps, total_steps)

    def engine_options(self, total_steps: int) -> dict[str, Any]:
        """Return what decides the numbers of a run of `total_steps`, by the engine's names: it is the run's for good."""
        return {
            "optimizer": self.optimizer,
            "schedule": self.schedule(total_steps),
            "max_grad_norm": self.max_grad_norm or None,
            "compute_dtype": self.compute_dtype,
            "moments": self.moments,
            "tokens_per_step": self.tokens_per_step,
            "sequence_length": self.sequence_length,
            "seed": self.seed,
            "checkpoint_every": self.checkpoint_every,
            "interpreter": self.interpreter,
            "compile_blocks": self.compile_blocks,
            "liger": self.liger,
        }


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in the YAML file `path`; an empty file is an empty mapping.

    Raises:
        ConfigError: no such file, or not a YAML mapping.
    """
    try:
        values = _loaded(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); give the path of a YAML file with the run's options"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path}: not YAML ({error})") from error
    if values is not None and not isinstance(values, dict):
        raise ConfigError(f"{path}: expected `key: value` lines, found a {type(values).__name__}")
    return values or {}


def parse_changes(words: Sequence[str]) -> dict[str, Any]:
    """Return `key=value` words as a mapping; values are read as YAML, so `ssd=[/a,/b]` is a list.

    Raises:
        ConfigError: a word without `=`, or a value that is not YAML.
    """
    changes: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"{_shown(word)}: expected key=value, such as learning_rate=2e-5")
        try:
            changes[key.replace("-", "_")] = _loaded(value)
        except ValueError as error:
            raise ConfigError(f"{_shown(word)}: the value is not YAML ({error})") from error
    return changes


def _loaded(text: str) -> Any:
    """Return what `text` says as YAML; ValueError says in one line why it says nothing."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except ValueError as error:  # not from YAML's reader, but from what it makes numbers and dates with
        if "int_max_str_digits" in str(error):
            raise ValueError(f"a number of more than {sys.get_int_max_str_digits()} digits") from error
        raise
    except (LookupError, AttributeError) as error:  # a tag such as !!bool before what is none
        raise ValueError("a value that is not of the type that its tag names") from error
    except RecursionError as error:
        raise ValueError("lists or mappings too deep in one another") from error


def _shown(value: object) -> str:
    """Return `value` as an error shows it: whole, unless that fills the screen."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no number of more than some thousand digits
        return "a number of thousands of digits"
    half = _MOST_SHOWN_LETTERS // 2
    return text if len(text) <= _MOST_SHOWN_LETTERS else f"{text[:half]}...{text[-half:]}"


def refuse_unknown_keys(values: Mapping[str, Any], known: Mapping[str, Any], source: str) -> None:
    """Raise ConfigError for the first key of `values` that is not in `known`, naming the nearest that is."""
    for key in values:
        if key in known:
            continue
        plain = str(key).replace("-", "_").lower()
        near = [_ELSEWHERE[plain]] if plain in _ELSEWHERE else difflib.get_close_matches(plain, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys are {', '.join(known)}"
        raise ConfigError(f"{source}: unknown key {key!r}; {hint}")


def _words(detail: Any) -> str:
    key = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "missing":
        return f"{key} is missing"
    message = detail["msg"].removeprefix("Value error, ").removeprefix("size: ")
    found = "" if detail["type"] == "value_error" else f", found {_shown(detail['input'])}"
    return f"{key}: {message}{found}" if key else message
