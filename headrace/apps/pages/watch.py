"""A run's page, live: a small server on loopback that draws the page when the run's files have changed.

Invariants: it only reads; it answers this machine alone. Drawing takes at most a share of `_LEAST_PAUSE` of the time, so that
the run that is watched is not slowed down.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from headrace.apps.pages.findings import find
from headrace.apps.pages.page import render
from headrace.apps.pages.run_files import FILES, read_run
from headrace.terms.errors import ConfigError, HeadraceError

# After a page was drawn, none is drawn for so many times as long.
_LEAST_PAUSE = 20
_ADDRESS = "127.0.0.1"


class WatchServer(ThreadingHTTPServer):
    """Serves the page of the run in `directory` at `address` until `shutdown`."""

    daemon_threads = True

    def __init__(self, directory: Path, port: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        """Draw the page once, and listen.

        Raises:
            RunDirectoryError: there is no such run directory, or nothing of a run is in it.
            ConfigError: the port is taken.
        """
        self._directory, self._clock, self._lock = directory, clock, threading.Lock()
        self._draw()
        try:
            super().__init__((_ADDRESS, port), _Handler)
        except OSError as error:
            raise ConfigError(f"port: {port} cannot be listened on ({error.strerror}); give another, or 0 for any") from error

    @property
    def address(self) -> str:
        """Where a browser finds the page."""
        return f"http://{_ADDRESS}:{self.server_port}"

    def page_after(self, seen: str) -> str | None:
        """Return the page if it says more than the one with the stamp `seen`."""
        with self._lock:
            if self._clock() >= self._next and _stamp(self._directory) != self._stamp:
                with suppress(HeadraceError):  # the directory is gone, or being made again: what it was is still shown
                    self._draw()
            return self._page if self._stamp != seen else None

    def _draw(self) -> None:
        stamp, began = _stamp(self._directory), self._clock()
        run = read_run(self._directory)
        self._page, self._stamp = render(run, find(run), stamp=stamp), stamp
        self._next = self._clock() + _LEAST_PAUSE * (self._clock() - began)


def _stamp(directory: Path) -> str:
    """Return what changes when a file of the run does."""
    stats = []
    for name in FILES:
        try:
            status = (directory / name).stat()
        except OSError:
            continue
        stats.append(f"{name}.{status.st_size}.{status.st_mtime_ns}")
    return "-".join(stats)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WatchServer

    def do_GET(self) -> None:
        """Answer with the page, or without one if the browser has the newest."""
        host = self.headers.get("Host", "").rpartition(":")[0]
        asked = urlsplit(self.path)
        if host not in (_ADDRESS, "localhost"):  # another site's name that leads here
            self._send(403, "")
        elif asked.path != "/":
            self._send(404, "")
        else:
            seen = parse_qs(asked.query).get("seen", [""])[0]
            page = self.server.page_after(seen)
            self._send(200 if page is not None else 204, page or "")

    def log_message(self, *words: Any) -> None:
        """Say nothing."""

    def _send(self, status: int, page: str) -> None:
        content = page.encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Cache-Control", "no-store")
        if status != 204:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
