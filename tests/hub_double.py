"""A double of the Hugging Face Hub on loopback: it serves a directory as a model or data set, as `huggingface_hub` asks.

What is sent to it, it keeps in that directory: small files come with the commit, weights by the protocol of large files.
"""

import base64
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "c" * 40


class HubDouble(ThreadingHTTPServer):
    """Serves the files of `directory` as the model or data set `name`. `requests` has method, path and headers of each one.

    While `cut_bytes` is set, each answer breaks off after so many bytes; with `stall_bytes`, it stops there and waits.
    With a `token`, who has another one is refused. `sent` has the names of files that came by the protocol of large files,
    `commits` those of each commit. While `refuse_commits` is set, commits fail. `at_upload` is called before a file is taken.
    """

    daemon_threads = True

    def __init__(self, name: str, directory: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.name, self.directory = name, directory
        self.cut_bytes: int | None = None
        self.stall_bytes: int | None = None
        self.token: str | None = None
        self.sent: list[str] = []
        self.commits: list[list[str]] = []
        self.refuse_commits = False
        self.at_upload: Callable[[], object] = lambda: None
        self.private: bool | None = None
        self.objects: dict[str, bytes] = {}
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

    def do_PUT(self) -> None:
        self.server.at_upload()
        content = self._body()
        self.server.sent.append(digest := hashlib.sha256(content).hexdigest())
        self.server.objects[digest] = content
        self._send(200, b"", {}, with_body=True)

    def do_POST(self) -> None:
        hub, path, body = self.server, self.path.partition("?")[0], self._body()
        hub.requests.append((self.command, path, dict(self.headers)))
        if hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self._send(401, b"", {}, with_body=True)
        elif path == "/api/repos/create":
            asked = json.loads(body)
            hub.private = bool(hub.private or asked.get("private") or asked.get("visibility") == "private")
            self._tell({"url": f"{hub.address}/{hub.name}"})
        elif path == "/api/validate-yaml":
            self._tell({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            large = (".safetensors", ".gguf")
            self._tell(
                {
                    "files": [
                        {
                            "path": each["path"],
                            "uploadMode": "lfs" if each["path"].endswith(large) else "regular",
                            "shouldIgnore": False,
                        }
                        for each in json.loads(body)["files"]
                    ]
                }
            )
        elif path.endswith("/info/lfs/objects/batch"):
            objects: list[dict[str, object]] = []
            for each in json.loads(body)["objects"]:
                href = {"upload": {"href": f"{hub.address}/objects/{each['oid']}"}}
                objects.append({**each, **({} if each["oid"] in hub.objects else {"actions": href})})
            self._tell({"transfer": "basic", "objects": objects})
        elif "/commit/" in path and hub.refuse_commits:
            self._send(403, b"", {"X-Error-Message": "No room is left."}, with_body=True)
        elif "/commit/" in path:
            told = [json.loads(line) for line in body.splitlines()]
            hub.commits.append(sorted(self._keep(each["key"], each["value"]) for each in told if each["key"] != "header"))
            self._tell({"commitUrl": f"{hub.address}/{hub.name}/commit/{COMMIT}", "commitOid": COMMIT})
        else:
            self._send(404, b"", {}, with_body=True)

    def _keep(self, kind: str, value: dict[str, str]) -> str:
        content = self.server.objects[value["oid"]] if kind == "lfsFile" else base64.b64decode(value["content"])
        (self.server.directory / value["path"]).write_bytes(content)
        return value["path"]

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _tell(self, answer: dict[str, object]) -> None:
        self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"}, with_body=True)

    def log_message(self, *words: object) -> None:
        pass

    def _answer(self, *, with_body: bool) -> None:
        hub, path = self.server, self.path.partition("?")[0]
        at_name = path.removeprefix("/datasets")
        hub.requests.append((self.command, path, dict(self.headers)))
        if hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self._send(401, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted."}, with_body)
        elif path == "/api/whoami-v2":
            self._send(200, json.dumps({"type": "user", "name": hub.name.partition("/")[0]}).encode(), {}, with_body)
        elif path.startswith((f"/api/models/{hub.name}", f"/api/datasets/{hub.name}")):
            files = sorted(file for file in hub.directory.iterdir())
            siblings = [{"rfilename": file.name, "size": file.stat().st_size} for file in files]
            tree = [{"type": "file", "path": file.name, "size": file.stat().st_size, "oid": _etag(file)} for file in files]
            info = {"id": hub.name, "modelId": hub.name, "sha": COMMIT, "private": False, "siblings": siblings, "tags": []}
            self._send(200, json.dumps(tree if "/tree/" in path else info).encode(), {}, with_body)
        elif at_name.startswith(f"/{hub.name}/resolve/") and (file := hub.directory / path.rpartition("/")[2]).is_file():
            self._send_file(file, with_body=with_body)
        else:
            code = "EntryNotFound" if at_name.startswith(f"/{hub.name}/") else "RepoNotFound"
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
        cut, stall = self.server.cut_bytes, self.server.stall_bytes
        if with_body and stall is not None and stall < len(body):
            self.wfile.write(body[:stall])
            self.wfile.flush()
            while self.server.stall_bytes is not None:
                time.sleep(0.01)
            self.close_connection = True
        elif with_body:
            self.wfile.write(body if cut is None else body[:cut])
            self.close_connection = cut is not None and cut < len(body)


def _etag(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
