"""The bytes between a store and its drives, counted from one query to the next, so that nothing is missed."""

from typing import Protocol

from headrace.store import StateStore
from headrace.terms.events import Flushed
from headrace.update.tables.table_rows import TableRows


class DriveReader(Protocol):
    """What else reads the drives."""

    @property
    def bytes_read(self) -> int:
        """Bytes that it has read so far."""


class Traffic:
    """Bytes and CPU seconds of `store`, and bytes of `rows` of tables and of `others`, since the last question.

    Before the first one it is since this object was made.
    """

    def __init__(self, store: StateStore, rows: TableRows | None, *others: DriveReader) -> None:
        self._store, self._rows, self._others = store, rows, others
        self._before = self._now()

    def moved(self) -> Flushed:
        """Return what has been read and written since the last call."""
        before, self._before = self._before, self._now()
        read, written, seconds = (now - then for now, then in zip(self._before, before, strict=True))
        return Flushed(bytes_read={"ssd": int(read)}, bytes_written={"ssd": int(written)}, io_cpu_seconds=seconds)

    def _now(self) -> tuple[int, int, float]:
        store, rows = self._store, self._rows
        read, written = (rows.bytes_read, rows.bytes_written) if rows is not None else (0, 0)
        read += sum(each.bytes_read for each in self._others)
        return store.bytes_read + read, store.bytes_written + written, store.io_cpu_seconds
