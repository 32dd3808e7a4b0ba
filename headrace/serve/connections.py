"""Connections that have not asked yet: each has a time for its headers, and there is a most of them.

Invariant: who connects and says nothing keeps nobody else out. What a request may take begins with its headers (`serve.app`).
"""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 10.0
# The oldest makes way for another one.
MOST_SILENT = 256


class Connection(H11Protocol):
    """uvicorn's, closed where the headers of a request do not come in time."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for headers."""
        super().connection_made(transport)
        self._timer: asyncio.TimerHandle | None = None
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Take what came; the headers of a further request have their time from their first byte on."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._end_wait()
        elif self._timer is None:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the wait."""
        self._end_wait()
        super().connection_lost(exc)

    @property
    def _silent(self) -> dict[Any, None]:
        """The connections of this server that have not asked yet, the oldest first."""
        found: dict[Any, None] = self.server_state.__dict__.setdefault("silent", {})
        return found

    def _wait(self) -> None:
        self._timer = self.loop.call_later(HEADER_SECONDS, self._close)
        self._silent[self] = None
        if len(self._silent) > MOST_SILENT:
            next(iter(self._silent))._close()

    def _end_wait(self) -> None:
        self._silent.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close(self) -> None:
        self._end_wait()
        self.transport.abort()
