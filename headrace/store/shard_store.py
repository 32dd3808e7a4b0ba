"""One rank's part of the state of a run that several ranks share out: the chunks that it holds, and commits that all make.

Each rank writes a record of its own; that of rank 0, written last, counts. Invariant: a slot that the record of rank 0 names
is not written to before its next record is durable and its writer has heard so.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from headrace.files import Bytes, DoneTicket, Ticket
from headrace.store.places import FamilyPlace
from headrace.store.state_store import StateStore
from headrace.terms.errors import StorageError


class Others(Protocol):
    """The other ranks, as a store sees them."""

    def read_chunk(self, unit: int, family: str, chunk: int, num_chunks: int, into: Bytes) -> None:
        """Fill `into` with a chunk that another rank holds."""

    def write_chunk(self, unit: int, family: str, chunk: int, num_chunks: int, data: Bytes) -> None:
        """Give a chunk to the rank that holds it."""

    def commit_together(self, prepare: Callable[[Mapping[str, Any]], int], record: Mapping[str, Any]) -> None:
        """Have all ranks commit: `prepare` commits here, and returns the number of the commit."""


class ShardStore(StateStore):
    """A store of a rank. `others` must be set before the first commit; while `reaches`, what they hold is read and written."""

    others: Others | None = None
    reaches: bool = False

    def commit(self, record: Mapping[str, Any]) -> None:
        """Make all writes of all ranks durable together. See `StateStore.commit`."""
        assert self.others is not None, "a store of one rank knows the others"

        def prepare(content: Mapping[str, Any]) -> int:
            StateStore.commit(self, content)
            return self.committed_version

        self.others.commit_together(prepare, record)

    def _read_of_others(self, place: FamilyPlace, into: Bytes, chunk: int | None) -> Ticket | None:
        if not self.reaches or (chunk is not None and place.own(chunk)):
            return super()._read_of_others(place, into, chunk)
        assert self.others is not None, "a store of one rank knows the others"
        start = 0
        for each in range(len(place.whole)) if chunk is None else (chunk,):
            content = into[start : start + place.whole[each]]
            if content.size != place.whole[each]:
                raise StorageError(f"{place.label}: buffer of {into.size} bytes, expected those of {len(place.whole)} chunks")
            if place.own(each):
                self.read(place.unit, place.family, content, each).wait()
            else:
                self.others.read_chunk(place.unit, place.family, each, len(place.whole), content)
            start += content.size
        return DoneTicket()

    def _write_of_others(self, place: FamilyPlace, chunk: int, data: Bytes) -> Ticket:
        if self.reaches and self.others is not None:
            self.others.write_chunk(place.unit, place.family, chunk, len(place.whole), data)
        return DoneTicket()
