"""What the gradient's norm decides: the factor on the gradient, or that the step is skipped; and the loss scale of float16.

Invariant: a gradient with an infinity or a NaN never reaches an update.
"""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from headrace.terms.errors import ConfigError

# As in torch.nn.utils.clip_grad_norm_: it keeps the divisor above zero where the norm is zero.
_NORM_GUARD = 1e-6
# Below 1 the scale would make gradients smaller than they are; beyond 2^32 float16 gradients overflow at any useful size.
_SMALLEST_SCALE, _LARGEST_SCALE = 1.0, 2.0**32

HIT_WINDOW_STEPS = 32
DECISION_STEPS = 8


def clip_factor(total_norm: float, max_norm: float | None) -> float | None:
    """Return the factor on the gradient, at most 1, or None: the norm is not finite and the step must be skipped.

    The rule of `torch.nn.utils.clip_grad_norm_`, in double precision: `max_norm / (total_norm + 1e-6)`, clamped to 1.
    `total_norm` is the 2-norm of the unscaled gradient over all units; `max_norm=None` clips nothing.

    Raises:
        ConfigError: `max_norm` is not positive.
    """
    if max_norm is not None and not max_norm > 0:
        raise ConfigError(f"max_grad_norm: expected a positive number or none, found {max_norm}")
    if not math.isfinite(total_norm):
        return None
    return 1.0 if max_norm is None else min(1.0, max_norm / (total_norm + _NORM_GUARD))


@dataclass(frozen=True, slots=True)
class HitRate:
    """The last steps' outcomes, from which it is decided whether to guess that the next gradients need no clipping: a value.

    A hit is a step whose gradients were neither clipped nor thrown away. The decision is reconsidered only every
    `DECISION_STEPS` steps, because a change of policy costs a pause.
    """

    outcomes: tuple[bool, ...] = ()
    num_steps: int = 0

    def after(self, hit: bool) -> "HitRate":
        """Return the value with one more step in it, and without steps older than the window."""
        return HitRate((*self.outcomes, hit)[-HIT_WINDOW_STEPS:], self.num_steps + 1)

    @property
    def is_due(self) -> bool:
        """Whether the decision is reconsidered at this step."""
        return self.num_steps > 0 and self.num_steps % DECISION_STEPS == 0

    def exceeds(self, break_even: float) -> bool:
        """Return whether hits were more frequent than `break_even`, a share of all steps."""
        return sum(self.outcomes) > break_even * len(self.outcomes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """The dynamic loss scale of float16 compute (Micikevicius et al. 2018), as a value: each step makes the next one.

    The loss is multiplied by `scale` and the gradient divided by it. `good_steps` counts steps since the last change.

    Raises:
        ConfigError: a field is out of the range in which a scale works.
    """

    scale: float = 2.0**16
    good_steps: int = 0
    growth: float = 2.0
    backoff: float = 0.5
    growth_interval_steps: int = 2000

    def __post_init__(self) -> None:
        if not (math.isfinite(self.scale) and self.scale > 0 and self.growth > 1 and 0 < self.backoff < 1):
            raise ConfigError(f"loss scale: expected scale > 0, growth > 1 and 0 < backoff < 1, found {self}")
        if not 0 <= self.good_steps < self.growth_interval_steps:
            raise ConfigError(f"loss scale: expected 0 <= good_steps < growth_interval_steps, found {self}")

    def after(self, step_ok: bool) -> "LossScale":
        """Return the scale for the next step: smaller at once if gradients overflowed, larger after a series of good steps."""
        if not step_ok:
            return replace(self, scale=max(self.scale * self.backoff, _SMALLEST_SCALE), good_steps=0)
        if self.good_steps + 1 < self.growth_interval_steps:
            return replace(self, good_steps=self.good_steps + 1)
        return replace(self, scale=min(self.scale * self.growth, _LARGEST_SCALE), good_steps=0)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "LossScale":
        """Return the value that `to_json` wrote.

        Raises:
            ConfigError: unknown or missing fields, or values out of their range.
        """
        if set(fields) != set(cls.__dataclass_fields__):
            expected = ", ".join(sorted(cls.__dataclass_fields__))
            raise ConfigError(f"loss scale: expected the fields {expected}; found {', '.join(sorted(fields))}")
        return cls(**fields)
