"""What a run does besides its steps, as lines of its plan: evaluations, and models that are kept."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from headrace.plan.forecast.forecast import forecast, scoring_seconds
from headrace.plan.value.plan import Plan
from headrace.plan.value.results import SAVING_ROW
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.plain_figures import plain_figure
from headrace.terms.sizes import format_bytes, format_seconds

_SECONDS_PER_DAY = 86_400.0


class BesideSteps(ABC):
    """What is done besides steps; `label` begins its line."""

    label: ClassVar[str]
    keys: ClassVar[Mapping[str, str]]

    @abstractmethod
    def timed(self, plan: Plan, ceilings: Ceilings) -> Self:
        """Return it with what it takes under a plan on a machine."""

    def spacing_seconds(self, written_bytes: float) -> float:
        """Return the least seconds from the begin of one step, which writes so many bytes, to that of the next."""
        return 0.0

    @abstractmethod
    def explain(self) -> str:
        """Return it in words."""

    def to_json(self) -> dict[str, Any]:
        """Return the figures as plain JSON values, by the names that scripts know."""
        return {key: getattr(self, name) for key, name in self.keys.items()}


@dataclass(frozen=True, kw_only=True)
class Evaluating(BesideSteps):
    """The evaluations of a run: how many there are, and of each the rows, the passes that these take, and the seconds."""

    times: int
    rows: int
    passes: int
    seconds: float | None = None
    label: ClassVar[str] = "evaluate"
    keys: ClassVar[Mapping[str, str]] = {
        "evaluations": "times",
        "evaluation_rows": "rows",
        "evaluation_passes": "passes",
        "evaluation_seconds": "seconds",
    }

    def timed(self, plan: Plan, ceilings: Ceilings) -> Self:
        """Return it with the seconds of one."""
        return replace(self, seconds=self.passes * scoring_seconds(plan, ceilings))

    def explain(self) -> str:
        """Return it in words."""
        took = "" if self.seconds is None else f"{format_seconds(self.seconds)} each time, "
        return f"{self.rows} held-out rows, {_times(self.times)}; {took}in the memory of a step"


@dataclass(frozen=True, kw_only=True)
class Keeping(BesideSteps):
    """The models that a run keeps: how many are written (None: unknown) and of each the bytes, seconds and memory.

    A stored weight has `weight_bytes`. Without `memory_bytes`, a step waits until a model is written.
    """

    times: int | None
    weight_bytes: int = 2
    num_bytes: int = 0
    moved_bytes: int = 0
    memory_bytes: int = 0
    seconds: float | None = None
    label: ClassVar[str] = "keep"
    keys: ClassVar[Mapping[str, str]] = {
        "checkpoints": "times",
        "checkpoint_bytes": "num_bytes",
        "checkpoint_moved_bytes": "moved_bytes",
        "checkpoint_memory_bytes": "memory_bytes",
        "checkpoint_seconds": "seconds",
    }

    def timed(self, plan: Plan, ceilings: Ceilings) -> Self:
        """Return it with what one model takes: it is read from the state's drives, and written at the rate of the slowest."""
        beside = sum(plan.trained_bytes(unit) for unit, figures in enumerate(plan.units) if figures.is_beside)
        size, read = (beside, beside) if beside else (plan.num_parameters * self.weight_bytes, _state_bytes(plan, self))
        drives, seconds = ceilings.drives, None
        if drives:
            reading = sum(each.read_bytes_per_second for each in drives)
            seconds = read / reading + size / min(each.write_bytes_per_second for each in drives)
        memory_bytes = plan.results.peak_bytes["host"].get(SAVING_ROW, 0)
        return replace(self, num_bytes=size, moved_bytes=read + size, seconds=seconds, memory_bytes=memory_bytes)

    def explain(self) -> str:
        """Return it in words."""
        moved = f"about {format_bytes(self.num_bytes)} each, {format_bytes(self.moved_bytes)} to read and write"
        if self.seconds:
            rate = plain_figure(self.moved_bytes / self.seconds / 1e9)
            moved += f" at {rate} GB/s, {format_seconds(self.seconds)}"
        how = f"beside the next step, in {format_bytes(self.memory_bytes)}" if self.memory_bytes else "the next step waits"
        return f"a model, {'as asked' if self.times is None else _times(self.times)}; {moved}; {how}"


@dataclass(frozen=True, kw_only=True)
class Pacing(BesideSteps):
    """A limit on what a day's steps write to the SSDs: steps wait so long that no 24 hours have more.

    `seconds` are those from the begin of one step to the next, with the bytes that the plan forecasts.
    """

    most_bytes: int
    seconds: float = 0.0
    label: ClassVar[str] = "pace"
    keys: ClassVar[Mapping[str, str]] = {"max_write_per_day": "most_bytes", "spacing_seconds": "seconds"}

    @classmethod
    def asked(cls, most_bytes: int | None) -> list[Self]:
        """Return the limit, if there is one."""
        return [] if most_bytes is None else [cls(most_bytes=most_bytes)]

    @property
    def limit_words(self) -> str:
        """The limit in words."""
        return f"max_write_per_day {format_bytes(self.most_bytes)}"

    def timed(self, plan: Plan, ceilings: Ceilings) -> Self:
        """Return it with the seconds that the limit leaves between steps."""
        return replace(self, seconds=self.spacing_seconds(forecast(plan, ceilings).ssd_bytes_written_per_step))

    def spacing_seconds(self, written_bytes: float) -> float:
        """Return the seconds after which the next step may begin. 24 hours may touch one step more than goes into them.

        A step that alone writes more than the limit waits as many days as that takes.
        """
        rest_bytes = self.most_bytes - written_bytes
        return _SECONDS_PER_DAY * written_bytes / (rest_bytes if rest_bytes > 0 else self.most_bytes)

    def explain(self) -> str:
        """Return it in words."""
        return f"{self.limit_words} lets a step begin each {format_seconds(self.seconds)}"


def _state_bytes(plan: Plan, keeping: Keeping) -> int:
    """Return the bytes that are read for a model: its weights alone, if its files have them as compute reads them."""
    if plan.compute_dtype == "bfloat16" and keeping.weight_bytes == 2:
        return sum(map(plan.stored_bytes, range(len(plan.units))))
    return sum(plan.stored_bytes(unit) + plan.state_bytes(unit) for unit in range(len(plan.units)))


def _times(count: int) -> str:
    return f"{count} time{'s' if count != 1 else ''}"
