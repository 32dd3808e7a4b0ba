"""The command: a signal ends it after what is under way, what cannot be is one line and exit code 2.

Run: pytest tests/serve
"""

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from forked import run_headrace
from served import STANDSTILL_SECONDS
from talking_model import save_talking_model

pytestmark = pytest.mark.process


@pytest.fixture
def command(model: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The running command, and its address."""
    words = ("serve", model, "--port", "0", "--host-memory", "4GiB", "--seats", "1")
    process = subprocess.Popen([sys.executable, "-m", "headrace", *map(str, words)], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    address = next(line.split(" answers at ")[1].split("/v1")[0] for line in process.stderr if " answers at " in line)
    yield process, address
    process.kill()
    process.wait()
    process.stderr.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_after_what_is_under_way(command: tuple[subprocess.Popen[str], str], number: signal.Signals) -> None:
    """What is in a seat is answered whole; what waits for one is told that the server ends."""
    process, address = command
    body = {"messages": [{"role": "user", "content": "w"}], "max_tokens": 90, "temperature": 0, "stream": True}
    waits = threading.Event()

    def second() -> httpx.Response:
        waits.wait()
        return httpx.post(f"{address}/v1/completions", json={"prompt": "w"}, timeout=STANDSTILL_SECONDS)

    with ThreadPoolExecutor(1) as threads, httpx.Client(timeout=STANDSTILL_SECONDS) as client:
        other = threads.submit(second)
        with client.stream("POST", f"{address}/v1/chat/completions", json=body) as found:
            lines = found.iter_lines()
            next(lines)
            waits.set()
            while "headrace_waiting 1.0" not in httpx.get(f"{address}/metrics").text and not other.done():
                time.sleep(0.01)
            process.send_signal(number)
            whole = list(lines)
        refused = other.result()
    assert whole[-2] == "data: [DONE]"
    assert '"finish_reason": "length"' in whole[-4] or '"finish_reason": "stop"' in whole[-4]
    assert refused.status_code in (200, 503)  # it was answered if the first was done before
    assert process.wait(STANDSTILL_SECONDS) == 0


def test_a_second_signal_ends_it_at_once(command: tuple[subprocess.Popen[str], str]) -> None:
    process, _ = command
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    assert process.wait(STANDSTILL_SECONDS) in (0, 130)


def test_what_cannot_be_served_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    model = save_talking_model(tmp_path / "tiny")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for words in (("--port", port), ("--host", "0.0.0.0"), ("--max-length", 65), ("--port", 99999), ("--seats", 0)):
            found = run_headrace("serve", model, *words)
            assert found.returncode == 2
            assert found.stderr.startswith("error: ")
            assert found.stderr.count("\n") == 1
            assert found.stdout == ""
