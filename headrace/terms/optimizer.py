"""What the user chooses about the update: the rule, its parameter groups, and the learning-rate schedule."""

import math
import re
from dataclasses import dataclass, fields, replace
from typing import Any

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


class Optimizer:
    """A rule of updates with its options. Norms and biases (parameters with fewer than two dimensions, and those named `*norm*`
    or `*bias`) are not decayed. `groups` are tried in order, the first match wins; a group's `weight_decay=None` means that.
    """

    __slots__ = ()

    lr: float
    weight_decay: float
    groups: tuple[ParameterGroup, ...]

    def group_of(self, name: str, num_dimensions: int) -> tuple[float, float]:
        """Return `(learning_rate_scale, weight_decay)` of the parameter called `name`."""
        plain = num_dimensions < 2 or name.endswith("bias") or "norm" in name.lower()
        decay = 0.0 if plain else self.weight_decay
        for group in self.groups:
            if re.search(group.pattern, name):
                return group.learning_rate_scale, decay if group.weight_decay is None else group.weight_decay
        return 1.0, decay

    def smaller(self) -> "tuple[str, dict[str, str], Optimizer] | None":
        """Return the same rule with smaller states: the change in words, as options, and made; None if there is none."""
        return None


@dataclass(frozen=True, slots=True)
class AdamW(Optimizer):
    """AdamW with decoupled weight decay (Loshchilov & Hutter 2019, algorithm 2), the rule of `torch.optim.AdamW`.

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

    def smaller(self) -> tuple[str, dict[str, str], Optimizer] | None:
        """Return AdamW with 8-bit moments, if it has larger ones."""
        if self.moments == "int8":
            return None
        bits = {"float32": 32, "bfloat16": 16}[self.moments]
        words = f"moments of 8 bits instead of {bits} (rounded at random: not exact AdamW)"
        return words, {"moments": "int8"}, replace(self, moments="int8")


@dataclass(frozen=True, slots=True)
class SGD(Optimizer):
    """Stochastic gradient descent with momentum, the rule of `torch.optim.SGD`: decay is added to the gradient.

    One fp32 state, the momentum buffer: 8 bytes per parameter with bfloat16 compute, where AdamW takes 12. Without momentum
    there is none: 4 bytes are the master alone.
    """

    lr: float = 1e-3
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    groups: tuple[ParameterGroup, ...] = ()

    def __post_init__(self) -> None:
        _check_not_negative("lr", self.lr)
        _check_not_negative("weight_decay", self.weight_decay)
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum: expected a number from 0 up to, but below, 1, found {self.momentum}")
        if self.nesterov and not self.momentum:
            raise ConfigError("nesterov: looks ahead by the momentum, which is 0; give one, or leave nesterov out")


OPTIMIZERS: dict[str, type[Optimizer]] = {"adamw": AdamW, "sgd": SGD}


# Fields that every optimizer has, which are options of a run by names of their own.
_COMMON = ("lr", "weight_decay", "groups")


def parse_optimizer(text: str) -> tuple[type[Optimizer], dict[str, Any]]:
    """Return the rule that `text` names and its own options: `sgd`, or `sgd:momentum=0.9,nesterov=true`.

    Raises:
        ConfigError: no such rule, or an option or a value that it has not; the message names those that it has.
    """
    name, colon, rest = text.partition(":")
    if name not in OPTIMIZERS:
        raise ConfigError(f"optimizer: {name!r} is not one of {', '.join(OPTIMIZERS)}")
    kind = OPTIMIZERS[name]
    defaults: dict[str, Any] = {each.name: each.default for each in fields(kind)}  # type: ignore[arg-type]
    known = {key: default for key, default in defaults.items() if key not in _COMMON and kind is not AdamW}
    values: dict[str, Any] = {}
    for word in rest.split(",") if colon else ():
        key, _, value = word.partition("=")
        if key not in known:
            has = f"has the options {', '.join(known)}" if known else "has adam_betas, adam_epsilon and moments for a run"
            raise ConfigError(f"optimizer: {key!r} is no option of {name}, which {has}")
        values[key] = _read(f"optimizer: {key}", value, known[key])
    return kind, values


def _read(name: str, text: str, default: float | bool) -> float | bool:
    """Return `text` as a value of the type of `default`."""
    if isinstance(default, bool):
        if text.lower() not in ("true", "false"):
            raise ConfigError(f"{name}: expected true or false, found {text!r}")
        return text.lower() == "true"
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{name}: expected a number, found {text!r}") from None


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
            f"warmup_steps: {self.warmup_steps} steps of warm-up in a run of {self.total_steps}: the learning rate ends at "
            f"{self.factor(self.total_steps - 1):.3g} of what was asked and never reaches it; give fewer of them"
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
