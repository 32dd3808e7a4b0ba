"""Trackers, on request: trackio (local), wandb and mlflow get the scalars that TensorBoard gets, under the same names.

None is a dependency, and none is imported or contacted unless the user asks for it. Each is its own library's few calls.
Invariant: a tracker that fails is reported once and left; no step depends on it.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from headrace.report.scalars import scalars_of
from headrace.terms.errors import ConfigError, in_one_line
from headrace.terms.events import Event

PROJECT = "headrace"
Log = Callable[[dict[str, float], int], object]


def _logging(package: str) -> Callable[[str, Mapping[str, Any]], tuple[Log, Callable[[], object]]]:
    """Return how to begin with a library of wandb's form: `init`, `log` and `finish`."""

    def begin(name: str, options: Mapping[str, Any]) -> tuple[Log, Callable[[], object]]:
        library = import_module(package)
        library.init(project=PROJECT, name=name, config=dict(options), resume="allow")
        return (lambda values, step: library.log(values, step=step)), library.finish

    return begin


def _begin_mlflow(name: str, options: Mapping[str, Any]) -> tuple[Log, Callable[[], object]]:
    library = import_module("mlflow")
    library.start_run(run_name=name)
    library.log_params({key: str(value)[:250] for key, value in options.items()})
    return (lambda values, step: library.log_metrics(values, step=step)), library.end_run


_TRACKERS: Mapping[str, Callable[[str, Mapping[str, Any]], tuple[Log, Callable[[], object]]]] = {
    "trackio": _logging("trackio"),
    "wandb": _logging("wandb"),
    "mlflow": _begin_mlflow,
}
TRACKERS = tuple(_TRACKERS)


class Tracker:
    """Reports a run to the tracker `kind` as `name`, with its `options`; `say` gets a notice if that fails.

    Raises:
        ConfigError: the tracker's package is not installed, or cannot begin.
    """

    def __init__(self, kind: str, name: str, options: Mapping[str, Any], *, say: Callable[[str], object]) -> None:
        self._kind, self._say = kind, say
        try:
            begun = _TRACKERS[kind](name, options)
        except ImportError as error:
            raise ConfigError(
                f"report_to: {kind} was asked for, but its package is missing; run `pip install {kind}`"
            ) from error
        except Exception as error:  # each library has its own
            raise ConfigError(
                f"report_to: {kind} could not begin ({in_one_line(error)}); correct that, or leave it out"
            ) from error
        self._log: Log | None = begun[0]
        self._finish: Callable[[], object] | None = begun[1]

    def __call__(self, event: Event) -> None:
        """Take the end of a step or of an evaluation."""
        found, log = scalars_of(event), self._log
        if found is not None and log is not None:
            step, scalars = found
            self._tried(lambda: log(scalars, step))

    def close(self) -> None:
        """End the tracker's run. A second call does nothing."""
        finish, self._log, self._finish = self._finish, None, None
        if finish is not None:
            self._tried(finish)

    def _tried(self, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:
            self._log = self._finish = None
            self._say(f"{self._kind} gets no more figures of this run: {in_one_line(error)}")
