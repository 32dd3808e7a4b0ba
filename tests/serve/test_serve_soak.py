"""A server under random clients for about ten minutes: it answers to the end, and its memory stays flat.

Some clients ask, some stream, some go away in the middle, some send nonsense, some say nothing. How long it takes is the
machine's; what is counted are requests. Run: pytest -m deep tests/serve
"""

import contextlib
import json
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from served import STANDSTILL_SECONDS

pytestmark = [pytest.mark.process, pytest.mark.deep]

REQUESTS, CLIENTS = 6000, 12
# Of the last half of all requests, each may leave so much: what was kept of each was 25 KiB.
MOST_BYTES_A_REQUEST = 2048


@pytest.fixture
def served(model: Path) -> Iterator[tuple[str, int]]:
    """Give the address of a server in a process of its own, and its process's number; it ends well."""
    values = {"port": 0, "max_requests": 8, "max_length": 128, "host_memory": "2GiB"}
    words = [sys.executable, str(Path(__file__).with_name("served_under_load.py")), str(model), json.dumps(values)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield str(json.loads(process.stdout.readline())).removesuffix("/v1"), process.pid
            process.send_signal(signal.SIGINT)
            assert process.wait(STANDSTILL_SECONDS) == 0
        finally:
            process.kill()


def resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


def ask(address: str, draw: random.Random) -> int:
    """Be one client; return the status of the answer, 0 where this client wants none."""
    body = {"prompt": "water " * draw.randint(1, 8), "max_tokens": draw.randint(1, 12), "seed": draw.randint(0, 9)}
    kind = draw.choice(["plain", "plain", "chat", "stream", "leave", "nonsense", "half", "silent", "health"])
    host, _, port = address.removeprefix("http://").partition(":")
    if kind == "silent":
        with socket.create_connection((host, int(port))) as taken:
            taken.sendall(b"POST /v1/completions HTTP/1.1\r\nHo")
        return 0
    with httpx.Client(base_url=address, timeout=STANDSTILL_SECONDS) as client:
        if kind == "health":
            return client.get("/health").status_code
        if kind == "nonsense":
            content = bytes(draw.randrange(256) for _ in range(30))
            return client.post("/v1/completions", content=content, headers={"content-type": "application/json"}).status_code
        if kind == "half":
            text = '{"prompt": "a", "\\ud83d": 1}'
            return client.post("/v1/completions", content=text, headers={"content-type": "application/json"}).status_code
        if kind == "chat":
            turns = [{"role": "user", "content": body.pop("prompt")}]
            return client.post("/v1/chat/completions", json={**body, "messages": turns}).status_code
        if kind == "plain":
            return client.post("/v1/completions", json=body).status_code
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as found:
            for _ in found.iter_lines():
                if kind == "leave":
                    break
            return found.status_code


def test_memory_is_flat_under_random_clients(served: tuple[str, int]) -> None:
    address, pid = served
    found, sizes = list[int](), list[int]()
    with ThreadPoolExecutor(CLIENTS) as clients:
        for part in range(4):
            draws = [random.Random(part * REQUESTS + number) for number in range(REQUESTS // 4)]
            found += clients.map(lambda draw: ask(address, draw), draws)
            sizes.append(resident_bytes(pid))
    assert set(found) <= {0, 200, 400, 429}, "nobody is shut out, and nothing fails"
    assert found.count(200) > REQUESTS // 4
    grown = (sizes[3] - sizes[1]) / (REQUESTS // 2)
    assert grown <= MOST_BYTES_A_REQUEST, sizes
    with contextlib.closing(httpx.Client(base_url=address)) as client:
        assert client.get("/health").status_code == 200
