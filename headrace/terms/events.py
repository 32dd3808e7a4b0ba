"""What components tell the outside while a run goes on. A sink is any callable that takes an event."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

NO_STEP = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class OpDone:
    """An operation of a step ran on `lane` from `start_seconds` to `stop_seconds` (one monotonic clock for all lanes). Those of
    a pass that scores rows have the `step` `NO_STEP`.
    """

    step: int
    label: str
    verb: str
    lane: str
    unit: int
    micro: int
    chunk: int
    start_seconds: float
    stop_seconds: float
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The mean loss over the `tokens` of a batch that have labels; or a loss of the whole batch, of `rows` sequences."""

    loss: float
    tokens: int
    rows: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one optimizer step did. `bytes_read` and `bytes_written` are per tier name; `peak_bytes` too.

    `tokens` are the positions of the batch, padding included. Bytes are those moved since the step before, for whichever step:
    updates still run while the next step does. `update_policy` is the plan's; `redone`: updates were begun on the guess that
    nothing is clipped, and done again. `estimation_errors` are by matrix, for the projectors that the step checked: the error
    of the projector in use on held-out gradients, and that of another one if it was tried. `io_cpu_seconds` is the CPU time of
    the I/O threads, system calls included, and of checksums that the update did not take. `metrics` are a loss's own figures.
    """

    step: int
    loss: float
    grad_norm: float | None
    learning_rate: float
    tokens: int
    trained_tokens: int
    seconds: float
    skipped: str | None = None
    loss_scale: float | None = None
    update_policy: str = ""
    redone: bool = False
    bytes_read: dict[str, int] = field(default_factory=dict)
    bytes_written: dict[str, int] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    io_cpu_seconds: float | None = None
    estimation_errors: dict[str, tuple[float, float | None]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the step over its wall time."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """Held-out data were evaluated after step `step`: the mean loss over all their `tokens` that have labels."""

    step: int
    loss: float
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Something a person should know: a fall-back, a skipped step, a slow disk. `level` is `info` or `warning`."""

    text: str
    level: str = "warning"


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """Step `step` is durable."""

    step: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Flushed:
    """All that steps had left under way is done. The figures are what it moved after the last `StepResult`."""

    bytes_read: dict[str, int]
    bytes_written: dict[str, int]
    io_cpu_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A new run has its plan (`headrace.plan.value.plan.Plan`), and nothing of the model has been read yet."""

    plan: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPass:
    """All `seats` of a generation went through the model once, for `rows` rows, of which `finished` only wait for others.

    `entering` of the seats ran tokens of their prompts, and `begun` of these came to their first new token. Single experts:
    so many were `wanted`, of which `found` were in memory; compute waited `router_seconds` for experts that routers chose.
    Of `bytes_read`, which are all that drives gave, `cache_bytes_read` were keys and values.
    """

    number: int
    seats: int
    rows: int
    finished: int
    seconds: float
    bytes_read: int
    entering: int = 0
    begun: int = 0
    wanted: int = 0
    found: int = 0
    router_seconds: float = 0.0
    cache_bytes_read: int = 0


Event = GenerationPass | OpDone | StepResult | Evaluated | Notice | Committed | Flushed | Planned
Sink = Callable[[Event], None]
