"""The bytes between a store and its drives, counted from one query to the next, so that nothing is missed."""

from headrace.store import StateStore
from headrace.terms.events import Flushed


class Traffic:
    """Bytes and CPU seconds of `store` since the last question, or, before the first one, since this object was made."""

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._before = self._now()

    def moved(self) -> Flushed:
        """Return what has been read and written since the last call."""
        before, self._before = self._before, self._now()
        read, written, seconds = (now - then for now, then in zip(self._before, before, strict=True))
        return Flushed(bytes_read={"ssd": int(read)}, bytes_written={"ssd": int(written)}, io_cpu_seconds=seconds)

    def _now(self) -> tuple[int, int, float]:
        return self._store.bytes_read, self._store.bytes_written, self._store.io_cpu_seconds
