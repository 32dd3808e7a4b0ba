"""Errors become one plain line and an exit code.

Invariant: what a user or a disk can cause never shows a traceback, and a mistake of our own always does. Exit codes: 2 for
anything refused, 130 and 143 for an interrupted run, as in shells.
"""

import contextlib
import errno
import functools
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NoReturn, ParamSpec, TypeVar

from headrace.cli.streams import give_up
from headrace.terms.errors import (
    HeadraceError,
    InputError,
    MembershipFailed,
    PeerLost,
    PlanInfeasible,
    StepFailed,
    StorageError,
)

REFUSED = 2
INTERRUPTED = 130

# Advice for a named place that the system refuses.
_PERMISSIONS = "change its permissions, or those of a directory above it, or name another place"
_SPACE = "free some space, or name another place"
_ADVICE = {
    errno.EACCES: _PERMISSIONS,
    errno.EPERM: _PERMISSIONS,
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ENOSPC: _SPACE,
    errno.EDQUOT: _SPACE,
}
# What separates the places in a text such as `ssd=[/nvme0, /nvme1]`; names may have spaces in them.
_NO_PLACE = re.compile(r"[=,\[\]\"'\n]+")

_P = ParamSpec("_P")
_R = TypeVar("_R")


def plainly(command: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return `command` so that its expected errors are printed in one line on stderr. See also `places_plainly`."""

    @functools.wraps(command)
    def run(*arguments: _P.args, **options: _P.kwargs) -> _R:
        try:
            with places_plainly(lambda: (*arguments, *options.values())):
                return command(*arguments, **options)
        except (InputError, PlanInfeasible, StorageError, PeerLost, MembershipFailed) as error:
            leave(str(error), REFUSED)
        except StepFailed as error:
            leave_failed_step(error, "RUN_DIR")
        except KeyboardInterrupt:
            leave("interrupted", INTERRUPTED)

    return run


@contextlib.contextmanager
def places_plainly(words: Callable[[], Iterable[object]]) -> Iterator[None]:
    """Report in one line that the system refuses a place that `words()` name, or one above or below such a place."""
    try:
        yield
    except OSError as error:
        place = None if isinstance(error, HeadraceError) else _named_place(error, words())
        if place is None:
            raise
        advice = _ADVICE.get(error.errno or 0, "remove the cause, or name another place")
        leave(f"{place}: {error.strerror}; {advice}", REFUSED)


def _named_place(error: OSError, words: Iterable[object]) -> str | None:
    """Return the path that `error` is about, if `words` name it or a path above or below it."""
    named = {form for word in words for place in _places(word) for form in _forms(place)}
    for found in (error.filename, error.filename2):
        if not isinstance(found, str | bytes | os.PathLike):
            continue  # it is None, or the number of an open file
        path = os.fsdecode(found)
        if any(one.is_relative_to(other) or other.is_relative_to(one) for one in _forms(path) for other in named):
            return path
    return None


def _places(word: object) -> Iterator[str]:
    """Yield every text in the value of an option or an argument that may name a place."""
    if isinstance(word, Path):
        yield str(word)
    elif isinstance(word, str):
        yield from {part.strip() for part in (word, *_NO_PLACE.split(word)) if part.strip()}
    elif isinstance(word, list | tuple):
        for each in word:
            yield from _places(each)


def _forms(place: str) -> set[Path]:
    """Return the absolute place in two forms: as it is written, and with links followed."""
    return {Path(os.path.abspath(place)), Path(os.path.realpath(place))}


def leave_failed_step(error: StepFailed, run_directory: object) -> NoReturn:
    """Report what a disk did to a step, or which peer it lost, and how to go on; a mistake of our own is raised again."""
    cause = error.__cause__
    while cause is not None and not isinstance(cause, StorageError | PeerLost):
        cause = cause.__cause__
    if cause is None:
        raise error
    if isinstance(cause, PeerLost):
        leave_lost_rank(cause, run_directory)
    words = str(error) if str(cause) in str(error) else f"{error}: {cause}"
    leave(f"{words}; remove the cause, then resume with: headrace resume {run_directory}", REFUSED)


def leave_lost_rank(lost: PeerLost, run_directory: object) -> NoReturn:
    """Report which rank of a run that torchrun started is lost, and how to go on."""
    words = f"{lost}; the last committed step is untouched"
    leave(f"{words}: start all ranks again by torchrun, with: headrace resume {run_directory}", REFUSED)


@contextlib.contextmanager
def plain_usage_errors() -> Iterator[None]:
    """Report errors in the words of a command line in one line, with a pointer to the help. Do the same if the output of --help
    cannot be written.
    """
    try:
        yield
    except StorageError as error:
        leave(str(error), REFUSED)
    except Exception as error:
        # It is recognised by what it offers, because Typer brings its own copy of Click in some versions and imports it in
        # others.
        if type(error).__name__ == "Abort":
            leave("interrupted", INTERRUPTED)
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        path = getattr(getattr(error, "ctx", None), "command_path", "headrace")
        leave(f"{message().rstrip('.')}; see `{path} --help`", REFUSED)


def leave(message: str, exit_code: int) -> NoReturn:
    """Print `message` as one line on stderr and end the process with `exit_code`."""
    try:
        sys.stderr.write(f"error: {' '.join(message.split())}\n")
        sys.stderr.flush()
    except OSError:  # the exit code says it
        give_up(sys.stderr)
    raise SystemExit(exit_code)
