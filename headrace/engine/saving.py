"""The newest weights of a run, written as a model directory: between two steps, or by a thread of its own beside the next one.

Invariant: what is written is the last commit. The next commit waits for it: a run that is killed meanwhile goes on from that
commit, and can write the same directory again.
"""

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from headrace.engine.subject import Subject
from headrace.files import Bytes, Ticket
from headrace.store import Manifest, StateStore
from headrace.store.committed import CommittedState, ReadableState
from headrace.terms.closing import Closing
from headrace.terms.errors import HeadraceError
from headrace.terms.provenance import PROVENANCE_NAME
from headrace.terms.saving import Saving


class Saver(Closing):
    """Writes the weights of `store`, which are those of `subject`; a file says their `provenance`."""

    def __init__(self, subject: Subject, store: StateStore, provenance: Callable[[], dict[str, Any]]) -> None:
        self._subject, self._store, self._provenance = subject, store, provenance
        self._under_way: _Beside | None = None

    def write(self, directory: Path, notes: Mapping[str, str]) -> None:
        """Write a model directory with `notes` as files; return when it is whole. Raises as `Subject.export`."""
        self.settle()
        self._subject.export(self._store, directory, self._with_provenance(notes))

    def begin(self, directory: Path, notes: Mapping[str, str]) -> Saving:
        """Begin to write the last commit, and return at once; everything must be committed."""
        self.settle()
        self._under_way = _Beside(self._subject, self._store.committed(), directory, self._with_provenance(notes))
        return self._under_way

    def _with_provenance(self, notes: Mapping[str, str]) -> dict[str, str]:
        return {**notes, PROVENANCE_NAME: json.dumps(self._provenance()) + "\n"}

    def settle(self) -> None:
        """Wait for what is under way. That it failed is told to whoever began it."""
        if self._under_way is not None:
            self._under_way.join()
            self._under_way = None

    def close(self) -> None:
        """End what is under way; nothing is left of it."""
        if self._under_way is not None:
            self._under_way.stop()
            self.settle()


class _Stopped(HeadraceError):
    """A copy was ended before it was whole."""


class _Beside:
    """A model directory that a thread writes."""

    def __init__(self, subject: Subject, state: CommittedState, directory: Path, notes: Mapping[str, str]) -> None:
        self._subject, self._state, self._directory, self._notes = subject, state, directory, notes
        self._stopped = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._write, name="headrace checkpoint", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the directory is whole; raise what its thread met."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def stop(self) -> None:
        """Let the thread end at its next read."""
        self._stopped = True

    # What an export reads.

    @property
    def manifest(self) -> Manifest:
        """What the store was created with."""
        return self._state.manifest

    def read(self, unit: int, family: str, into: Bytes, chunk: int | None = None) -> Ticket:
        """Start reading what was committed."""
        if self._stopped:
            raise _Stopped(f"{self._directory}: ended before it was whole; nothing is left of it")
        return self._state.read(unit, family, into, chunk)

    def _write(self) -> None:
        state: ReadableState = self
        try:
            with self._state, torch.no_grad():
                self._subject.export(state, self._directory, self._notes)
        except BaseException as failure:
            self._failure = failure
