"""Errors to one plain line and an exit code.

Invariant: what a user or a disk can cause never shows a traceback, what is our own mistake always does. Exit codes: 2 for
anything refused, 130 and 143 for an interrupted run, as shells have them.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn, ParamSpec, TypeVar

from headrace.cli.streams import give_up
from headrace.spec.errors import InputError, PlanInfeasible, StepFailed, StorageError

REFUSED = 2
INTERRUPTED = 130

_P = ParamSpec("_P")
_R = TypeVar("_R")


def plainly(command: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return `command` with its expected errors said in one line on stderr."""

    @functools.wraps(command)
    def run(*arguments: _P.args, **options: _P.kwargs) -> _R:
        try:
            return command(*arguments, **options)
        except (InputError, PlanInfeasible, StorageError) as error:
            leave(str(error), REFUSED)
        except StepFailed as error:
            leave_failed_step(error, "RUN_DIR")
        except KeyboardInterrupt:
            leave("interrupted", INTERRUPTED)

    return run


def leave_failed_step(error: StepFailed, run_directory: object) -> NoReturn:
    """Say what a disk did to a step, and how to go on; what is our own mistake is raised again."""
    cause = error.__cause__
    while cause is not None and not isinstance(cause, StorageError):
        cause = cause.__cause__
    if cause is None:
        raise error
    words = str(error) if str(cause) in str(error) else f"{error}: {cause}"
    leave(f"{words}; remove the cause, then go on with: headrace resume {run_directory}", REFUSED)


@contextlib.contextmanager
def plain_usage_errors() -> Iterator[None]:
    """Say what is wrong with the words of a command line in one line too, with the place of the help. What --help cannot be
    written to is said in the same way.
    """
    try:
        yield
    except StorageError as error:
        leave(str(error), REFUSED)
    except Exception as error:
        # Known by what it offers: Typer brings its own copy of Click in some versions and imports it in others.
        if type(error).__name__ == "Abort":
            leave("interrupted", INTERRUPTED)
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        path = getattr(getattr(error, "ctx", None), "command_path", "headrace")
        leave(f"{message().rstrip('.')}; see `{path} --help`", REFUSED)


def leave(message: str, exit_code: int) -> NoReturn:
    """Say `message` as one line on stderr and end the process with `exit_code`."""
    try:
        sys.stderr.write(f"error: {' '.join(message.split())}\n")
        sys.stderr.flush()
    except OSError:  # then the exit code says it
        give_up(sys.stderr)
    raise SystemExit(exit_code)
