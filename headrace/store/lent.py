"""Families that lie in files that others keep, such as a model's own. The store has no place for them and only reads them.

Invariant: no commit names them, and nothing is written there.
"""

from typing import Protocol

from headrace.files import Bytes, Ticket
from headrace.terms.errors import StorageError


class LentFiles(Protocol):
    """Files that others keep, in which families lie that are only read."""

    @property
    def bytes_read(self) -> int:
        """Bytes read so far."""

    def read(self, unit: int, into: Bytes) -> Ticket:
        """Start reading a unit's bytes, each to its place in `into`."""

    def read_span(self, unit: int, start: int, into: Bytes) -> Ticket:
        """Start reading a part of a unit's bytes, from byte `start` on; both in whole pages."""

    def close(self) -> None:
        """Close the files, when nothing is under way. A second call does nothing."""


class NothingLent:
    """No such files."""

    bytes_read = 0

    def read(self, unit: int, into: Bytes) -> Ticket:
        """See `LentFiles.read`."""
        raise StorageError(f"unit {unit}: its weights lie in the model's files, which this store was not given")

    def read_span(self, unit: int, start: int, into: Bytes) -> Ticket:
        """See `LentFiles.read_span`."""
        return self.read(unit, into)

    def close(self) -> None:
        """See `LentFiles.close`."""
