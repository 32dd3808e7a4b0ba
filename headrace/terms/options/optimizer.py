"""What the user chooses about the update: options of all rules, the name of a rule, and the learning-rate schedule.

Not here: the rules and their own settings; each is a file in `update/rules/`.
"""

import math
import re
from dataclasses import dataclass, fields
from typing import ClassVar

from headrace.terms.errors import ConfigError
from headrace.terms.layout import FROZEN, is_matrix
from headrace.terms.options.declared import Declaration, option
from headrace.terms.options.named import Named
from headrace.terms.options.option_kinds import Listed, Number, OneOf, RecordOf

# What `--train` may ask for: every parameter, or the matrices of blocks alone.
ALL, MATRICES = "all", "matrices"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGroup:
    """Parameters whose name matches `pattern` (a regular expression, searched) get their own decay and learning-rate factor."""

    pattern: str
    weight_decay: float | None = None
    learning_rate_scale: float = 1.0

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ConfigError(f"pattern: {self.pattern!r} is no regular expression ({error})") from error
        _check_not_negative("learning_rate_scale", self.learning_rate_scale)
        if self.weight_decay is not None:
            _check_not_negative("weight_decay", self.weight_decay)


@dataclass(frozen=True, kw_only=True)
class Optimizer(Named):
    """What every rule of updates is told. A rule's own settings are further fields of a subclass, declared as options are.

    Norms and biases are not decayed: parameters with fewer than two dimensions, weights that only multiply element by element,
    and those named `*bias`. What no input reaches, or what the model itself keeps as it is, is frozen.
    `groups` are tried in order, the first match wins; a group's `weight_decay=None` stands for the one given here. Nothing that
    `train` leaves as it is gets updated.
    """

    gives_up: ClassVar[str] = ""
    """What is given up in comparison with AdamW, in words, where the rule is offered in its place."""
    is_offered: ClassVar[bool] = False
    """Whether a plan offers it in place of a rule that keeps more."""

    lr: float = option(1e-5, Number())
    weight_decay: float = option(0.0, Number())
    groups: tuple[ParameterGroup, ...] = option((), Listed(RecordOf(ParameterGroup)))
    train: str = option(ALL, OneOf((ALL, MATRICES)))

    @classmethod
    def settings(cls) -> tuple[Declaration, ...]:
        """Return the declarations of the rule's own settings."""
        common = {each.name for each in fields(Optimizer)}
        return tuple(each for each in cls.declarations() if each.key not in common)

    def group_of(self, name: str, num_dimensions: int, kind: str = "") -> tuple[float, float]:
        """Return `(learning_rate_scale, weight_decay)` of the parameter called `name`; `kind` is as in `is_matrix`."""
        decay = self.weight_decay if is_matrix(name, num_dimensions, kind) else 0.0
        if not self.trains(name, num_dimensions, kind, is_block=True):
            return LEFT
        for group in self.groups:
            if re.search(group.pattern, name):
                return group.learning_rate_scale, decay if group.weight_decay is None else group.weight_decay
        return 1.0, decay

    def trains(self, name: str, num_dimensions: int, kind: str = "", *, is_block: bool) -> bool:
        """Return whether the parameter called `name`, of a block or of what is around them, is trained."""
        return kind != FROZEN and (self.train == ALL or (is_block and is_matrix(name, num_dimensions, kind)))

    def smaller(self) -> "tuple[str, Optimizer] | None":
        """Return the same rule with smaller states: what changes, in words, and the rule; None if there is none."""
        return None


# The learning-rate scale and decay of parameters that stay as they are beside others of their unit: an update changes nothing.
LEFT = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Learning-rate factor over steps: `constant`, `linear` or `cosine`, after `warmup_steps` of linear rise from 0.

    The same curves as `transformers.get_scheduler` with those names.
    """

    kind: str = "constant"
    warmup_steps: int = 0
    total_steps: int = 0

    KINDS = ("constant", "linear", "cosine")

    def __post_init__(self) -> None:
        if self.kind not in self.KINDS:
            raise ConfigError(f"lr_schedule: {self.kind!r} is not one of {', '.join(self.KINDS)}")
        if self.kind != "constant" and self.total_steps < 1:
            raise ConfigError(f"lr_schedule: {self.kind} falls to 0 over total_steps, found {self.total_steps}; say how many")

    @property
    def warning(self) -> str:
        """What a person should know of it; empty where there is nothing."""
        if not 0 < self.total_steps <= self.warmup_steps:
            return ""
        return (
            f"warmup_steps: {self.warmup_steps} steps of warm-up in a run of {self.total_steps}. The learning rate ends at "
            f"{self.factor(self.total_steps - 1):.3g} of what was asked and never reaches it; give fewer warm-up steps"
        )

    def factor(self, step: int) -> float:
        """Return the factor on the base learning rate for the update of step `step` (counted from 0)."""
        if step < self.warmup_steps:
            return step / max(1, self.warmup_steps)
        if self.kind == "constant":
            return 1.0
        done = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        if self.kind == "linear":
            return max(0.0, 1.0 - done)
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * min(1.0, done))))


def _check_not_negative(name: str, value: float) -> None:
    if not (value >= 0 and math.isfinite(value)):
        raise ConfigError(f"{name}: expected a finite number >= 0, found {value}")
