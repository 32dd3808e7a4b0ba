"""Stdout and stderr as they really are: full, closed, or a pipe without a reader.

Invariant: a failure to write to stdout is an error of its own, never taken for one of a run's files.
"""

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from headrace.terms.errors import StorageError


class StdoutLost(StorageError):
    """Stdout cannot be written."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error.errno, error.strerror, "stdout")

    def __str__(self) -> str:
        return f"stdout: cannot be written ({self.strerror})"


@contextlib.contextmanager
def guarded_streams() -> Iterator[None]:
    """Make stdout raise `StdoutLost`; if there is no stdout or stderr, put one in place that discards everything.

    Raises:
        StdoutLost: what is left to be written at the end cannot be written.
    """
    # An opened file gets the lowest free number. It must not get a stream's number, or a library's output would go into it.
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - as long as the process
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        _never_refuse_signs(stream)
    before = sys.stdout
    sys.stdout = guarded = _Guarded(before)
    try:
        yield
        guarded.flush()
    finally:
        sys.stdout = before


def _never_refuse_signs(stream: TextIO) -> None:
    """Write signs that the stream's encoding does not have as backslash escapes, unless the user chose another way."""
    utf8 = (stream.encoding or "").lower().replace("-", "") == "utf8"
    if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", *(() if utf8 else ("surrogateescape",))):
        stream.reconfigure(errors="backslashreplace")


class _Guarded:
    """A text stream that raises `StdoutLost` when its file refuses something, and at every later call: a library may ignore the
    first error.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._cause: OSError | None = None

    def write(self, text: str) -> int:
        """Write `text`.

        Raises:
            StdoutLost: it cannot be written.
        """
        with self._refusals():
            return self._stream.write(text)

    def flush(self) -> None:
        """Pass on what is buffered.

        Raises:
            StdoutLost: it cannot be written.
        """
        with self._refusals():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            if self._cause is None:
                yield
        except OSError as error:
            self._cause = error
            give_up(self._stream)
        if self._cause is not None:
            raise StdoutLost(self._cause) from self._cause


def give_up(stream: TextIO) -> None:
    """Lead a stream to nowhere: otherwise Python tries at its end to write what is left, and fails with code 120."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
