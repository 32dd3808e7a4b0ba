"""Machines on a network of our own: a network namespace for each, cables to a switch in another one, shaped where asked for.

Needs root and the commands `ip` and `tc` (iproute2). Nothing of it is left behind, nor seen by the machine's own network.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parents[2]
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}


def why_not() -> str | None:
    """Return why there can be no such network here, None if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "ip and tc are missing (the package iproute2)"
    trial = f"headrace-trial-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", trial], capture_output=True, check=False).returncode:
        return "this kernel, or this container, makes no network namespaces"
    _call("ip", "netns", "del", trial)
    return None


class Network:
    """`count` machines, number 0 first, with cables of `megabits` per second each way (None: as fast as memory)."""

    def __init__(self, count: int, megabits: float | None = None) -> None:
        self._prefix, self._count, self._megabits = f"hr{os.getpid()}", count, megabits
        self._processes: list[subprocess.Popen[str]] = []

    def address(self, number: int) -> str:
        """Return the machine's address."""
        return f"10.77.0.{number + 1}"

    def __enter__(self) -> "Network":
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._remove()

    def start(self, number: int, *words: str, **more: Any) -> subprocess.Popen[str]:
        """Start Python with these words on a machine; what it prints can be read from its `stdout`."""
        command = ["ip", "netns", "exec", self._name(number), sys.executable, *words]
        path = os.pathsep.join([str(ROOT), *(str(ROOT / "tests" / each) for each in ("", "namespaces"))])
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "bufsize": 1}
        environment = {**os.environ, **_ENVIRONMENT, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        process: subprocess.Popen[str] = subprocess.Popen(command, env=environment, **{**pipes, **more})
        self._processes.append(process)
        return process

    def moved(self, number: int) -> tuple[int, int]:
        """Return the bytes that the machine has sent and received, as the kernel counts them, headers of packets included."""
        where = "/sys/class/net/eth0/statistics"
        found = _call("ip", "netns", "exec", self._name(number), "cat", f"{where}/tx_bytes", f"{where}/rx_bytes")
        sent, received = found.split()
        return int(sent), int(received)

    def unplug(self, number: int) -> None:
        """Pull the machine's cable: nobody is told, packets are lost."""
        _call("ip", "-n", self._switch, "link", "set", f"port{number}", "down")

    def plug(self, number: int) -> None:
        """Put it back."""
        _call("ip", "-n", self._switch, "link", "set", f"port{number}", "up")

    def _name(self, number: int) -> str:
        return f"{self._prefix}-{number}"

    @property
    def _switch(self) -> str:
        return f"{self._prefix}-switch"

    def _build(self) -> None:
        _call("ip", "netns", "add", self._switch)
        _call("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _call("ip", "-n", self._switch, "link", "set", "bridge", "up")
        for number in range(self._count):
            name, port = self._name(number), f"port{number}"
            _call("ip", "netns", "add", name)
            ends = ("type", "veth", "peer", "name", "eth0", "netns", name)
            _call("ip", "-n", self._switch, "link", "add", port, *ends)
            _call("ip", "-n", self._switch, "link", "set", port, "master", "bridge", "up")
            _call("ip", "-n", name, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _call("ip", "-n", name, "link", "set", link, "up")
            if self._megabits is not None:
                for where, link in ((name, "eth0"), (self._switch, port)):
                    shape = ("tbf", "rate", f"{self._megabits}mbit", "burst", "128kb", "latency", "100ms")
                    _call("tc", "-n", where, "qdisc", "add", "dev", link, "root", *shape)

    def _remove(self) -> None:
        for name in (*(self._name(number) for number in range(self._count)), self._switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _call(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
