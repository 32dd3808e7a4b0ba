"""The last commit of a store, read while the next step is under way.

Invariant: nothing overwrites what is read. Steps write to the slots that are not committed, and the next commit waits.
"""

from collections.abc import Callable
from typing import Protocol

from headrace.files import Bytes, Ticket
from headrace.store.manifest import Manifest
from headrace.terms.closing import Closing


class ReadableState(Protocol):
    """What gives a model's weights away: a store, with its newest version, or its last commit."""

    @property
    def manifest(self) -> Manifest:
        """What the store was created with."""

    def read(self, unit: int, family: str, into: Bytes, chunk: int | None = None) -> Ticket:
        """Start reading one chunk of a family, or all of it."""


class CommittedState(Closing):
    """The last commit of a store. Until this is closed, the next one waits; `StateStore.committed` makes it."""

    def __init__(
        self, manifest: Manifest, read: Callable[[int, str, Bytes, int | None], Ticket], release: Callable[[], None]
    ) -> None:
        self.manifest, self._read, self._release = manifest, read, release
        self._closed = False

    def read(self, unit: int, family: str, into: Bytes, chunk: int | None = None) -> Ticket:
        """Start reading one chunk of a family, or all of it: as it was committed, zeros if it never was.

        Raises:
            StorageError: `into` has another size, or the unit has no such family on the drives.
        """
        return self._read(unit, family, into, chunk)

    def close(self) -> None:
        """Let the next commit go on. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._release()
