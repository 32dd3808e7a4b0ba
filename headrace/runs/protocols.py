"""What the training loop needs of the engine and of the screen: two protocols.

Invariant: the loop uses nothing else of either, so that both can be replaced, in tests and in programs that embed Headrace.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import torch

from headrace.plan.value.plan import Plan
from headrace.report import Reporter
from headrace.terms.events import Evaluation, StepResult
from headrace.terms.saving import Saving

if TYPE_CHECKING:
    from headrace.engine.replanning import Replanned


class ExportingEngine(Protocol):
    """What writes a finished model."""

    @property
    def provenance(self) -> dict[str, Any]:
        """Which weights the newest ones are, as JSON values: the run, and its number of steps. Exports have it in a file."""

    @property
    def export_notes(self) -> tuple[str, ...]:
        """What a reader of the exported files should know."""

    def save_pretrained(self, out_dir: Path, notes: Mapping[str, str] = MappingProxyType({})) -> None:
        """Write an ordinary Hugging Face directory, with `notes` as files; it appears whole or not at all."""


class RunningEngine(ExportingEngine, AbstractContextManager["RunningEngine"], Protocol):
    """The part of `headrace.Engine` that the loop drives. The router's loss of a mixture is the mean over batches of
    `router_rows` rows; 0: all rows of a step, or of an evaluation, are one.
    """

    router_rows: int

    @property
    def plan(self) -> Plan | None:
        """The plan that the engine runs inside; None until it is known."""

    @property
    def step_index(self) -> int:
        """Steps taken so far: committed ones and the running one."""

    @property
    def position(self) -> Any:
        """The JSON value stored with the last committed step; None before the first."""

    def step(
        self, batch: Mapping[str, torch.Tensor], *, position: Any = None, learning_rate: float | None = None
    ) -> StepResult:
        """Take one optimizer step; a `learning_rate` stands in for that of the schedule."""

    def evaluate(self, batch: Mapping[str, torch.Tensor]) -> Evaluation:
        """Return the mean loss of a batch under the newest weights, and change nothing."""

    def log_probs(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the log-probability of each row's trained tokens together, under the newest weights."""

    def flush(self) -> None:
        """Finish and commit everything under way."""

    def plan_again(self) -> "Replanned | None":
        """Go on under another plan if one is forecast much faster by the steps so far; return what is changed, if anything."""

    def begin_saving(self, out_dir: Path, notes: Mapping[str, str] = MappingProxyType({})) -> Saving:
        """Begin to do as `save_pretrained` does; steps may go on meanwhile."""

    def heed(self, check: Callable[[], None]) -> None:
        """Call `check` while a write waits for space; what it raises ends the wait, and the step."""

    def remove_state(self) -> None:
        """Delete the run's state from the SSD tier."""

    def close(self) -> None:
        """Free everything."""


@dataclass(frozen=True, slots=True)
class Engines:
    """How a run gets its engine: `open` and `resume` of `headrace.Engine`, and what must be known before.

    `open` also takes `measure`, which is asked for the figures of the machine with the first plan, and `packed`, the rows
    with which the run begins. `why_not_packed` says why a
    model directory's architecture does not keep samples in rows of so many tokens apart ("": it does). `state_of` says what a
    run directory holds for `resume`. `discard` removes a state that was never completed, or not wholly removed. `heed` gets a
    function to call while an engine waits for others; the function raises if the run is to stop.
    """

    open: Callable[..., RunningEngine]
    resume: Callable[..., RunningEngine]
    why_not_packed: Callable[[Path, int], str]
    state_of: Callable[[Path], "StateKind"]
    discard: Callable[[Path], None]
    heed: Callable[[Callable[[], None]], None] = lambda check: None


class StateKind(Enum):
    """The engine's state in a run directory: none at all, begun but never committed, or committed at least once."""

    NONE = "none"
    BEGUN = "begun"
    COMMITTED = "committed"


class Display(Protocol):
    """Where a run shows itself."""

    def say(self, text: str) -> None:
        """Show lines of text once."""

    def progress(self, total_steps: int) -> Reporter:
        """Return the reporter that shows steps and notices."""


class NoDisplay:
    """Shows nothing: for programs that read `metrics.jsonl` or give their own display."""

    def say(self, text: str) -> None:
        """Ignore the text."""

    def progress(self, total_steps: int) -> Reporter:
        """Return a reporter that does nothing."""
        return _Silent()


class _Silent:
    def __call__(self, event: object) -> None:
        """Ignore the event."""

    def close(self) -> None:
        """Do nothing: nothing is held."""
