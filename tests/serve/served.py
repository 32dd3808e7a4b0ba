"""A server in a thread of this process, whose passes a test can hold."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI
from transformers.utils import logging

from headrace.serve import Serving, serve
from headrace.terms.events import Event, GenerationPass
from headrace.terms.options.serve_options import ServeOptions

logging.set_verbosity_error()
logging.disable_progress_bar()
STANDSTILL_SECONDS = 200.0


class Passes:
    """A sink that can stop passes between two of them."""

    def __init__(self) -> None:
        self._may_go = threading.Event()
        self._may_go.set()

    def __call__(self, event: Event) -> None:
        if isinstance(event, GenerationPass):
            self._may_go.wait(STANDSTILL_SECONDS)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """While entered, no pass begins after the running one."""
        self._may_go.clear()
        try:
            yield
        finally:
            self._may_go.set()


class Server:
    """A running server and its clients."""

    def __init__(self, serving: Serving, passes: Passes) -> None:
        self.serving, self.passes = serving, passes
        self.http = httpx.Client(base_url=serving.address.removesuffix("/v1"), timeout=STANDSTILL_SECONDS)
        self.client = OpenAI(base_url=serving.address, api_key="any", timeout=STANDSTILL_SECONDS, max_retries=0)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def figure(self, name: str) -> float:
        lines = self.http.get("/metrics").text.splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(f"{name} "))

    def until(self, name: str, value: float) -> None:
        """Wait for a figure; the limit only ends a standstill."""
        end = time.monotonic() + STANDSTILL_SECONDS
        while self.figure(name) != value:
            assert time.monotonic() < end, (name, self.figure(name), value)
            time.sleep(0.01)


@contextlib.contextmanager
def serving(model: Path, **options: Any) -> Iterator[Server]:
    """Serve `model`; at the end all that began has been answered, and the thread has ended without an error."""
    passes, begun, errors = Passes(), threading.Event(), list[BaseException]()
    found: list[Serving] = []
    values = {"port": 0, "host_memory": "4GiB", "seats": 3, "max_requests": 8, "max_length": 128, **options}

    def run() -> None:
        try:
            serve(model, ServeOptions.of(values), sink=passes, tell_plan=lambda plan: None, ready=ready)
        except BaseException as error:
            errors.append(error)
        finally:
            begun.set()

    def ready(each: Serving) -> None:
        found.append(each)
        begun.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert begun.wait(STANDSTILL_SECONDS)
    if errors:
        thread.join()
        raise errors[0]
    server = Server(found[0], passes)
    try:
        yield server
    finally:
        server.http.close()
        server.client.close()
        found[0].end()
        thread.join(STANDSTILL_SECONDS)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


Serve = Callable[..., contextlib.AbstractContextManager[Server]]
