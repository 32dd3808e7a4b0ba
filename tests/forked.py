"""Processes that are forked from a server which has imported the engine: a start costs a hundredth of what a fresh one does.

What it imports, how it takes signals and what memory it has are not those of a fresh process: tests of these start their own.
"""

import functools
import importlib
import itertools
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PROCESSES = multiprocessing.get_context("forkserver")
# All tests of a process have one server, so there is one list; a name that cannot be imported is passed over.
PROCESSES.set_forkserver_preload(
    [
        *("headrace.cli.app", "headrace.runs.engines", "headrace.peers.node.worker", "headrace.compress.run"),
        *("headrace.ask.answer", "headrace.peers.node.planning", "transformers.models.llama.modeling_llama"),
        *("trainee", "node_processes", "job_with_caches", "compressing"),
    ]
)


def run_headrace(
    *words: object, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout: float = 280.0
) -> subprocess.CompletedProcess[str]:
    """Run the command `headrace` as `subprocess.run` would: with streams, directory, environment and exit code of its own.

    Raises:
        subprocess.TimeoutExpired: it took longer than `timeout` seconds, and was killed.
    """
    command = ["headrace", *map(str, words)]
    readers, writers = zip(*(PROCESSES.Pipe(duplex=False) for _ in range(2)), strict=True)
    process = PROCESSES.Process(target=_be, args=(command, writers, str(cwd or Path.cwd()), dict(env or os.environ)))
    process.start()
    for writer in writers:
        writer.close()
    with ThreadPoolExecutor(2) as threads:
        texts = [threads.submit(_text_of, reader) for reader in readers]
        process.join(timeout)
        if late := process.exitcode is None:
            process.kill()
            process.join()
    out, error = (text.result() for text in texts)
    if late:
        raise subprocess.TimeoutExpired(command, timeout, out, error)
    return subprocess.CompletedProcess(command, process.exitcode, out, error)


def _text_of(reader: Connection) -> str:
    with open(reader.fileno(), encoding="utf-8", closefd=False) as file:
        text = file.read()
    reader.close()
    return text


def _be(command: list[str], writers: tuple[Connection, ...], cwd: str, env: dict[str, str]) -> None:
    for number, (name, writer) in enumerate(zip(("stdout", "stderr"), writers, strict=True), start=1):
        os.dup2(writer.fileno(), number)
        writer.close()
        setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115 -- until the process ends
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = command
    runpy.run_module("headrace", run_name="__main__", alter_sys=True)


def kill_at(moment: str) -> None:
    """Kill this process at `moment`, "module:name:count:side": at one call of a function, before or after it."""
    module, path, count, side = moment.split(":")
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    function, calls = getattr(owner, name), itertools.count(1)

    def deadly(*given: Any, **more: Any) -> Any:
        is_now = next(calls) == int(count)
        if is_now and side == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        found = function(*given, **more)
        if is_now:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(owner, name, deadly)
