"""What the user chooses about the update: AdamW, its parameter groups, and the learning-rate schedule."""

import math
import re
from dataclasses import dataclass

from headrace.terms.errors import ConfigError
from headrace.terms.layout import MOMENTS


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


@dataclass(frozen=True, slots=True)
class AdamW:
    """AdamW with decoupled weight decay (Loshchilov & Hutter 2019, algorithm 2), the rule of `torch.optim.AdamW`.

    Norm weights and biases (parameters with fewer than two dimensions, and those named `*norm*` or `*bias`) are not decayed.
    `groups` are tried in order, the first match wins; a group's `weight_decay=None` means the rule above.
    `moments` says how the two moments are kept: one of `MOMENTS`, of which float32 alone is exact AdamW.
    """

    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    groups: tuple[ParameterGroup, ...] = ()
    moments: str = "float32"

    def __post_init__(self) -> None:
        if self.moments not in MOMENTS:
            raise ConfigError(f"moments: {self.moments!r} is not one of {', '.join(MOMENTS)}")
        _check_not_negative("lr", self.lr)
        _check_not_negative("weight_decay", self.weight_decay)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas: expected two numbers in [0, 1), found {self.betas}")
        if not (self.eps > 0 and math.isfinite(self.eps)):
            raise ConfigError(f"eps: expected a finite number > 0, found {self.eps}")

    def group_of(self, name: str, num_dimensions: int) -> tuple[float, float]:
        """Return `(learning_rate_scale, weight_decay)` of the parameter called `name`."""
        plain = num_dimensions < 2 or name.endswith("bias") or "norm" in name.lower()
        decay = 0.0 if plain else self.weight_decay
        for group in self.groups:
            if re.search(group.pattern, name):
                return group.learning_rate_scale, decay if group.weight_decay is None else group.weight_decay
        return 1.0, decay


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
