"""The transfers of a store that are under way: which reads and writes a new one has to wait for.

Callers hold the store's table lock. Only `settle` waits for a ticket here.
"""

import contextlib
from collections.abc import Iterable, Sequence

from headrace.files import Ticket
from headrace.store.places import FamilyPlace
from headrace.terms.errors import StorageError


class Transfers:
    """Reads by place, and the last write of each chunk of a place since the last commit."""

    def __init__(self, places: Iterable[FamilyPlace]) -> None:
        self.writes: dict[tuple[FamilyPlace, int], Ticket] = {}
        self._reads: dict[FamilyPlace, list[tuple[int, Sequence[int], Ticket]]] = {place: [] for place in places}

    def note_read(self, place: FamilyPlace, slot: int, chunks: Sequence[int], ticket: Ticket) -> None:
        """Note that chunks of a slot are being read."""
        under_way = [entry for entry in self._reads[place] if not entry[2].done]
        self._reads[place] = [*under_way, (slot, chunks, ticket)]

    def in_the_way(self, place: FamilyPlace, slot: int, chunk: int) -> list[Ticket]:
        """Return the transfers under way where `chunk` is to be written."""
        reads = [read for read_slot, chunks, read in self._reads[place] if read_slot == slot and chunk in chunks]
        earlier = self.writes.get((place, chunk))
        return [ticket for ticket in (earlier, *reads) if ticket is not None and not ticket.done]

    def settle_all(self) -> None:
        """Wait until all are done; that one failed is not said again."""
        reads = [ticket for entries in self._reads.values() for _, _, ticket in entries]
        for ticket in [*self.writes.values(), *reads]:
            with contextlib.suppress(StorageError):
                ticket.wait()


def settle(ticket: Ticket) -> None:
    """Wait until `ticket` is done, failed or not; raise only if it is not."""
    try:
        ticket.wait()
    except StorageError:
        if not ticket.done:
            raise
