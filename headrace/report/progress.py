"""Progress for people: one live line in a terminal, one plain line for each step elsewhere.

Invariant: nothing is swallowed. Skipped steps and notices are always shown, on lines of their own.
"""

import statistics
from collections import deque
from typing import TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn

from headrace.terms.events import Evaluated, Event, Notice, OpDone, StepResult
from headrace.terms.plain_figures import plain_figure
from headrace.terms.sizes import format_seconds

_ETA_WINDOW_STEPS = 20
_BAR_WIDTH = 20
_WIDE = 100


class StepClock:
    """Remaining time from the median of the last steps. The first step (kernels compile, caches fill) counts only until there
    is another.

    Only steps of this process count, so the estimate is right after a resume too.
    """

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps
        self._first_seconds: float | None = None
        self._later_seconds: deque[float] = deque(maxlen=_ETA_WINDOW_STEPS)
        self._steps, self._evaluating_seconds = 0, 0.0

    def evaluated(self, seconds: float) -> None:
        """Take the seconds of an evaluation: others will follow as often as so far."""
        self._evaluating_seconds += seconds

    def remaining_seconds(self, result: StepResult) -> float:
        """Take a finished step and return the seconds that the rest of the run is expected to take."""
        if self._first_seconds is None:
            self._first_seconds = result.seconds
        else:
            self._later_seconds.append(result.seconds)
        self._steps += 1
        step_seconds = statistics.median(self._later_seconds or [self._first_seconds])
        step_seconds += self._evaluating_seconds / self._steps
        return max(0, self._total_steps - result.step) * step_seconds


def step_words(result: StepResult, *, total_steps: int, remaining_seconds: float) -> str:
    """Return the line of one step: step, loss, gradient norm, learning rate, speed, time left, bytes over the SSDs (10^9)."""
    return "  ".join(_words(result, total_steps, remaining_seconds).values())


def evaluation_words(result: Evaluated, *, total_steps: int) -> str:
    """Return the line of one evaluation: step, loss, tokens, seconds."""
    step = f"step {result.step:>{len(str(total_steps))}}/{total_steps}"
    return f"{step}  eval loss {result.loss:.4f}  {result.tokens} tokens  {format_seconds(result.seconds)}"


def live_words(result: StepResult, *, total_steps: int, remaining_seconds: float, width: int) -> str:
    """Return those words of a step that fit into `width` characters, the most important first; none is cut."""
    words = _words(result, total_steps, remaining_seconds)
    kept: list[str] = []
    for name in _MATTERS:
        if name in words and len("  ".join([*kept, words[name]])) <= width:
            kept.append(words[name])
    return "  ".join(kept)


# The words of a step in the order of importance, for a line that may be too narrow. A skipped step has a line of its own.
# Of what a loss measures beside itself, what people watch, and its word.
_WATCHED = {"reward": "reward", "frac_reward_zero_std": "frac_reward_zero_std", "rewards/accuracies": "accuracy"}
_MATTERS = ("step", "left", *_WATCHED, "loss", "ssd", "rate", "seconds", "grad norm", "lr", "loss scale")


def _words(result: StepResult, total_steps: int, remaining_seconds: float) -> dict[str, str]:
    """Return the words of a step, by name, in the order of the lines of a log."""
    words = {
        "step": f"step {result.step:>{len(str(total_steps))}}/{total_steps}",
        "loss": f"loss {round(result.loss, 4) + 0.0:.4f}",
    }
    words |= {name: f"{word} {result.metrics[name]:.3g}" for name, word in _WATCHED.items() if name in result.metrics}
    if result.grad_norm is not None:
        words["grad norm"] = f"grad norm {result.grad_norm:.3g}"
    words["lr"] = f"lr {result.learning_rate:.3g}"
    words["rate"] = rate_words(result.tokens_per_second)
    words["seconds"] = format_seconds(result.seconds)
    if result.loss_scale is not None:
        words["loss scale"] = f"loss scale {result.loss_scale:g}"
    if "ssd" in result.bytes_read or "ssd" in result.bytes_written:
        words["ssd"] = traffic_words(result.bytes_read.get("ssd", 0), result.bytes_written.get("ssd", 0))
    if result.step < total_steps:
        words["left"] = f"{format_seconds(remaining_seconds)} left"
    if result.skipped is not None:
        words["skipped"] = f"SKIPPED: {result.skipped}"
    return words


def rate_words(tokens_per_second: float) -> str:
    """Return a speed with three significant digits or whole tokens, never as a power of ten."""
    return f"{plain_figure(tokens_per_second)} tokens/s"


def traffic_words(read_bytes: float, written_bytes: float) -> str:
    """Return the bytes that went over the SSDs, in powers of ten, as drives are sold and rated."""
    return f"ssd {_decimal(read_bytes)} read {_decimal(written_bytes)} written"


def _decimal(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{plain_figure(num_bytes)} TB"


class LineProgress:
    """Writes one line for each step, evaluation and notice to `stream`: for logs, pipes and continuous integration."""

    def __init__(self, stream: TextIO, total_steps: int) -> None:
        self._stream, self._total_steps, self._clock = stream, total_steps, StepClock(total_steps)

    def __call__(self, event: Event) -> None:
        """Take an event."""
        if isinstance(event, StepResult):
            remaining = self._clock.remaining_seconds(event)
            self._write(step_words(event, total_steps=self._total_steps, remaining_seconds=remaining))
        elif isinstance(event, Evaluated):
            self._clock.evaluated(event.seconds)
            self._write(evaluation_words(event, total_steps=self._total_steps))
        elif isinstance(event, Notice):
            self._write(f"{event.level}: {event.text}")

    def close(self) -> None:
        """Flush; the stream belongs to the caller."""
        self._stream.flush()

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()  # a log that lags behind shows no progress


class LiveProgress:
    """One line at the bottom of a terminal: a bar and the words of the last step. Notices, evaluations and skipped steps scroll
    above it.
    """

    def __init__(self, console: Console, total_steps: int, *, done_steps: int = 0) -> None:
        self._total_steps, self._clock = total_steps, StepClock(total_steps)
        # A narrow line has only words: the first of them says the same as the bar.
        bar = [BarColumn(bar_width=_BAR_WIDTH)] if console.width >= _WIDE else []
        self._words_width = console.width - (_BAR_WIDTH + 1 if bar else 0)
        # A column with our own words instead of rich's, whose speed and time estimates count from the start of the process.
        self._progress = Progress(*bar, TextColumn("{task.description}", markup=False), console=console)
        self._task = self._progress.add_task("first step ...", total=total_steps, completed=done_steps)
        self._started = False

    def __call__(self, event: Event) -> None:
        """Take an event."""
        if isinstance(event, Notice):
            style = "yellow" if event.level == "warning" else "dim"
            self._progress.console.print(f"[{style}]{event.level}: {escape(event.text)}[/]", highlight=False)
            return
        if isinstance(event, Evaluated):
            self._clock.evaluated(event.seconds)
            self._progress.console.print(evaluation_words(event, total_steps=self._total_steps), highlight=False)
            return
        if not self._started and isinstance(event, OpDone | StepResult):  # the first step has begun
            self._progress.start()
            self._started = True
        if isinstance(event, StepResult):
            remaining = self._clock.remaining_seconds(event)
            if event.skipped is not None:
                words = step_words(event, total_steps=self._total_steps, remaining_seconds=remaining)
                self._progress.console.print(f"[yellow]{escape(words)}[/]", highlight=False)
            shown = live_words(event, total_steps=self._total_steps, remaining_seconds=remaining, width=self._words_width)
            self._progress.update(self._task, completed=event.step, description=shown)

    def close(self) -> None:
        """Leave the last line on the screen and release the terminal."""
        self._progress.stop()
