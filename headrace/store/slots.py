"""Which slot of a family holds what: the rule that makes every step a checkpoint. No input or output here.

A *group* is one family of one unit. Its writes go to the slot that is not *its* committed one, over earlier uncommitted
versions. They count only once every chunk is written. Invariants: the committed slot is never written to; a reader gets chunks
of one version only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.terms.errors import StorageError

# Slot of a group that was never written: it reads as zeros.
VIRGIN = -1


@dataclass(frozen=True, slots=True)
class GroupVersion:
    """A complete version of a group: its slot (or `VIRGIN`), the commit that made it durable, a checksum per chunk."""

    slot: int
    version: int
    checksums: tuple[int, ...]


class GroupSlots:
    """The committed version of one group, and what has been written since."""

    def __init__(self, name: str, num_chunks: int, committed: GroupVersion | None = None, *, once: bool = False) -> None:
        self.name = name
        self.once = once
        self.num_chunks = num_chunks
        self.committed = committed or GroupVersion(VIRGIN, 0, (0,) * num_chunks)
        self._complete = False  # whether `slot_to_write` holds a version newer than the committed one
        self._begun: set[int] = set()  # chunks of the version after that
        self._checksums = [0] * num_chunks

    @property
    def slot_to_write(self) -> int:
        """The slot that is not committed; slot 0 for a group that never was.

        Raises:
            StorageError: the group is written once, and was.
        """
        if self.once and self.committed.slot != VIRGIN:
            raise StorageError(f"{self.name}: is written once, and was committed; nothing may change it")
        return 0 if self.committed.slot == VIRGIN else 1 - self.committed.slot

    @property
    def num_missing(self) -> int:
        """Chunks that must still be written until the version begun is complete; 0 if none is begun."""
        return self.num_chunks - len(self._begun) if self._begun else 0

    def slot_to_read(self, chunks: Sequence[int]) -> int:
        """Return the slot that holds `chunks` of the newest complete version, or `VIRGIN`.

        Raises:
            StorageError: that version is uncommitted, and one of `chunks` was overwritten by the next, which is not complete.
        """
        if not self._complete:
            return self.committed.slot
        lost = self._begun.intersection(chunks)
        if lost:
            raise StorageError(
                f"{self.name}: chunk {min(lost)} was asked after it was written anew and before the other "
                f"{self.num_missing} of {self.num_chunks} chunks were; write all chunks first"
            )
        return self.slot_to_write

    def note_write(self, chunk: int, checksum: int) -> None:
        """Take note that `chunk` goes to `slot_to_write`."""
        self._checksums[chunk] = checksum
        self._begun.add(chunk)
        if len(self._begun) == self.num_chunks:
            self._begun.clear()
            self._complete = True

    def newest(self, version: int) -> GroupVersion:
        """Return what commit number `version` must record: the version written since the last commit, else the committed one.

        Raises:
            StorageError: a version is begun and not complete; committing it would mix two steps.
        """
        if self._begun:
            raise StorageError(
                f"{self.name}: commit asked while {self.num_missing} of {self.num_chunks} chunks are not written yet; "
                "write all chunks of a unit or none, or abandon the step"
            )
        if not self._complete:
            return self.committed
        return GroupVersion(self.slot_to_write, version, tuple(self._checksums))

    def commit(self, newest: GroupVersion) -> None:
        """Take note that `newest` is durable."""
        self.committed = newest
        self._forget()

    def abandon(self) -> None:
        """Forget what was written since the last commit."""
        self._forget()

    def _forget(self) -> None:
        self._complete = False
        self._begun = set()
        self._checksums = [0] * self.num_chunks
