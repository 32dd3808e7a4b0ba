"""Who connects and asks nothing has ten seconds, and keeps nobody else out; names that the server is called by are checked."""

import asyncio
import gc
import socket
import weakref
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import uvicorn
from served import Serve, Server
from uvicorn.server import ServerState

from headrace.model.seats import seats
from headrace.serve import connections
from headrace.serve.connections import HEADER_SECONDS, Connection


class Loop:
    """Keeps what is to be called, and calls nothing by itself."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def call_later(self, seconds: float, call: Callable[..., None], *arguments: Any) -> Any:
        handle = type("Handle", (), {"seconds": seconds, "call": staticmethod(call), "over": False})()
        handle.cancel = lambda: setattr(handle, "over", True)
        self.calls.append(handle)
        return handle

    def create_task(self, work: Any, **more: Any) -> Any:
        work.close()
        return asyncio.Future(loop=asyncio.new_event_loop())

    @property
    def due(self) -> list[Any]:
        return [each for each in self.calls if not each.over]


class Transport:
    aborted = False

    def abort(self) -> None:
        self.aborted = True

    def get_extra_info(self, name: str) -> Any:
        return None


@pytest.fixture
def made() -> Callable[[], tuple[Connection, Transport, Loop]]:
    config, state = uvicorn.Config(lambda: None, log_config=None), ServerState()

    def make() -> tuple[Connection, Transport, Loop]:
        loop, transport = Loop(), Transport()
        connection = Connection(config, state, {}, loop)  # type: ignore[arg-type]
        connection.connection_made(transport)  # type: ignore[arg-type]
        return connection, transport, loop

    return make


def test_headers_have_ten_seconds_from_the_first_byte_however_slowly_they_come(made: Any) -> None:
    connection, transport, loop = made()
    for piece in (b"GET /health HTTP/1.1\r\n", b"Host: x\r\n", b"X-", b"a"):
        connection.data_received(piece)
    assert [each.seconds for each in loop.due] == [HEADER_SECONDS]
    loop.due[0].call()
    assert transport.aborted


def test_a_request_whose_headers_have_come_is_not_hurried(made: Any) -> None:
    connection, transport, loop = made()
    connection.data_received(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n")
    assert loop.due == []
    connection.data_received(b"12")
    assert loop.due == []
    assert not transport.aborted


def test_the_oldest_that_asks_nothing_makes_way(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MOST_SILENT", 3)
    found = [made() for _ in range(2)]
    asks = made()
    asks[0].data_received(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n")
    found += [made() for _ in range(3)]
    assert [transport.aborted for _, transport, _ in found] == [True, True, False, False, False]
    assert not asks[1].aborted


def test_health_answers_beside_many_that_ask_nothing(server: Server) -> None:
    url = httpx.URL(server.serving.address)
    held = [socket.create_connection((str(url.host), url.port)) for _ in range(100)]
    for each in held:
        each.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-")
    try:
        assert server.http.get("/health").status_code == 200
        assert server.post("/v1/completions", prompt="water", max_tokens=1).status_code == 200
    finally:
        for each in held:
            each.close()


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:8000", 200),
        ("LOCALHOST.:80", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil", 403),
    ],
)
def test_on_loopback_the_server_is_called_by_names_of_loopback(server: Server, host: str, status: int) -> None:
    """A page in a browser may have a name whose address its owner changes to 127.0.0.1."""
    for path in ("/health", "/v1/models"):
        found = server.http.get(path, headers={"host": host})
        assert found.status_code == status
    if status == 403:
        assert "--allowed-hosts" in found.json()["error"]["message"]


@pytest.mark.wide
def test_names_that_are_allowed_are_those_that_were_given(serve_it: Serve) -> None:
    with serve_it(allowed_hosts=["My.Host"]) as server:
        for host, status in (("my.host:80", 200), ("127.0.0.1", 403), ("localhost", 403)):
            assert server.http.get("/v1/models", headers={"host": host}).status_code == status


@pytest.mark.parametrize(
    "body",
    [
        '{"\\ud83d": 1, "prompt": "a"}',
        '{"prompt": "\\ud83d"}',
        '{"prompt": "a", "model": "\\udc00"}',
        '{"prompt": "a", "stop": ["\\ud83d"]}',
        '{"prompt": "a", "stream_options": {"\\ud83d": 1}}',
        b'{"prompt": "\xed\xa0\xbd"}',
        b'{"prompt": "\xff"}',
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_half_a_character_anywhere_in_a_body_is_refused(server: Server, path: str, body: str | bytes) -> None:
    found = server.http.post(path, content=body, headers={"content-type": "application/json"})
    assert found.status_code == 400
    assert "half a character" in found.json()["error"]["message"]


def test_a_seat_that_is_done_is_let_go(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    made, real = list[Any](), seats.Seat.__init__

    def init(seat: Any, *arguments: Any, **more: Any) -> None:
        made.append(weakref.ref(seat))
        real(seat, *arguments, **more)

    monkeypatch.setattr(seats.Seat, "__init__", init)
    for _ in range(6):
        assert server.post("/v1/completions", prompt="water", max_tokens=1).status_code == 200
    gc.collect()
    assert len(made) == 6
    assert sum(each() is not None for each in made) <= 3, "as many as there are seats, at most"
