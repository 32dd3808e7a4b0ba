"""What a run was opened with: all that `resume` needs besides the state."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from headrace.terms.errors import ConfigError
from headrace.terms.layout import plane_set
from headrace.terms.optimizer import AdamW, ParameterGroup, Schedule

# The file of an exported model that says what it is: of which run, after how many steps.
PROVENANCE_NAME = "headrace.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a run was opened with: all that `resume` needs besides the state. JSON round trip."""

    model_dir: str
    device_bytes: int | None
    host_bytes: int | None
    optimizer: AdamW
    schedule: Schedule
    max_grad_norm: float | None
    compute_dtype: str
    tokens_per_step: int | None
    sequence_length: int | None
    seed: int
    checkpoint_every: int | None
    interpreter: str
    gradient_dtype: str | None = None  # of drained gradients; None: the compute dtype
    machine: dict[str, Any] | None = None  # measured ceilings, as JSON: those of the run's directories
    compile_blocks: bool = False
    liger: bool = False
    moments: str = "float32"  # how AdamW's moments are kept; runs from before there was a choice name none

    def __post_init__(self) -> None:
        plane_set(self.compute_dtype, self.moments)
        if self.gradient_dtype not in (None, "float32", self.compute_dtype):
            raise ConfigError(
                f"gradient_dtype: {self.gradient_dtype!r} is neither float32 nor the compute dtype {self.compute_dtype}"
            )
        if self.max_grad_norm is not None and not (self.max_grad_norm > 0 and math.isfinite(self.max_grad_norm)):
            raise ConfigError(
                f"max_grad_norm: expected a finite number > 0, or None for no clipping; found {self.max_grad_norm}"
            )
        if self.interpreter not in ("overlapped", "plain"):
            raise ConfigError(f"interpreter: {self.interpreter!r} is neither overlapped nor plain")
        if self.checkpoint_every is not None and self.checkpoint_every < 1:
            raise ConfigError(f"checkpoint_every: expected a number of steps from 1, found {self.checkpoint_every}")
        if self.compile_blocks and self.liger:
            raise ConfigError("compile_blocks and liger: both fuse the same operators of a block; give one of them")

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Settings":
        """Inverse of `to_json`."""
        known = dict(values)
        optimizer = dict(known["optimizer"])
        optimizer["betas"] = tuple(optimizer["betas"])
        optimizer["groups"] = tuple(ParameterGroup(**group) for group in optimizer["groups"])
        known["optimizer"] = AdamW(**optimizer)
        known["schedule"] = Schedule(**known["schedule"])
        return cls(**known)
