"""A double of the Hugging Face Hub on loopback: it serves one directory as a model, as far as `huggingface_hub` asks."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "c" * 40


class HubDouble(ThreadingHTTPServer):
    """Serves the files of `directory` as the model `name`. `requests` has method, path and headers of each one.

    While `cut_bytes` is set, each answer breaks off after so many bytes. With a `token`, who has another one is refused.
    """

    daemon_threads = True

    def __init__(self, name: str, directory: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.name, self.directory = name, directory
        self.cut_bytes: int | None = None
        self.token: str | None = None
        self.requests: list[tuple[str, str, dict[str, str]]] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def hub_of(name: str, directory: Path) -> Iterator[HubDouble]:
    with HubDouble(name, directory) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubDouble

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, *words: object) -> None:
        pass

    def _answer(self, *, with_body: bool) -> None:
        hub, path = self.server, self.path.partition("?")[0]
        hub.requests.append((self.command, path, dict(self.headers)))
        if hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self._send(401, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted."}, with_body)
        elif path.startswith(f"/api/models/{hub.name}"):
            files = sorted(file for file in hub.directory.iterdir())
            siblings = [{"rfilename": file.name, "size": file.stat().st_size} for file in files]
            tree = [{"type": "file", "path": file.name, "size": file.stat().st_size, "oid": _etag(file)} for file in files]
            info = {"id": hub.name, "modelId": hub.name, "sha": COMMIT, "private": False, "siblings": siblings, "tags": []}
            self._send(200, json.dumps(tree if "/tree/" in path else info).encode(), {}, with_body)
        elif path.startswith(f"/{hub.name}/resolve/") and (file := hub.directory / path.rpartition("/")[2]).is_file():
            self._send_file(file, with_body=with_body)
        else:
            code = "EntryNotFound" if path.startswith(f"/{hub.name}/") else "RepoNotFound"
            self._send(404, b"", {"X-Error-Code": code, "X-Repo-Commit": COMMIT}, with_body)

    def _send_file(self, file: Path, *, with_body: bool) -> None:
        content, start = file.read_bytes(), 0
        headers = {"ETag": f'"{_etag(file)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if (asked := self.headers.get("Range")) is not None:
            start = int(asked.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._send(206 if asked else 200, content[start:], headers, with_body)

    def _send(self, status: int, body: bytes, headers: dict[str, str], with_body: bool) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        cut = self.server.cut_bytes
        if with_body:
            self.wfile.write(body if cut is None else body[:cut])
            self.close_connection = cut is not None and cut < len(body)


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()
