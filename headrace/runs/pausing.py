"""Where a run waits between two steps: for space on the disk of its records, and so that a day's limit of writes holds.

Invariant: a wait loses nothing, because the step before it is whole. It ends at once when the run is to stop.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headrace.ask.between_steps import Pacing
from headrace.runs.protocols import RunningEngine
from headrace.terms.errors import DiskFull
from headrace.terms.events import Notice, Sink, StepResult
from headrace.terms.sizes import MIB, format_bytes, format_seconds

# What stays free for records of steps: a step writes some 20 KB of lanes, now and then a timeline of a megabyte.
LEAST_FREE_BYTES = 16 * MIB
_EVERY_SECONDS = 1.0


@dataclass
class Pauses:
    """The waits of a run. `stopping` says whether it is to stop; `sink` is told why it waits, and when it goes on.

    `pacings` are the limits on what a day writes, if there are any.
    """

    directory: Path
    pacings: Sequence[Pacing]
    stopping: Callable[[], bool]
    sink: Sink
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _began_seconds: float = field(init=False)
    _is_told: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._began_seconds = self.clock()

    @classmethod
    def of(
        cls, most_bytes: int | None, directory: Path, engine: RunningEngine, stopping: Callable[[], bool], sink: Sink
    ) -> "Pauses":
        """Return the waits of a run whose steps write `most_bytes` a day at most (None: any number). What waits within a step
        of `engine` ends, too, when the run is to stop.
        """
        pauses = cls(directory, Pacing.asked(most_bytes), stopping, sink)
        engine.heed(pauses.stopped)
        return pauses

    def after_step(self, result: StepResult) -> None:
        """Wait until the next step may begin."""
        for pacing in self.pacings:
            self._pace(pacing, result.bytes_written.get("ssd", 0))
        self._wait_for_space()
        self._began_seconds = self.clock()

    def stopped(self) -> None:
        """Refuse to wait any longer where the run is to stop. It is called by what waits within a step.

        Raises:
            DiskFull: the run is to stop.
        """
        if self.stopping():
            raise DiskFull(f"{self.directory}: asked to stop while the run waited for space")

    def _pace(self, pacing: Pacing, written_bytes: int) -> None:
        seconds = pacing.spacing_seconds(written_bytes)
        if not self._is_told and seconds > self.clock() - self._began_seconds:
            self._is_told = True
            words = f"{pacing.limit_words} lets one begin each {format_seconds(seconds)}"
            self.sink(Notice(text=f"a step wrote {format_bytes(written_bytes)}: {words}", level="info"))
        while (left := self._began_seconds + seconds - self.clock()) > 0 and not self.stopping():
            self.sleep(min(left, _EVERY_SECONDS))

    def _wait_for_space(self) -> None:
        free = _free_bytes(self.directory)
        if free >= LEAST_FREE_BYTES:
            return
        words = f"{format_bytes(free)} are free, records of steps need {format_bytes(LEAST_FREE_BYTES)}; free some space"
        self.sink(Notice(text=f"{self.directory}: {words}: the run waits until then, and goes on by itself"))
        while _free_bytes(self.directory) < LEAST_FREE_BYTES:
            if self.stopping():
                return
            self.sleep(_EVERY_SECONDS)
        self.sink(Notice(text="there is space again, and the run goes on"))


def _free_bytes(directory: Path) -> int:
    """Return what is free in the file system of a directory; where nobody can say, as much as is needed."""
    try:
        status = os.statvfs(directory)
    except OSError:  # what writes there says what is wrong
        return LEAST_FREE_BYTES
    return status.f_bavail * status.f_frsize
