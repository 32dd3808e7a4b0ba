"""What `headrace plan` answers, as a value.

Invariant: it fits if and only if there is a plan, and a plan's peaks are within what is allowed.
"""

from dataclasses import dataclass, field
from typing import Any

from headrace.plan.endurance import Endurance
from headrace.plan.forecast import Forecast
from headrace.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A variant that fits: what to change, in words and as options, and what it gives before any search for what to replay.

    If the plan fits, its alternatives are variants that would be faster where the SSDs limit the step, otherwise unchanged.
    """

    change: str
    options: dict[str, Any]
    step_seconds: float
    tokens_per_second: float
    peak_bytes: dict[str, int]
    ssd_bytes_written_per_step: int

    def to_json(self) -> dict[str, Any]:
        """Return the alternative as plain JSON values."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """Whether a model can be trained on a machine, how, how fast, and what would be better.

    `reason` says why it does not fit. `needed_bytes` and `allowed_bytes` are per tier. `needed_bytes` are the plan's peaks.
    Without a plan they are the needs of the leanest plan in the tier that lacks most. `doubled` maps a resource, in words, to
    the seconds per step with twice of it. `measured` is false where the machine is a nominal one, because there is no profile.
    `unused_tensors` are stored with the model, which has no place for them; None where no files were opened.
    """

    model: str
    parameters: int
    compute_dtype: str
    rule: str
    tokens_per_step: int
    sequence_length: int
    machine: str
    measured: bool
    allowed_bytes: dict[str, int]
    needed_bytes: dict[str, int] = field(default_factory=dict)
    reason: str = ""
    plan: Plan | None = None
    forecast: Forecast | None = None
    endurance: Endurance | None = None
    doubled: dict[str, float] = field(default_factory=dict)
    alternatives: tuple[Alternative, ...] = ()
    unused_tensors: tuple[str, ...] | None = None

    @property
    def fits(self) -> bool:
        """Whether there is a plan within the budgets."""
        return self.plan is not None

    def to_json(self) -> dict[str, Any]:
        """Return one object of plain JSON values; unknown figures are null."""
        forecast, endurance, plan = self.forecast, self.endurance, self.plan
        values: dict[str, Any] = {
            "model": self.model,
            "parameters": self.parameters,
            "compute_dtype": self.compute_dtype,
            "rule": self.rule,
            "tokens_per_step": self.tokens_per_step,
            "sequence_length": self.sequence_length,
            "machine": self.machine,
            "measured": self.measured,
            "fits": self.fits,
            "reason": self.reason,
            "peak_bytes": self.needed_bytes,
            "allowed_bytes": self.allowed_bytes,
            "peak_bytes_by_purpose": plan.results.peak_bytes if plan else None,
            "step_seconds": forecast.step_seconds if forecast else None,
            "lower_bound_seconds": forecast.lower_bound_seconds if forecast else None,
            "tokens_per_second": forecast.tokens_per_second if forecast else None,
            "bottleneck": forecast.explanation if forecast else None,
            "bottleneck_lane": str(forecast.bottleneck) if forecast else None,
            "utilisation": {str(lane): share for lane, share in forecast.utilisation.items()} if forecast else None,
            "ssd_bytes_read_per_step": forecast.ssd_bytes_read_per_step if forecast else None,
            "ssd_bytes_written_per_step": forecast.ssd_bytes_written_per_step if forecast else None,
            "step_seconds_with_twice": self.doubled,
            "plan": plan.to_json() if plan else None,
            "alternatives": [alternative.to_json() for alternative in self.alternatives],
        }
        if self.unused_tensors is not None:
            values["unused_tensors"] = list(self.unused_tensors)
        if endurance is not None:
            values |= {
                "num_steps": endurance.num_steps,
                "run_hours": endurance.run_hours,
                "written_terabytes": endurance.written_terabytes,
                "share_of_endurance": endurance.share_of_rating,
            }
        return values
