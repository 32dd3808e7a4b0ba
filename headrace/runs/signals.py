"""SIGINT and SIGTERM: the first asks for an orderly stop after the running step, the second kills at once. SIGUSR1 asks for a
checkpoint after the running step.

Invariant: handlers are restored as they were found. Killing at once is safe because every step is a checkpoint
(docs/decisions/0004).
"""

import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection
from types import FrameType, TracebackType
from typing import Any, Self

from headrace.terms.errors import HeadraceError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(HeadraceError):
    """The run was stopped by `signal_number` after `step` committed steps and can be resumed."""

    def __init__(self, message: str, *, signal_number: int, step: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number
        self.step = step

    @property
    def exit_code(self) -> int:
        """The exit code that shells expect: 130 after SIGINT, 143 after SIGTERM."""
        return 128 + self.signal_number


class _Heeded(ABC):
    """While open, `note` gets `signals`. Outside of the main thread it does nothing, as Python requires."""

    signals: Collection[signal.Signals]

    def __init__(self) -> None:
        self._found: dict[signal.Signals, Any] = {}

    @abstractmethod
    def note(self, number: int) -> None:
        """Take note that a signal came."""

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._found = {number: signal.signal(number, self._came) for number in self.signals}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for number, handler in self._found.items():
            signal.signal(number, handler)
        self._found = {}

    def _came(self, number: int, frame: FrameType | None) -> None:
        self.note(number)


class StopRequest(_Heeded):
    """While open, notes the first stop signal in `received`."""

    signals = STOP_SIGNALS
    received: int | None = None

    def note(self, number: int) -> None:
        """Keep the signal; the next one ends the process at once."""
        self.received = number
        for each in STOP_SIGNALS:
            signal.signal(each, signal.SIG_DFL)


class SaveRequest(_Heeded):
    """While open, notes in `received` that a checkpoint is asked for."""

    signals = (signal.SIGUSR1,)
    received = False

    def note(self, number: int) -> None:
        """Keep the request until somebody takes it."""
        self.received = True
