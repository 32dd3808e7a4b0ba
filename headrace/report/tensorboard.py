"""TensorBoard events, on request. The package `tensorboard` is an optional dependency.

Events are written at once, and not by the package's own writer, which has a thread that a full disk ends with a traceback.
Invariant: after a resume, points of steps that were not committed are purged, so no step is drawn twice.
"""

import itertools
import os
import socket
import time
from pathlib import Path
from typing import Any

from headrace.report.scalars import scalars_of
from headrace.terms.errors import ConfigError
from headrace.terms.events import Event

_FILE_VERSION = "brain.Event:2"  # readers expect this in the first record


class TensorBoard:
    """Writes scalars under the names that people search for: `train/loss`, `eval/loss`, `train/grad_norm`, ...

    Raises:
        ConfigError: the package `tensorboard` is not installed.
    """

    def __init__(self, directory: Path, *, committed_steps: int = 0) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise ConfigError(
                "report_to: tensorboard was asked for, but its package is missing; run `pip install tensorboard`"
            ) from error
        self._events: Any = event_pb2
        self._summaries: Any = summary_pb2
        directory.mkdir(parents=True, exist_ok=True)
        self._file = _new_file(directory)
        self._writer: Any = RecordWriter(self._file)
        self._put(file_version=_FILE_VERSION)
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._put(step=committed_steps + 1, session_log=start)
        self._file.flush()

    def __call__(self, event: Event) -> None:
        """Take the end of a step or of an evaluation."""
        found = scalars_of(event)
        if found is not None:
            step, scalars = found
            values = [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
            self._put(step=step, summary=self._summaries.Summary(value=values))
            self._file.flush()

    def close(self) -> None:
        """Close the event file. A second call does nothing."""
        self._file.close()

    def _put(self, **fields: Any) -> None:
        self._writer.write(self._events.Event(wall_time=time.time(), **fields).SerializeToString())


def _new_file(directory: Path) -> Any:
    """Open a file with a name that readers look for; those of earlier processes stay, and are read before it."""
    stem = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
    path = next(path for number in itertools.count() if not (path := directory / f"{stem}.{number}").exists())
    return path.open("xb")
